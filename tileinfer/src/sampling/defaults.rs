//! What a model's authors recommend: `generation_config.json`. It knows the file's fields, not who
//! overrides them.

use std::path::Path;

use serde_json::{Map, Value};

use super::SamplingParams;
use crate::{Error, Result};

/// Sampling parameters and stop tokens that a model ships with.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationDefaults {
    /// Greedy if the file is absent or says so.
    pub sampling: SamplingParams,
    /// Tokens that end a text, each once.
    pub stop_ids: Vec<u32>,
}

impl GenerationDefaults {
    /// Reads the text of a `generation_config.json`; `path` is for messages only.
    ///
    /// `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` are applied even if `do_sample` is
    /// absent; `do_sample: false` is greedy decoding and leaves only the repetition penalty. Without a
    /// temperature it is transformers' 1 if `do_sample` is true or a filter is given, else 0. A `null` is
    /// an absent field, a `top_k` of -1 is off, other fields are not looked at.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the field if the text is no JSON object or a value has a wrong type or
    /// range.
    pub fn from_json(text: &str, path: &Path) -> Result<Self> {
        let object: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| Error::bad_model(path, format!("not a JSON object: {error}")))?;
        let fields = Fields {
            object: &object,
            path,
        };
        let mut sampling = SamplingParams::default();
        if let Some(penalty) = fields.number("repetition_penalty")? {
            sampling.repetition_penalty = penalty;
        }
        let do_sample = fields.flag("do_sample")?;
        let temperature = fields.number("temperature")?;
        let top_k = fields.top_k()?;
        let top_p = fields.number("top_p")?;
        let min_p = fields.number("min_p")?;
        if do_sample != Some(false) {
            let samples =
                do_sample == Some(true) || top_k.is_some() || top_p.is_some() || min_p.is_some();
            sampling.temperature = temperature.unwrap_or(if samples { 1.0 } else { 0.0 });
            sampling.top_k = top_k.unwrap_or(sampling.top_k);
            sampling.top_p = top_p.unwrap_or(sampling.top_p);
            sampling.min_p = min_p.unwrap_or(sampling.min_p);
        }
        sampling
            .validate()
            .map_err(|error| Error::bad_model(path, error.to_string()))?;
        Ok(GenerationDefaults {
            sampling,
            stop_ids: fields.ids("eos_token_id")?,
        })
    }
}

/// The recommended sampling parameters of the model in `dir`, and its stop tokens: those of its
/// configuration (`config_eos`) and of its `generation_config.json`, if it has one, together.
///
/// # Errors
/// [`Error::Io`] if the file is there and cannot be read, and those of [`GenerationDefaults::from_json`].
pub fn generation_defaults(dir: &Path, config_eos: &[u32]) -> Result<GenerationDefaults> {
    let path = dir.join("generation_config.json");
    let mut defaults = match std::fs::read_to_string(&path) {
        Ok(text) => GenerationDefaults::from_json(&text, &path)?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => GenerationDefaults::default(),
        Err(error) => return Err(Error::io(&path, error)),
    };
    let from_file = std::mem::take(&mut defaults.stop_ids);
    for &id in config_eos.iter().chain(&from_file) {
        if !defaults.stop_ids.contains(&id) {
            defaults.stop_ids.push(id);
        }
    }
    Ok(defaults)
}

