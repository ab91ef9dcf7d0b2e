//! What a hub's answers mean: status and headers in, facts or a refusal out. Pure functions over untrusted
//! input; they open nothing and never panic.

use std::time::Duration;

use serde::Deserialize;

use super::error::{Failure, HubErrorKind};
use super::name::{is_commit, is_hex, is_safe_path};

/// Status and headers of an answer.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// Header names and values in the order in which they came.
    pub headers: Vec<(String, String)>,
}

impl Reply {
    /// The first header of this name, whatever its case, trimmed; an empty one counts as absent.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
            .filter(|value| !value.is_empty())
    }

    /// Where it sends us, if it is a redirect.
    pub fn redirect(&self) -> Option<&str> {
        if matches!(self.status, 301 | 302 | 303 | 307 | 308) {
            self.header("location")
        } else {
            None
        }
    }

    /// `X-Repo-Commit`, if it is a commit hash.
    pub fn commit(&self) -> Option<&str> {
        self.header("x-repo-commit").filter(|c| is_commit(c))
    }

    /// The wait the hub asks for: `t` of the `RateLimit` header, or `Retry-After` in seconds or as a date.
    pub fn retry_after(&self) -> Option<Duration> {
        let from_limit = || {
            self.header("ratelimit")?
                .split(';')
                .find_map(|part| part.trim().strip_prefix("t=")?.parse::<u64>().ok())
        };
        let from_retry = || {
            let value = self.header("retry-after")?;
            if let Ok(seconds) = value.parse::<u64>() {
                return Some(seconds);
            }
            let date = jiff::fmt::rfc2822::parse(value).ok()?.timestamp();
            let wait = date.as_second() - jiff::Timestamp::now().as_second();
            Some(u64::try_from(wait).unwrap_or(0))
        };
        from_limit().or_else(from_retry).map(Duration::from_secs)
    }

    /// What it says about `path` of `repo`, as the answer of the hub at `endpoint` to a HEAD on that file.
    ///
    /// # Errors
    /// [`Error::Hub`](crate::Error::Hub) with the kind of the refusal, or of what is missing.
    pub fn file(
        &self,
        endpoint: &str,
        repo: &str,
        revision: &str,
        path: &str,
    ) -> crate::Result<FileFacts> {
        let question = Question {
            endpoint,
            repo,
            revision,
            path,
            token: false,
        };
        file_facts(self, &question).map_err(Failure::into_error)
    }

    /// Total length of the file by `Content-Range`, else by `Content-Length`; unknown for a coded body.
    pub fn total_length(&self) -> Option<u64> {
        if let Some((_, total)) = self.content_range() {
            return total;
        }
        let identity = self
            .header("content-encoding")
            .is_none_or(|c| c.eq_ignore_ascii_case("identity"));
        let length = self.header("content-length")?.parse().ok()?;
        (identity && self.status != 206).then_some(length)
    }

    /// First byte and total length of `Content-Range: bytes 5-9/10`, `bytes 5-9/*` or `bytes */10`.
    pub fn content_range(&self) -> Option<(Option<u64>, Option<u64>)> {
        let (range, total) = self
            .header("content-range")?
            .strip_prefix("bytes ")?
            .split_once('/')?;
        let start = match range.split_once('-') {
            Some((start, _)) => Some(start.trim().parse().ok()?),
            None if range.trim() == "*" => None,
            None => return None,
        };
        let total = match total.trim() {
            "*" => None,
            number => Some(number.parse().ok()?),
        };
        Some((start, total))
    }
}

/// What was asked, for the wording of refusals.
#[derive(Debug, Clone, Copy)]
pub(super) struct Question<'a> {
    pub(super) endpoint: &'a str,
    pub(super) repo: &'a str,
    pub(super) revision: &'a str,
    pub(super) path: &'a str,
    /// Whether a token was sent along.
    pub(super) token: bool,
}

