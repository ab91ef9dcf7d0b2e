//! Which address leads where, who is let in, and the small services beside the answers.

use std::sync::atomic::Ordering::Relaxed;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Path, Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt;
use serde_json::{Value, json};
use tileinfer::engine::EngineState;

use crate::answers::{App, aside};
use crate::chat::{chat_completions, prompt_of};
use crate::completions::completions;
use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::messages::{count_tokens, messages};

/// All routes.
pub(crate) fn router(app: &App) -> Router {
    let keyed = Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(one_model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(app.clone(), limit_body))
        .layer(middleware::from_fn_with_state(app.clone(), ask_for_key));
    Router::new()
        .merge(keyed)
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(|method: Method, request: Request| async move {
            ApiError::not_found(format!("there is no {method} {}", request.uri().path()))
        })
        .method_not_allowed_fallback(|method: Method, request: Request| async move {
            ApiError::method_not_allowed(format!("{} does not take {method}", request.uri().path()))
        })
        .layer(middleware::from_fn(no_panic))
        .layer(middleware::from_fn(errors_of_anthropic))
        .layer(middleware::from_fn_with_state(app.clone(), cors))
        .with_state(app.clone())
}

async fn page() -> Response {
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    (
        [(header::CONTENT_SECURITY_POLICY, policy)],
        Html(include_str!("page.html")),
    )
        .into_response()
}

/// 200 if a request would be taken, else 503 and why.
async fn health(Shared(app): Shared<App>) -> Response {
    let status = match app.loaded().map(|loaded| loaded.model.engine.state()) {
        None => "loading".to_owned(),
        Some(_) if app.draining.load(Relaxed) => "shutting down".to_owned(),
        Some(EngineState::Running) => return axum::Json(json!({"status": "ok"})).into_response(),
        Some(EngineState::Stopped) => "stopped".to_owned(),
        Some(EngineState::Dead(reason)) => format!("dead: {reason}"),
    };
    (
        StatusCode::SERVICE_UNAVAILABLE,
        axum::Json(json!({"status": status})),
    )
        .into_response()
}

async fn metrics(Shared(app): Shared<App>) -> ApiResult<Response> {
    let (name, engine) = match app.loaded() {
        Some(loaded) => (
            loaded.model.name.as_str(),
            loaded.model.engine.metrics().snapshot(),
        ),
        None => Default::default(),
    };
    let text = app.metrics.render(name, engine);
    let text =
        text.map_err(|error| ApiError::internal(format!("metrics cannot be written: {error}")))?;
    Ok((
        [(
            header::CONTENT_TYPE,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        )],
        text,
    )
        .into_response())
}

fn described(app: &App) -> ApiResult<Value> {
    let loaded = app.ready()?;
    Ok(json!({
        "id": loaded.model.name,
        "object": "model",
        "created": loaded.created,
        "owned_by": "tileinfer",
        "max_model_len": loaded.model.engine.max_length(),
    }))
}

async fn models(Shared(app): Shared<App>) -> ApiResult<axum::Json<Value>> {
    Ok(axum::Json(
        json!({"object": "list", "data": [described(&app)?]}),
    ))
}

async fn one_model(
    Shared(app): Shared<App>,
    Path(name): Path<String>,
) -> ApiResult<axum::Json<Value>> {
    let model = described(&app)?;
    match model["id"].as_str() {
        Some(served) if served != name => Err(ApiError::no_model(&name, served)),
        _ => Ok(axum::Json(model)),
    }
}

async fn tokenize(Shared(app): Shared<App>, body: Bytes) -> ApiResult<axum::Json<Value>> {
    let loaded = app.ready()?;
    aside(move || {
        let mut fields = Fields::from_body(&body)?;
        let model = &loaded.model;
        fields.let_pass(&["model"]);
        let with_text = fields.flag("return_token_strs")?.unwrap_or(false);
        let ids = match fields.string("prompt")? {
            Some(text) => {
                let special = fields.flag("add_special_tokens")?.unwrap_or(true);
                model.tokenizer.encode(&text, special)?
            }
            None => prompt_of(&mut fields, &app, &loaded)?,
        };
        fields.finish()?;
        let mut answer =
            json!({"tokens": ids, "count": ids.len(), "max_model_len": model.engine.max_length()});
        if with_text {
            answer["token_strs"] = ids
                .iter()
                .map(|&id| model.tokenizer.token(id))
                .collect::<Value>();
        }
        Ok(axum::Json(answer))
    })
    .await
}

