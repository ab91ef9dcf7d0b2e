//! Ctrl-C: the first asks an answer to stop, a second one while that has not happened ends the program. At the
//! prompt the line editor takes Ctrl-C itself, as a key.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

static ASKED: AtomicBool = AtomicBool::new(false);
/// What a shell expects of a program that SIGINT ended.
const INTERRUPTED: i32 = 130;

/// From now on Ctrl-C does not end the program at once.
pub(super) fn listen() -> Result<()> {
    ctrlc::set_handler(|| {
        if ASKED.swap(true, Ordering::SeqCst) {
            std::process::exit(INTERRUPTED);
        }
    })
    .context("listening for Ctrl-C")
}

/// Whether an answer is to stop.
pub(super) fn asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}

/// A new answer begins.
pub(super) fn forget() {
    ASKED.store(false, Ordering::SeqCst);
}