/// The fields of one file, with errors that name them.
struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: &'a Path,
}

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn wrong<T>(&self, name: &str, value: &Value, expected: &str) -> Result<T> {
        Err(Error::bad_model(
            self.path,
            format!("{name} is {value}, it must be {expected}"),
        ))
    }

    fn number(&self, name: &str) -> Result<Option<f32>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Number(number)) => Ok(number.as_f64().map(|number| number as f32)),
            Some(other) => self.wrong(name, other, "a number"),
        }
    }

    fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => self.wrong(name, other, "true or false"),
        }
    }

    fn top_k(&self) -> Result<Option<u32>> {
        let name = "top_k";
        match self.get(name) {
            None => Ok(None),
            Some(value) if value.as_i64() == Some(-1) => Ok(Some(0)),
            Some(value) => match value.as_u64().and_then(|k| u32::try_from(k).ok()) {
                Some(k) => Ok(Some(k)),
                None => self.wrong(name, value, "an integer, 0 or more"),
            },
        }
    }

    fn ids(&self, name: &str) -> Result<Vec<u32>> {
        let values = match self.get(name) {
            None => &[],
            Some(Value::Array(values)) => values.as_slice(),
            Some(value) => std::slice::from_ref(value),
        };
        let mut ids = Vec::new();
        for value in values {
            match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
                Some(id) if ids.contains(&id) => {}
                Some(id) => ids.push(id),
                None => return self.wrong(name, value, "a token id or a list of token ids"),
            }
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<GenerationDefaults> {
        GenerationDefaults::from_json(text, Path::new("some/generation_config.json"))
    }

    #[test]
    fn shipped_files() {
        let qwen = r#"{"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643, 151645],
            "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
            "transformers_version": "4.51.0"}"#;
        let got = parse(qwen).unwrap();
        let expected = SamplingParams {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
            ..SamplingParams::default()
        };
        assert_eq!(
            got,
            GenerationDefaults {
                sampling: expected,
                stop_ids: vec![151_645, 151_643]
            }
        );
        let mistral =
            parse(r#"{"_from_model_config": true, "bos_token_id": 1, "eos_token_id": 2}"#).unwrap();
        assert_eq!(
            mistral,
            GenerationDefaults {
                stop_ids: vec![2],
                ..GenerationDefaults::default()
            }
        );
    }

    #[test]
    fn do_sample_decides_what_is_applied() {
        let t = |text| {
            let s = parse(text).unwrap().sampling;
            (
                s.temperature,
                s.top_k,
                s.top_p,
                s.min_p,
                s.repetition_penalty,
            )
        };
        assert_eq!(t("{}"), (0.0, 0, 1.0, 0.0, 1.0));
        assert_eq!(t(r#"{"temperature": 0.7}"#), (0.7, 0, 1.0, 0.0, 1.0));
        assert_eq!(t(r#"{"do_sample": true}"#), (1.0, 0, 1.0, 0.0, 1.0));
        assert_eq!(
            t(r#"{"top_p": 0.9, "min_p": 0.1}"#),
            (1.0, 0, 0.9, 0.1, 1.0)
        );
        assert_eq!(
            t(r#"{"top_k": -1, "temperature": null}"#),
            (1.0, 0, 1.0, 0.0, 1.0)
        );
        assert_eq!(
            t(r#"{"repetition_penalty": 1.05}"#),
            (0.0, 0, 1.0, 0.0, 1.05)
        );
        let off = r#"{"do_sample": false, "temperature": 0.6, "top_k": 5, "top_p": 0.9, "repetition_penalty": 2}"#;
        assert_eq!(t(off), (0.0, 0, 1.0, 0.0, 2.0));
    }

    #[test]
    fn wrong_values_name_file_and_field() {
        for (text, field) in [
            (r#"{"temperature": "0.6"}"#, "temperature"),
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"temperature": 1e300}"#, "temperature"),
            (r#"{"top_k": 2.5}"#, "top_k"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_p": [0.9]}"#, "top_p"),
            (r#"{"min_p": true}"#, "min_p"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"do_sample": 1}"#, "do_sample"),
            (r#"{"do_sample": false, "top_p": "x"}"#, "top_p"),
            (r#"{"eos_token_id": -1}"#, "eos_token_id"),
            (r#"{"eos_token_id": [1, "2"]}"#, "eos_token_id"),
            (r#"{"eos_token_id": [[1]]}"#, "eos_token_id"),
            ("[1]", "JSON"),
            ("{", "JSON"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(matches!(error, Error::BadModel { .. }), "{text}: {error:?}");
            let message = error.to_string();
            assert!(
                message.contains("generation_config.json") && message.contains(field),
                "{message}"
            );
        }
    }

    #[test]
    fn stop_tokens_are_the_union() {
        let dir = tempfile::tempdir().unwrap();
        let without = generation_defaults(dir.path(), &[7, 7, 3]).unwrap();
        assert_eq!(
            without,
            GenerationDefaults {
                stop_ids: vec![7, 3],
                ..GenerationDefaults::default()
            }
        );
        let path = dir.path().join("generation_config.json");
        std::fs::write(&path, r#"{"eos_token_id": [3, 9], "temperature": 0.5}"#).unwrap();
        let with = generation_defaults(dir.path(), &[7, 3]).unwrap();
        assert_eq!(with.stop_ids, [7, 3, 9]);
        assert_eq!(with.sampling.temperature, 0.5);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(
            generation_defaults(dir.path(), &[]),
            Err(Error::Io { .. })
        ));
    }
}
