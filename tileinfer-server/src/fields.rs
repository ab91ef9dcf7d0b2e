//! A JSON object of a request, read field by field: each is taken out with its type checked, and what nobody
//! took is refused by name. It knows no field itself.

use serde_json::{Map, Value};

use crate::error::{ApiError, ApiResult};

/// What is left of an object.
#[derive(Debug)]
pub(crate) struct Fields {
    left: Map<String, Value>,
    /// Stands before the names of fields in errors: empty, or the object's own name and a dot.
    prefix: String,
}

impl Fields {
    /// The object that is the body of a request.
    pub(crate) fn from_body(body: &[u8]) -> ApiResult<Self> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(left)) => Ok(Fields {
                left,
                prefix: String::new(),
            }),
            Ok(_) => Err(ApiError::invalid("the body must be a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the body is not JSON: {error}"))),
        }
    }

    /// All fields of an object that stands for a request.
    pub(crate) fn of(left: Map<String, Value>) -> Self {
        Fields {
            left,
            prefix: String::new(),
        }
    }

    /// The object that is the field `name`.
    pub(crate) fn object(&mut self, name: &str) -> ApiResult<Option<Fields>> {
        let prefix = format!("{}{name}.", self.prefix);
        Ok(self.map(name)?.map(|left| Fields { left, prefix }))
    }

    /// An object found elsewhere, called `name` in errors.
    pub(crate) fn within(name: &str, value: Value) -> ApiResult<Self> {
        match value {
            Value::Object(left) => Ok(Fields {
                left,
                prefix: format!("{name}."),
            }),
            other => Err(ApiError::field(
                name,
                format!("{name} is {}, it must be an object", brief(&other)),
            )),
        }
    }

    /// The field `name`; null is the same as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.left.remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn string(&mut self, name: &str) -> ApiResult<Option<String>> {
        self.typed(name, "a string", |value| match value {
            Value::String(text) => Some(text),
            _ => None,
        })
    }

    /// A string that has to be there.
    pub(crate) fn needed(&mut self, name: &str) -> ApiResult<String> {
        let path = format!("{}{name}", self.prefix);
        self.string(name)?
            .ok_or_else(|| ApiError::field(&path, format!("{path} is missing")))
    }

    pub(crate) fn flag(&mut self, name: &str) -> ApiResult<Option<bool>> {
        self.typed(name, "true or false", |value| value.as_bool())
    }

    pub(crate) fn number(&mut self, name: &str) -> ApiResult<Option<f32>> {
        self.typed(name, "a number", |value| {
            value.as_f64().map(|number| number as f32)
        })
    }

    /// A whole number, 0 or more.
    pub(crate) fn count(&mut self, name: &str) -> ApiResult<Option<usize>> {
        self.typed(name, "a whole number, 0 or more", |value| {
            value.as_u64().map(|number| number as usize)
        })
    }

    pub(crate) fn integer(&mut self, name: &str) -> ApiResult<Option<i64>> {
        self.typed(name, "a whole number", |value| {
            value
                .as_i64()
                .or_else(|| value.as_u64().map(|number| number as i64))
        })
    }

    pub(crate) fn list(&mut self, name: &str) -> ApiResult<Option<Vec<Value>>> {
        self.typed(name, "a list", |value| match value {
            Value::Array(list) => Some(list),
            _ => None,
        })
    }

    pub(crate) fn map(&mut self, name: &str) -> ApiResult<Option<Map<String, Value>>> {
        self.typed(name, "an object", |value| match value {
            Value::Object(map) => Some(map),
            _ => None,
        })
    }

    /// A list of token ids.
    pub(crate) fn ids(&mut self, name: &str) -> ApiResult<Option<Vec<u32>>> {
        self.typed(name, "a list of token ids", |value| ids(&value))
    }

    /// Fields that ask for nothing: accepted, whatever they say.
    pub(crate) fn let_pass(&mut self, names: &[&str]) {
        for name in names {
            self.left.remove(*name);
        }
    }

    /// Refuses what nobody took.
    pub(crate) fn finish(self) -> ApiResult<()> {
        match self.left.iter().find(|(_, value)| !value.is_null()) {
            Some((name, _)) => {
                let name = format!("{}{name}", self.prefix);
                let reason =
                    format!("the field '{name}' is not supported by this server; leave it out");
                Err(ApiError::unsupported(&name, &reason))
            }
            None => Ok(()),
        }
    }

    fn typed<T>(
        &mut self,
        name: &str,
        what: &str,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> ApiResult<Option<T>> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let shown = brief(&value);
        let name = format!("{}{name}", self.prefix);
        read(value)
            .map(Some)
            .ok_or_else(|| ApiError::field(&name, format!("{name} is {shown}, it must be {what}")))
    }
}

/// A list of token ids, if `value` is one.
pub(crate) fn ids(value: &Value) -> Option<Vec<u32>> {
    value
        .as_array()?
        .iter()
        .map(|id| u32::try_from(id.as_u64()?).ok())
        .collect()
}

/// A value in an error: short.
pub(crate) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