/// The hub's description of one file of one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFacts {
    /// Commit hash, 40 hexadecimal digits.
    pub commit: String,
    /// Hash of the content, safe as a file name.
    pub etag: String,
    /// Size in bytes, if it says.
    pub size: Option<u64>,
}

/// Reads the answer to a HEAD on a file.
pub(super) fn file_facts(reply: &Reply, question: &Question) -> Result<FileFacts, Failure> {
    let redirect = reply.redirect().is_some();
    if !(reply.status == 200 || redirect) {
        return Err(refusal(reply, question));
    }
    let bad = |kind: HubErrorKind, reason: &str| {
        Failure::Final(kind.error(format!(
            "{} answered for {} of {} without {reason}",
            question.endpoint, question.path, question.repo
        )))
    };
    let Some(commit) = reply.commit() else {
        return Err(bad(
            HubErrorKind::NotAHub,
            "a commit (X-Repo-Commit), so it is not a model hub; check HF_ENDPOINT, and whether a proxy or a login page stands in between",
        ));
    };
    let etag = reply
        .header("x-linked-etag")
        .or_else(|| reply.header("etag"))
        .and_then(blob_name)
        .ok_or_else(|| {
            bad(
                HubErrorKind::BadReply,
                "a usable hash of its content (X-Linked-Etag or ETag)",
            )
        })?;
    let size = match reply.header("x-linked-size") {
        Some(size) => size.parse().ok(),
        None if redirect => None,
        None => reply.total_length(),
    };
    Ok(FileFacts {
        commit: commit.to_owned(),
        etag,
        size,
    })
}

/// An ETag without weakness mark and quotes, if it can name a file: letters, digits, `-`, `_` and inner dots.
fn blob_name(etag: &str) -> Option<String> {
    let name = etag.trim_start_matches("W/").trim_matches('"');
    let safe = !name.is_empty()
        && name.len() <= 128
        && !name.starts_with('.')
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !name.ends_with(".incomplete")
        && !name.ends_with('.');
    safe.then(|| name.to_owned())
}

/// What an answer that is neither a success nor a redirect means.
pub(super) fn refusal(reply: &Reply, question: &Question) -> Failure {
    let Question {
        endpoint,
        repo,
        revision,
        path,
        token,
    } = *question;
    let code = reply.header("x-error-code").unwrap_or("");
    let text = reply.header("x-error-message").unwrap_or("");
    let page = format!("{endpoint}/{repo}");
    let says = if text.is_empty() {
        String::new()
    } else {
        let text: String = text.chars().filter(|c| !c.is_control()).take(300).collect();
        format!(" (the hub says: {text})")
    };
    let no_repo = || {
        let token = if token {
            "the token that was sent does not give access to it"
        } else {
            "no token was sent; set HF_TOKEN if the repository is private"
        };
        HubErrorKind::RepoNotFound.error(format!(
            "{endpoint} has no repository {repo}, or it is private: check the spelling; {token}"
        ))
    };
    let gated = || {
        let advice = if token {
            "with the account that the token in HF_TOKEN belongs to, and give the token the right to read gated repositories"
        } else {
            "while signed in, then set HF_TOKEN to a token of that account"
        };
        HubErrorKind::Gated { page: page.clone() }.error(format!(
            "{repo} is gated: accept its licence at {page} {advice}{says}"
        ))
    };
    let error = match (reply.status, code) {
        (_, "GatedRepo") => gated(),
        (401, _) if text == "Invalid credentials in Authorization header" => {
            HubErrorKind::BadToken.error(format!(
                "{endpoint} does not accept the token that was sent: renew HF_TOKEN or the token file, or remove it for public models"
            ))
        }
        (_, "RevisionNotFound") => HubErrorKind::RevisionNotFound.error(format!(
            "{repo} has no branch, tag or commit {revision:?}; see {page}/tree/main"
        )),
        (_, "RepoNotFound") | (401, _) => no_repo(),
        (404, "EntryNotFound") => no_file(repo, revision, path),
        // Mirrors that know no error codes: the commit tells whether the repository exists.
        (404, _) if reply.commit().is_some() || is_commit(revision) => {
            no_file(repo, revision, path)
        }
        (404, _) => HubErrorKind::RepoNotFound.error(format!(
            "{endpoint} answers 404 for {repo}, without any of a hub's headers: there is no such repository, or it is not a model hub; check the spelling and HF_ENDPOINT"
        )),
        (403, _) if text == "Access to this resource is disabled." => HubErrorKind::Disabled
            .error(format!("{endpoint} has disabled access to {repo}; choose another model")),
        (403, _) => HubErrorKind::Forbidden.error(format!(
            "{endpoint} forbids access to {repo}{says}; check what the token in HF_TOKEN may do"
        )),
        (429, _) => {
            let wait = reply.retry_after();
            let advice = match wait {
                Some(wait) => format!("try again in {} s", wait.as_secs()),
                None => "try again later".to_owned(),
            };
            let token = if token { "" } else { ", or set HF_TOKEN: signed-in users may ask more" };
            let error = HubErrorKind::RateLimited { retry_after: wait }.error(format!(
                "{endpoint} has answered enough questions from here for now: {advice}{token}"
            ));
            return Failure::Passing(error, wait);
        }
        (408 | 500 | 502 | 503 | 504, _) => {
            let error = HubErrorKind::Status(reply.status).error(format!(
                "{endpoint} answers {} for {path} of {repo}{says}; try again later",
                reply.status
            ));
            return Failure::Passing(error, reply.retry_after());
        }
        _ => HubErrorKind::Status(reply.status).error(format!(
            "{endpoint} answers {} for {path} of {repo}{says}",
            reply.status
        )),
    };
    Failure::Final(error)
}

