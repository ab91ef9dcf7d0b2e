//! What speculation did for one answer, in numbers.

use serde::Serialize;

/// Counts of one answer's speculation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct SpecStats {
    /// Steps that verified drafts.
    pub steps: usize,
    /// Drafts verified.
    pub drafted: usize,
    /// Drafts that became part of the text.
    pub accepted: usize,
    /// Steps that were left plain because drafts would have cost more than they bring.
    pub held_back: usize,
    /// Seconds that the steps after the prompt took, drafting included.
    pub seconds: f64,
    /// Seconds that plain steps would have taken for the same tokens, as far as plain steps were seen.
    pub plain_seconds: f64,
}

impl SpecStats {
    /// The share of drafts that became part of the text; NaN before any draft.
    pub fn acceptance_rate(&self) -> f64 {
        self.accepted as f64 / self.drafted as f64
    }

    /// Tokens that a step with drafts brought on average; NaN before any.
    pub fn tokens_per_step(&self) -> f64 {
        (self.accepted + self.steps) as f64 / self.steps as f64
    }

    /// How much faster than plain decoding it was, if plain steps were seen to compare with.
    pub fn speedup(&self) -> Option<f64> {
        let known = self.plain_seconds > 0.0 && self.seconds > 0.0;
        known.then(|| self.plain_seconds / self.seconds)
    }

    /// One line about it.
    pub fn describe(&self) -> String {
        if self.steps == 0 {
            return "speculation: no drafts".to_owned();
        }
        let mut line = format!(
            "speculation: {} of {} drafts accepted ({:.0} %), {:.2} tokens a step in {} steps",
            self.accepted,
            self.drafted,
            100.0 * self.acceptance_rate(),
            self.tokens_per_step(),
            self.steps
        );
        if let Some(speedup) = self.speedup() {
            line += &format!(", {speedup:.2} times as fast as plain decoding");
        }
        if self.held_back > 0 {
            line += &format!(
                "; {} steps were left plain, as drafts cost more than they bring here",
                self.held_back
            );
        }
        line
    }
}
