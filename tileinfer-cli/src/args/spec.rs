//! The flags that say who drafts.

use clap::{Args, ValueEnum};

use super::at_least_one;

/// Whether several tokens a step are tried, and who says which.
#[derive(Debug, Clone, Args)]
pub(crate) struct SpecArgs {
    /// Verify drafts, several tokens a step: n-grams of the text, a draft model, or a DFlash drafter. auto
    /// measures what they bring and drafts as much as pays [default: off, or auto with --draft-model]
    #[arg(long, value_name = "HOW", value_enum)]
    pub(crate) spec: Option<SpecArg>,
    /// The model that drafts: an id on the hub or a directory
    #[arg(long, value_name = "MODEL")]
    pub(crate) draft_model: Option<String>,
    /// Drafts a step at most [default: 4, or all of a DFlash block]
    #[arg(long, value_name = "K", value_parser = at_least_one())]
    pub(crate) num_draft_tokens: Option<usize>,
    /// Draw drafts as the model draws its tokens; with a seed, the text is another one of the same distribution
    #[arg(long)]
    pub(crate) draft_sample: bool,
}

/// Who drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpecArg {
    /// Nobody
    Off,
    /// The draft model if there is one, else n-grams, as much as pays
    Auto,
    /// What followed the last time that the text ended like this
    Ngram,
    /// A smaller model of the same vocabulary
    Draft,
    /// A DFlash drafter made for the model
    Dflash,
}
