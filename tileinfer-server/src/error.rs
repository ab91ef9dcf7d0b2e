//! Errors as clients of OpenAI's API know them: a status, and an object that says what is wrong, of which
//! field, in which words a program can tell apart.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tileinfer::{Error, ErrorKind};

/// Seconds after which a client that was turned away may try again.
const RETRY_AFTER_SECONDS: u32 = 1;

/// An error with a status.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
        }
    }

    /// The request is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field of the request is wrong.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError {
            param: Some(param.into()),
            ..ApiError::invalid(message)
        }
    }

    /// A field that this server does not know or cannot honour.
    pub(crate) fn unsupported(param: &str, reason: &str) -> Self {
        ApiError {
            code: Some("unsupported_parameter"),
            ..ApiError::field(param, reason)
        }
    }

    /// No model of this name.
    pub(crate) fn no_model(name: &str, served: &str) -> Self {
        let message = format!("the model '{name}' does not exist; this server has '{served}'");
        let code = Some("model_not_found");
        ApiError {
            param: Some("model".to_owned()),
            code,
            ..ApiError::not_found(message)
        }
    }

    /// No such thing.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// The thing is there, the method is not.
    pub(crate) fn method_not_allowed(message: impl Into<String>) -> Self {
        ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            message,
        )
    }

    /// More bytes than this server reads.
    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("the request is larger than {limit} bytes, the limit of this server");
        ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            message,
        )
    }

    /// No key, or a wrong one.
    pub(crate) fn unauthorized() -> Self {
        let message = "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'";
        let error = ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message);
        ApiError {
            code: Some("invalid_api_key"),
            ..error
        }
    }

    /// Not now.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "service_unavailable",
            message,
        )
    }

    /// A mistake of this program.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Names the field that the error is about.
    pub(crate) fn about(self, param: &str) -> Self {
        ApiError {
            param: Some(param.to_owned()),
            ..self
        }
    }

    /// As the body of an answer, or an event of a stream that has begun.
    pub(crate) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl ApiError {
    /// The same as Anthropic's API tells it.
    pub(crate) fn anthropic_body(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match (&error, error.kind()) {
            (Error::ContextFull { .. }, _) => ApiError {
                code: Some("context_length_exceeded"),
                ..ApiError::field("messages", message)
            },
            (_, ErrorKind::Usage) => ApiError::invalid(message),
            (Error::QueueFull { .. }, _) => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            }
            (_, ErrorKind::Overload | ErrorKind::System) => ApiError::unavailable(message),
            (_, ErrorKind::BadModel | ErrorKind::Bug) => ApiError::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        if matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        ) {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, RETRY_AFTER_SECONDS.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For who spells it in another way on its way out.
        response.extensions_mut().insert(self);
        response
    }
}
