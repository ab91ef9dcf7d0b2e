//! Names that come from outside (repositories, revisions, files) and the rules that make them safe
//! to use in a path and in a URL. Knows no file system.

use crate::{Error, Result};

/// The revision meant when none is given.
pub const DEFAULT_REVISION: &str = "main";

/// The id of a model repository: `organisation/name`, or a bare `name` for a few old ones.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RepoId(String);

impl RepoId {
    /// Checks the hub's rules: one or two parts of ASCII letters, digits, `.`, `_` and `-`, none of which
    /// starts or ends with `.` or `-`, holds `--` or `..`, ends with `.git` or is longer than 96 characters.
    pub fn parse(id: &str) -> Result<Self> {
        let refuse = |reason: &str| {
            Error::usage(format!(
                "{id:?} is not a model: {reason}; expected a hub id such as Qwen/Qwen3-0.6B, or an existing directory"
            ))
        };
        let parts: Vec<&str> = id.split('/').collect();
        if parts.len() > 2 {
            return Err(refuse("a hub id has one `/` at most"));
        }
        for part in &parts {
            if part.is_empty() {
                return Err(refuse("a part of the id is empty"));
            }
            if part.len() > 96 {
                return Err(refuse("a part of the id is longer than 96 characters"));
            }
            if !part
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
            {
                return Err(refuse(
                    "only letters, digits, `-`, `_` and `.` may stand in an id",
                ));
            }
            if part.starts_with(['-', '.']) || part.ends_with(['-', '.']) {
                return Err(refuse("no part of an id starts or ends with `-` or `.`"));
            }
            if part.contains("--") || part.contains("..") || part.ends_with(".git") {
                return Err(refuse("an id holds no `--`, no `..` and no `.git` ending"));
            }
        }
        Ok(RepoId(id.to_owned()))
    }

    /// The id as it was typed.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of its folder in the cache: `models--organisation--name`.
    pub(super) fn folder(&self) -> String {
        format!("models--{}", self.0.replace('/', "--"))
    }

    /// The repository whose folder in the cache has this name.
    pub(super) fn from_folder(folder: &str) -> Option<Self> {
        let id = folder.strip_prefix("models--")?.replacen("--", "/", 1);
        RepoId::parse(&id).ok()
    }
}

impl std::fmt::Display for RepoId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether `text` is a full commit hash: 40 lower-case hexadecimal digits.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && is_hex(text)
}

/// Whether `text` consists of lower-case hexadecimal digits.
pub(super) fn is_hex(text: &str) -> bool {
    text.bytes()
        .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Checks a branch, tag or commit against git's rules for names, which also keep it inside its folder.
pub(super) fn check_revision(revision: &str) -> Result<()> {
    let bad = revision.is_empty()
        || revision.len() > 255
        || revision.contains("@{")
        || revision
            .chars()
            .any(|c| c.is_control() || c.is_whitespace() || "\\:?*[~^".contains(c))
        || revision.split('/').any(|part| {
            part.is_empty() || part.starts_with('.') || part.ends_with('.') || part.contains("..")
        });
    if bad {
        return Err(Error::usage(format!(
            "{revision:?} is not a revision; give a branch, a tag or a commit hash"
        )));
    }
    Ok(())
}

/// Whether `path` is a plain relative path with `/` between its parts that stays below its folder on every
/// operating system: no `..`, no drive, no backslash, no control characters.
pub(super) fn is_safe_path(path: &str) -> bool {
    !path.is_empty()
        && path.len() <= 1024
        && path.split('/').all(|part| {
            !part.is_empty()
                && part.len() <= 200
                && part != "."
                && part != ".."
                && !part.ends_with([' ', '.'])
                && !part.chars().any(|c| c.is_control() || "\\:".contains(c))
        })
}

/// Percent-encodes everything but letters, digits and `-_.~`; `keep` names one more byte to leave alone.
pub(super) fn quote(text: &str, keep: Option<u8>) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || keep == Some(byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repo_ids() {
        for good in ["gpt2", "Qwen/Qwen3-0.6B", "a/b_c.d", "0x/1"] {
            let id = RepoId::parse(good).unwrap();
            assert_eq!(RepoId::from_folder(&id.folder()).unwrap(), id);
        }
        let long = "a".repeat(97);
        for bad in [
            "", "/", "a/", "/a", "a/b/c", "..", "a/..", "../b", "a/.b", "a/b.", "-a/b", "a/b-",
            "a--b/c", "a/b..c", "a/b.git", "a b", "a/b\n", "a\\b", "C:/b", "~/x", "a/b?x", "a/b#x",
            "a/%2e%2e", "é/b", "a\0b", &long,
        ] {
            assert!(RepoId::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn revisions() {
        for good in ["main", "v1.0", "refs/pr/1", "feature/x", "0123abc"] {
            check_revision(good).unwrap();
        }
        for bad in [
            "", "..", "../x", "a/../b", "/a", "a/", "a//b", ".a", "a/.b", "a b", "a\\b", "a:b",
            "a\0", "a\n", "a^", "a~1", "a@{1}", "a.",
        ] {
            assert!(check_revision(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn paths() {
        for good in ["config.json", "a/b.safetensors", ".gitattributes", "a b/c"] {
            assert!(is_safe_path(good), "{good:?}");
        }
        for bad in [
            "",
            "/etc/passwd",
            "../x",
            "a/../../x",
            "a//b",
            "a/",
            "./a",
            "a\\b",
            "C:x",
            "a\0",
            "a\n",
            "a.",
            "a ",
        ] {
            assert!(!is_safe_path(bad), "{bad:?}");
        }
    }

    #[test]
    fn quoting() {
        assert_eq!(quote("refs/pr/1", None), "refs%2Fpr%2F1");
        assert_eq!(quote("a b/ü%.json", Some(b'/')), "a%20b/%C3%BC%25.json");
    }
}