async fn detokenize(Shared(app): Shared<App>, body: Bytes) -> ApiResult<axum::Json<Value>> {
    let loaded = app.ready()?;
    let mut fields = Fields::from_body(&body)?;
    fields.let_pass(&["model"]);
    let ids = fields
        .ids("tokens")?
        .ok_or_else(|| ApiError::field("tokens", "tokens is missing"))?;
    fields.finish()?;
    Ok(axum::Json(
        json!({"prompt": loaded.model.tokenizer.decode(&ids, false)}),
    ))
}

/// Reads the body up to the limit, so that handlers have it whole.
async fn limit_body(Shared(app): Shared<App>, request: Request, next: Next) -> Response {
    let limit = app.options.max_body_bytes;
    let (parts, body) = request.into_parts();
    let mut pieces = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        match piece {
            Ok(piece) if bytes.len() + piece.len() <= limit => bytes.extend_from_slice(&piece),
            Ok(_) => return ApiError::too_large(limit).into_response(),
            Err(error) => {
                return ApiError::invalid(format!("the body could not be read: {error}"))
                    .into_response();
            }
        }
    }
    next.run(Request::from_parts(parts, Body::from(bytes)))
        .await
}

/// Lets in who has the key, where one is needed.
async fn ask_for_key(Shared(app): Shared<App>, request: Request, next: Next) -> Response {
    if let Some(key) = &app.options.api_key
        && !has_key(request.headers(), key)
    {
        return ApiError::unauthorized().into_response();
    }
    next.run(request).await
}

fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = header("authorization").and_then(|value| value.strip_prefix("Bearer "));
    // Clients of Anthropic's API send one or the other, or both.
    let sent = [bearer, header("x-api-key")];
    sent.into_iter().flatten().any(|sent| is_same(sent, key))
}

/// Takes as long for every wrong key, so that time says nothing about it.
fn is_same(sent: &str, key: &str) -> bool {
    let pairs = sent.bytes().zip(key.bytes().cycle());
    let differences = pairs.fold(0, |all, (a, b)| all | (a ^ b));
    differences == 0 && sent.len() == key.len()
}

/// Lets pages of the allowed origins in.
async fn cors(Shared(app): Shared<App>, request: Request, next: Next) -> Response {
    let allowed = &app.options.cors_origins;
    let origin = request.headers().get(header::ORIGIN).cloned();
    let origin = origin.filter(|origin| {
        allowed
            .iter()
            .any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes())
    });
    let Some(origin) = origin else {
        return next.run(request).await;
    };
    let asks_first = request.method() == Method::OPTIONS;
    let mut response = if asks_first {
        StatusCode::NO_CONTENT.into_response()
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("origin"));
    if asks_first {
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, POST"),
        );
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static(
                "authorization, content-type, x-api-key, anthropic-version, anthropic-beta",
            ),
        );
        headers.insert(
            header::ACCESS_CONTROL_MAX_AGE,
            HeaderValue::from_static("600"),
        );
    }
    response
}

/// Errors of the messages API are spelled as its clients know them.
async fn errors_of_anthropic(request: Request, next: Next) -> Response {
    let here = request.uri().path().starts_with("/v1/messages");
    let mut response = next.run(request).await;
    if here && let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let body = axum::Json(error.anthropic_body())
            .into_response()
            .into_body();
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = body;
    }
    response
}

/// Makes an error of a panic. When the client goes away the work goes with it.
async fn no_panic(request: Request, next: Next) -> Response {
    struct Work(tokio::task::JoinHandle<Response>);
    impl Drop for Work {
        fn drop(&mut self) {
            self.0.abort();
        }
    }
    let mut work = Work(tokio::spawn(next.run(request)));
    (&mut work.0).await.unwrap_or_else(|_| {
        ApiError::internal("the request set off a panic. This is a bug, please report it")
            .into_response()
    })
}