fn no_file(repo: &str, revision: &str, path: &str) -> crate::Error {
    HubErrorKind::FileNotFound.error(format!("{repo} has no file {path} in revision {revision}"))
}

/// The shards that a `model.safetensors.index.json` names, sorted, each once.
///
/// # Errors
/// A sentence that says what is wrong if it is no such index or names a file that would leave the folder.
pub fn shards(index: &[u8]) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index)
        .map_err(|error| format!("it is not an index of safetensors shards: {error}"))?;
    let mut shards: Vec<String> = index.weight_map.into_values().collect();
    shards.sort();
    shards.dedup();
    if shards.is_empty() {
        return Err("its weight_map is empty".to_owned());
    }
    for shard in &shards {
        if !is_safe_path(shard) || !shard.ends_with(".safetensors") {
            return Err(format!(
                "it names {shard:?}, which is not a shard of this repository"
            ));
        }
    }
    Ok(shards)
}

/// How the content of a file is checked against its ETag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HashKind {
    /// 64 digits: SHA-256 of the content.
    Sha256,
    /// 40 digits: SHA-1 of git's blob header and the content.
    GitSha1,
    /// Anything else, from a mirror: nothing to check against.
    Unknown,
}

impl HashKind {
    pub(super) fn of(etag: &str) -> Self {
        match etag.len() {
            64 if is_hex(etag) => HashKind::Sha256,
            40 if is_hex(etag) => HashKind::GitSha1,
            _ => HashKind::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn reply(status: u16, headers: &[(&str, &str)]) -> Reply {
        Reply {
            status,
            headers: headers
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
        }
    }

    const QUESTION: Question = Question {
        endpoint: "https://huggingface.co",
        repo: "org/name",
        revision: "main",
        path: "config.json",
        token: false,
    };

    fn kind(reply: &Reply) -> (HubErrorKind, bool) {
        let failure = file_facts(reply, &QUESTION).unwrap_err();
        let passing = matches!(failure, Failure::Passing(..));
        match failure.into_error() {
            crate::Error::Hub { kind, .. } => (kind, passing),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn facts() {
        let plain = reply(
            200,
            &[
                ("X-Repo-Commit", COMMIT),
                ("ETag", "W/\"abc\""),
                ("Content-Length", "12"),
            ],
        );
        let facts = file_facts(&plain, &QUESTION).unwrap();
        assert_eq!((facts.etag.as_str(), facts.size), ("abc", Some(12)));

        let linked = reply(
            302,
            &[
                ("x-repo-commit", COMMIT),
                ("ETag", "\"other\""),
                ("X-Linked-Etag", "\"def\""),
                ("X-Linked-Size", "99"),
                ("Content-Length", "7"),
                ("Location", "https://cdn.example/x"),
            ],
        );
        let facts = file_facts(&linked, &QUESTION).unwrap();
        assert_eq!((facts.etag.as_str(), facts.size), ("def", Some(99)));

        // The length of a redirect's own body is not the file's.
        let mut unsized_ = linked;
        unsized_.headers.retain(|(name, _)| name != "X-Linked-Size");
        assert_eq!(file_facts(&unsized_, &QUESTION).unwrap().size, None);
    }

    #[test]
    fn unsafe_etags_and_commits() {
        for etag in [
            "\"\"",
            "../x",
            "a/b",
            ".x",
            "a b",
            "a\\b",
            "x.incomplete",
            &"a".repeat(129),
        ] {
            let reply = reply(200, &[("X-Repo-Commit", COMMIT), ("ETag", etag)]);
            assert_eq!(kind(&reply).0, HubErrorKind::BadReply, "{etag}");
        }
        for commit in [
            "",
            "main",
            "../../x",
            &COMMIT.to_uppercase(),
            &format!("{COMMIT}0"),
        ] {
            let reply = reply(200, &[("X-Repo-Commit", commit), ("ETag", "abc")]);
            assert_eq!(kind(&reply).0, HubErrorKind::NotAHub, "{commit}");
        }
    }

    #[test]
    fn refusals() {
        use HubErrorKind as K;
        let gated = K::Gated {
            page: "https://huggingface.co/org/name".into(),
        };
        type Case<'a> = (u16, &'a [(&'a str, &'a str)], K, bool);
        let cases: &[Case] = &[
            (
                404,
                &[("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", COMMIT)],
                K::FileNotFound,
                false,
            ),
            (404, &[("X-Repo-Commit", COMMIT)], K::FileNotFound, false),
            (
                404,
                &[("X-Error-Code", "RevisionNotFound")],
                K::RevisionNotFound,
                false,
            ),
            (
                404,
                &[("X-Error-Code", "RepoNotFound")],
                K::RepoNotFound,
                false,
            ),
            (
                401,
                &[("X-Error-Code", "RepoNotFound")],
                K::RepoNotFound,
                false,
            ),
            (404, &[], K::RepoNotFound, false),
            (401, &[("X-Error-Code", "GatedRepo")], gated.clone(), false),
            (403, &[("X-Error-Code", "GatedRepo")], gated, false),
            (
                401,
                &[("X-Error-Message", "Invalid username or password.")],
                K::RepoNotFound,
                false,
            ),
            (
                401,
                &[(
                    "X-Error-Message",
                    "Invalid credentials in Authorization header",
                )],
                K::BadToken,
                false,
            ),
            (
                403,
                &[("X-Error-Message", "Access to this resource is disabled.")],
                K::Disabled,
                false,
            ),
            (403, &[("X-Error-Message", "no")], K::Forbidden, false),
            (
                429,
                &[("RateLimit", "\"api\";r=0;t=55"), ("Retry-After", "9")],
                K::RateLimited {
                    retry_after: Some(Duration::from_secs(55)),
                },
                true,
            ),
            (
                429,
                &[("Retry-After", "9")],
                K::RateLimited {
                    retry_after: Some(Duration::from_secs(9)),
                },
                true,
            ),
            (
                429,
                &[("Retry-After", "Sun, 06 Nov 1994 08:49:37 GMT")],
                K::RateLimited {
                    retry_after: Some(Duration::ZERO),
                },
                true,
            ),
            (
                429,
                &[("Retry-After", "soon")],
                K::RateLimited { retry_after: None },
                true,
            ),
            (503, &[], K::Status(503), true),
            (418, &[], K::Status(418), false),
            (302, &[], K::Status(302), false),
        ];
        for (status, headers, expected, passing) in cases {
            let got = kind(&reply(*status, headers));
            assert_eq!(got, (expected.clone(), *passing), "{status} {headers:?}");
        }
    }

    #[test]
    fn ranges() {
        let range = |text: &str| reply(206, &[("Content-Range", text)]).content_range();
        assert_eq!(range("bytes 5-9/10"), Some((Some(5), Some(10))));
        assert_eq!(range("bytes 5-9/*"), Some((Some(5), None)));
        assert_eq!(range("bytes */10"), Some((None, Some(10))));
        for bad in [
            "bytes 5/10",
            "5-9/10",
            "bytes x-9/10",
            "bytes 5-9/-1",
            "bytes 5-9",
        ] {
            assert_eq!(range(bad), None, "{bad}");
        }
    }

    #[test]
    fn shard_names() {
        let index = br#"{"metadata":{},"weight_map":{"a":"m-2.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}}"#;
        assert_eq!(
            shards(index).unwrap(),
            ["m-1.safetensors", "m-2.safetensors"]
        );
        for bad in [
            &b"{}"[..],
            b"[]",
            b"",
            b"{\"weight_map\":{}}",
            b"{\"weight_map\":{\"a\":1}}",
            b"{\"weight_map\":{\"a\":\"../x.safetensors\"}}",
            b"{\"weight_map\":{\"a\":\"/x.safetensors\"}}",
            b"{\"weight_map\":{\"a\":\"x.bin\"}}",
            b"{\"weight_map\":{\"a\":\"a\\\\x.safetensors\"}}",
        ] {
            assert!(shards(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }

    /// Header values made of the pieces that the parsers look for, and of anything else.
    fn value() -> impl Strategy<Value = String> {
        prop_oneof![
            "\\PC{0,40}",
            "(W/)?\"?[0-9a-f./]{0,70}\"?",
            "bytes [0-9*]{0,22}-?[0-9]{0,22}/[0-9*]{0,22}",
            "\"api\";r=[0-9]{0,3};t=[0-9]{0,25}",
            Just(COMMIT.to_owned()),
            "[0-9]{0,30}",
        ]
    }

    proptest! {
        #[test]
        fn any_reply_is_read_without_panic(
            status in 100u16..600,
            headers in proptest::collection::vec(
                (
                    proptest::sample::select(vec![
                        "X-Repo-Commit", "ETag", "X-Linked-Etag", "X-Linked-Size", "Content-Length", "Location",
                        "Content-Range", "Content-Encoding", "X-Error-Code", "X-Error-Message", "RateLimit", "Retry-After",
                    ]),
                    value(),
                ),
                0..12,
            ),
        ) {
            let reply = Reply {
                status,
                headers: headers.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
            };
            let _ = (reply.redirect(), reply.retry_after(), reply.total_length(), reply.content_range());
            if let Ok(facts) = file_facts(&reply, &QUESTION) {
                prop_assert!(is_commit(&facts.commit));
                prop_assert!(is_safe_path(&facts.etag) && !facts.etag.contains('/'));
            }
        }

        #[test]
        fn any_index_is_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), name in "\\PC{0,30}") {
            let _ = shards(&bytes);
            let index = serde_json::json!({"weight_map": {"w": format!("{name}.safetensors")}}).to_string();
            if let Ok(names) = shards(index.as_bytes()) {
                prop_assert!(names.iter().all(|name| is_safe_path(name)));
            }
        }
    }
}
