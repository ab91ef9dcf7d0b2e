//! Files that the user names: read whole, and written so that no half of one is ever left.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// The text of `path`; `-` is standard input.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    if path == Path::new("-") {
        return std::io::read_to_string(std::io::stdin()).context("reading standard input");
    }
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// The JSON array of token ids in `path`.
pub(crate) fn read_ids(path: &Path) -> Result<Vec<u32>> {
    let text = read_text(path)?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            "{} is not a JSON array of token ids such as [1, 2, 3]",
            path.display()
        )
    })
}

/// Writes `path` under another name and renames it.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let written = File::create(&part)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&part, path));
    written
        .inspect_err(|_| {
            // It may not be there at all.
            let _ = fs::remove_file(&part);
        })
        .with_context(|| format!("writing {}", path.display()))
}
