//! Typed access to a JSON object whose complaints name the file, the field, the value found and the values allowed.

use crate::{Error, Result};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;
use std::path::Path;

/// One JSON object of a file.
pub(super) struct Fields<'a> {
    pub(super) file: &'a Path,
    /// Where the object stands in the file: empty, or `text_config.` and the like.
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(file: &'a Path, value: &'a Value) -> Result<Self> {
        let map = value
            .as_object()
            .ok_or_else(|| Error::bad_model(file, "not a JSON object; download the file again"))?;
        Ok(Fields {
            file,
            prefix: String::new(),
            map,
        })
    }

    /// The value of a field; `None` if it is absent or null.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is there and null, which is not always the same as absent.
    pub(super) fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map.keys().map(String::as_str)
    }

    /// An error about a field.
    pub(super) fn error(&self, name: &str, reason: impl std::fmt::Display) -> Error {
        Error::bad_model(self.file, format!("{}{name} {reason}", self.prefix))
    }

    /// An error about a field whose value is not one of those allowed.
    pub(super) fn wrong(&self, name: &str, allowed: impl std::fmt::Display) -> Error {
        let value = self.map.get(name).unwrap_or(&Value::Null).to_string();
        let mut shown: String = value.chars().take(60).collect();
        if shown.len() < value.len() {
            shown.push('…');
        }
        self.error(name, format_args!("is {shown}; it must be {allowed}"))
    }

    /// A whole number. Python programs sometimes write `8192.0`, which counts as one.
    pub(super) fn whole(&self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_u64()
            .or_else(|| {
                let number = value.as_f64()?;
                let whole = number as u64;
                (whole as f64 == number).then_some(whole)
            })
            .and_then(|number| usize::try_from(number).ok())
            .filter(|number| range.contains(number))
            .map(Some)
            .ok_or_else(|| {
                let (low, high) = (range.start(), range.end());
                self.wrong(name, format_args!("a whole number from {low} to {high}"))
            })
    }

    /// A whole number that the file must have.
    pub(super) fn required(&self, name: &str, range: RangeInclusive<usize>) -> Result<usize> {
        self.whole(name, range)?
            .ok_or_else(|| self.error(name, "is missing"))
    }

    /// A number within bounds.
    pub(super) fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_f64()
            .filter(|number| range.contains(number))
            .map(Some)
            .ok_or_else(|| {
                let (low, high) = (range.start(), range.end());
                self.wrong(name, format_args!("a number from {low:e} to {high:e}"))
            })
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.get(name)
            .map(|value| {
                value
                    .as_bool()
                    .ok_or_else(|| self.wrong(name, "true or false"))
            })
            .transpose()
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.get(name)
            .map(|value| value.as_str().ok_or_else(|| self.wrong(name, "a string")))
            .transpose()
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        self.get(name)
            .map(|value| {
                let list = value.as_array().ok_or_else(|| self.wrong(name, "a list"))?;
                Ok(list.as_slice())
            })
            .transpose()
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        self.get(name)
            .map(|value| {
                let map = value
                    .as_object()
                    .ok_or_else(|| self.wrong(name, "an object"))?;
                Ok(Fields {
                    file: self.file,
                    prefix: format!("{}{name}.", self.prefix),
                    map,
                })
            })
            .transpose()
    }

    /// A token id. Some files write -1 for "none".
    pub(super) fn token(&self, name: &str) -> Result<Option<u32>> {
        Ok(self.tokens(name)?.first().copied())
    }

    /// A token id or a list of them.
    pub(super) fn tokens(&self, name: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(name) else {
            return Ok(Vec::new());
        };
        let one = std::slice::from_ref(value);
        let list = value.as_array().map_or(one, Vec::as_slice);
        list.iter()
            .filter(|id| id.as_i64() != Some(-1))
            .map(|id| {
                id.as_u64()
                    .and_then(|id| u32::try_from(id).ok())
                    .ok_or_else(|| self.wrong(name, "a token id or a list of them"))
            })
            .collect()
    }
}
