//! Where the hub is, where its cache lies and how patient to be. The one place of this library that reads
//! the environment, and only in [`HubOptions::from_env`].

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Error, Result};

/// The hub that is asked unless another one is named.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// Settings of a [`Hub`](super::Hub).
#[derive(Clone)]
pub struct HubOptions {
    /// The folder of the cache, shared with Python's `huggingface_hub`.
    pub cache: PathBuf,
    /// Scheme and host of the hub, with an optional path, without a trailing `/`.
    pub endpoint: String,
    /// The access token, sent to the endpoint and to nobody else.
    pub token: Option<String>,
    /// Never open a socket.
    pub offline: bool,
    /// Link snapshots to blobs; if not, or if the file system cannot, files are moved or copied.
    pub symlinks: bool,
    /// Longest wait for a connection, and for the answer to a question about a file.
    pub head_timeout: Duration,
    /// Longest silence within a download.
    pub read_timeout: Duration,
    /// A connection that brings less than `slow_bytes` within this time counts as broken.
    pub slow_window: Duration,
    /// See `slow_window`.
    pub slow_bytes: u64,
    /// Attempts in a row that bring nothing new before giving up.
    pub tries: u32,
    /// Wait before the second attempt; it doubles from one to the next, up to eight times this.
    pub backoff: Duration,
    /// Longest wait that is granted when the hub asks for one; beyond it, the request fails and says how long.
    pub max_wait: Duration,
    /// Files downloaded at the same time.
    pub workers: usize,
    /// A PEM file of certificates to trust instead of the built-in list.
    pub ca_bundle: Option<PathBuf>,
    /// A proxy for everything but loopback addresses.
    pub(super) proxy: Option<ureq::Proxy>,
}

impl HubOptions {
    /// The defaults, with the cache in `cache` and no token.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        HubOptions {
            cache: cache.into(),
            endpoint: DEFAULT_ENDPOINT.to_owned(),
            token: None,
            offline: false,
            symlinks: true,
            head_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(10),
            slow_window: Duration::from_secs(30),
            slow_bytes: 30 << 10,
            tries: 5,
            backoff: Duration::from_secs(1),
            max_wait: Duration::from_secs(60),
            workers: 8,
            ca_bundle: None,
            proxy: None,
        }
    }

    /// The settings that Python's `huggingface_hub` would use: `HF_HOME`, `XDG_CACHE_HOME`, `HF_HUB_CACHE`,
    /// `HUGGINGFACE_HUB_CACHE`, `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`,
    /// `HF_HUB_ETAG_TIMEOUT`, `HF_HUB_DOWNLOAD_TIMEOUT`, `HF_HUB_DISABLE_SYMLINKS`; and beside them the usual
    /// `REQUESTS_CA_BUNDLE`, `SSL_CERT_FILE`, `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`.
    ///
    /// # Errors
    /// A usage error that names the variable if a value cannot be used.
    pub fn from_env() -> Result<Self> {
        let mut options = Self::from_variables(&|name| std::env::var_os(name))?;
        options.proxy = ureq::Proxy::try_from_env();
        Ok(options)
    }

    /// As [`from_env`](Self::from_env), with the environment given as a function and without proxies.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Self> {
        let text = |name: &str| -> Result<Option<String>> {
            match variable(name) {
                None => Ok(None),
                Some(value) => match value.into_string() {
                    Ok(value) => Ok(Some(value).filter(|v| !v.is_empty())),
                    Err(_) => Err(Error::usage(format!("{name} is not valid UTF-8"))),
                },
            }
        };
        let path = |name: &str| -> Option<PathBuf> {
            variable(name)
                .filter(|value| !value.is_empty())
                .map(|value| expand(value, variable))
        };
        let switch = |name: &str| -> bool {
            variable(name)
                .and_then(|value| value.into_string().ok())
                .is_some_and(|value| {
                    ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str())
                })
        };
        let seconds = |name: &str| -> Result<Option<Duration>> {
            let Some(value) = text(name)? else {
                return Ok(None);
            };
            match value.trim().parse::<f64>() {
                Ok(seconds) if seconds > 0.0 && seconds <= 86400.0 => {
                    Ok(Some(Duration::from_secs_f64(seconds)))
                }
                _ => Err(Error::usage(format!(
                    "{name}={value}: expected a number of seconds between 0 and 86400"
                ))),
            }
        };

        // Where the cache and the token are named, nobody needs a home.
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|p| p.join("huggingface")))
            .or_else(|| home(variable).map(|p| p.join(".cache/huggingface")));
        let cache = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| home.as_ref().map(|home| home.join("hub")))
            .ok_or_else(|| {
                Error::usage(
                    "there is no home directory to keep models in; set HF_HOME to a folder",
                )
            })?;

        let mut options = HubOptions::new(cache);
        if let Some(endpoint) = text("HF_ENDPOINT")? {
            options.endpoint = endpoint;
        }
        if !switch("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            let file = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
            options.token = [text("HF_TOKEN")?, text("HUGGING_FACE_HUB_TOKEN")?]
                .into_iter()
                .flatten()
                .find_map(|token| clean_token(&token));
            if let (None, Some(file)) = (&options.token, file) {
                options.token = read_token(&file)?;
            }
        }
        options.offline = switch("HF_HUB_OFFLINE") || switch("TRANSFORMERS_OFFLINE");
        options.symlinks = !switch("HF_HUB_DISABLE_SYMLINKS");
        if let Some(timeout) = seconds("HF_HUB_ETAG_TIMEOUT")? {
            options.head_timeout = timeout;
        }
        if let Some(timeout) = seconds("HF_HUB_DOWNLOAD_TIMEOUT")? {
            options.read_timeout = timeout;
        }
        options.ca_bundle = path("REQUESTS_CA_BUNDLE").or_else(|| path("SSL_CERT_FILE"));
        Ok(options)
    }
}

/// Without the token, which must not end up in a log.
impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

fn home(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    variable("HOME")
        .or_else(|| variable("USERPROFILE"))
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// A leading `~`, `$NAME` and `${NAME}` replaced, as Python's `expanduser` and `expandvars` do; unknown names stay.
fn expand(value: OsString, variable: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let Some(text) = value.to_str() else {
        return PathBuf::from(value);
    };
    let mut out = OsString::new();
    let mut rest = text;
    if (rest == "~" || rest.starts_with("~/"))
        && let Some(home) = home(variable)
    {
        out.push(home);
        rest = &rest[1..];
    }
    while let Some(at) = rest.find('$') {
        out.push(&rest[..at]);
        let tail = &rest[at + 1..];
        let (name, length) = match tail.strip_prefix('{').and_then(|t| t.split_once('}')) {
            Some((name, _)) => (name, name.len() + 2),
            None => {
                let end = tail
                    .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                    .unwrap_or(tail.len());
                (&tail[..end], end)
            }
        };
        match variable(name).filter(|_| !name.is_empty()) {
            Some(value) => out.push(value),
            None => out.push(&rest[at..at + 1 + length]),
        }
        rest = &tail[length..];
    }
    out.push(rest);
    PathBuf::from(out)
}

fn clean_token(token: &str) -> Option<String> {
    let token: String = token.chars().filter(|c| !"\r\n".contains(*c)).collect();
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

fn read_token(file: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(file) {
        Ok(token) => Ok(clean_token(&token)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(file, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(pairs: &[(&str, &str)]) -> HubOptions {
        try_options(pairs).unwrap()
    }

    fn try_options(pairs: &[(&str, &str)]) -> Result<HubOptions> {
        HubOptions::from_variables(&|name| {
            pairs
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn cache_folder() {
        let cases: [(&[(&str, &str)], &str); 8] = [
            (&[("HOME", "/h")], "/h/.cache/huggingface/hub"),
            (
                &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")],
                "/x/huggingface/hub",
            ),
            (
                &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f")],
                "/f/hub",
            ),
            (
                &[("HF_HOME", "/f"), ("HUGGINGFACE_HUB_CACHE", "/old")],
                "/old",
            ),
            (
                &[
                    ("HF_HOME", "/f"),
                    ("HUGGINGFACE_HUB_CACHE", "/old"),
                    ("HF_HUB_CACHE", "/c"),
                ],
                "/c",
            ),
            (&[("HOME", "/h"), ("HF_HOME", "~/m")], "/h/m/hub"),
            (
                &[
                    ("HOME", "/h"),
                    ("D", "/d"),
                    ("HF_HUB_CACHE", "$D/${D}x/$NO/$"),
                ],
                "/d//dx/$NO/$",
            ),
            (
                &[("HOME", "/h"), ("HF_HOME", ""), ("HF_HUB_CACHE", "")],
                "/h/.cache/huggingface/hub",
            ),
        ];
        for (variables, expected) in cases {
            assert_eq!(
                options(variables).cache,
                PathBuf::from(expected),
                "{variables:?}"
            );
        }
        assert!(try_options(&[]).is_err());
        // Without a home, what is named is used.
        let named = options(&[("HF_HUB_CACHE", "/c"), ("HF_TOKEN", "hf_a")]);
        assert_eq!(named.cache, PathBuf::from("/c"));
        assert_eq!(named.token.as_deref(), Some("hf_a"));
        assert_eq!(options(&[("HF_HUB_CACHE", "/c")]).token, None);
        assert!(try_options(&[("HF_TOKEN", "hf_a")]).is_err());
    }

    #[test]
    fn token() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        assert_eq!(options(&[("HF_HOME", home)]).token, None);
        std::fs::write(folder.path().join("token"), " hf_file\r\n").unwrap();
        std::fs::write(folder.path().join("other"), "hf_other").unwrap();
        let other = folder.path().join("other");
        let other = other.to_str().unwrap();
        type Case<'a> = (&'a [(&'a str, &'a str)], Option<&'a str>);
        let cases: [Case; 7] = [
            (&[], Some("hf_file")),
            (&[("HF_TOKEN_PATH", other)], Some("hf_other")),
            (
                &[("HUGGING_FACE_HUB_TOKEN", "hf_legacy")],
                Some("hf_legacy"),
            ),
            (
                &[
                    ("HUGGING_FACE_HUB_TOKEN", "hf_legacy"),
                    ("HF_TOKEN", "hf_new\n"),
                ],
                Some("hf_new"),
            ),
            (&[("HF_TOKEN", " \n")], Some("hf_file")),
            (
                &[
                    ("HF_TOKEN", "hf_new"),
                    ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "yes"),
                ],
                None,
            ),
            (
                &[
                    ("HF_TOKEN", "hf_new"),
                    ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0"),
                ],
                Some("hf_new"),
            ),
        ];
        for (variables, expected) in cases {
            let mut variables = variables.to_vec();
            variables.push(("HF_HOME", home));
            assert_eq!(
                options(&variables).token.as_deref(),
                expected,
                "{variables:?}"
            );
        }
    }

    #[test]
    fn switches_and_numbers() {
        for (value, expected) in [
            ("1", true),
            ("on", true),
            ("True", true),
            ("YES", true),
            ("0", false),
            ("x", false),
        ] {
            for name in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
                assert_eq!(options(&[("HOME", "/h"), (name, value)]).offline, expected);
            }
            assert_eq!(
                options(&[("HOME", "/h"), ("HF_HUB_DISABLE_SYMLINKS", value)]).symlinks,
                !expected
            );
        }
        let set = options(&[
            ("HOME", "/h"),
            ("HF_HUB_ETAG_TIMEOUT", "3"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "2.5"),
        ]);
        assert_eq!(set.head_timeout, Duration::from_secs(3));
        assert_eq!(set.read_timeout, Duration::from_millis(2500));
        for bad in ["x", "-1", "0", "inf", "NaN", "1e9"] {
            assert!(
                try_options(&[("HOME", "/h"), ("HF_HUB_ETAG_TIMEOUT", bad)]).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn debug_hides_the_token() {
        let text = format!(
            "{:?}",
            options(&[("HOME", "/h"), ("HF_TOKEN", "hf_secret")])
        );
        assert!(
            text.contains("token: Some") && !text.contains("secret"),
            "{text}"
        );
    }
}
