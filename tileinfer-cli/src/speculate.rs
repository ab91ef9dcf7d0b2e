//! Who drafts: from the flags to a proposer, checked before any weight is loaded.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tileinfer::backend::ComputeType;
use tileinfer::config::ModelConfig;
use tileinfer::plan::MemoryPlan;
use tileinfer::runner::Runner;
use tileinfer::spec::{DraftProposer, NgramProposer, SpecStats, Speculation, check_vocabulary};
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, HostModel};

use crate::args::{HubArgs, SpecArg, SpecArgs};
use crate::models;
use crate::usage;
use crate::voice::Voice;

/// Who drafts, and how much.
#[derive(Debug, Clone)]
pub(crate) struct Speculating {
    pub(crate) drafter: Drafter,
    /// Drafts a step at most.
    drafts: Option<usize>,
    /// Whether drafts are drawn.
    sample: bool,
    /// Whether as many as pay.
    adapts: bool,
}

/// Who drafts.
#[derive(Debug, Clone)]
pub(crate) enum Drafter {
    Ngram,
    /// The model in this directory.
    Model(PathBuf),
}

/// A draft model that has been read.
pub(crate) struct DraftModel {
    pub(crate) config: ModelConfig,
    pub(crate) host: HostModel,
}

/// Drafts a step when as many are made as pay.
const AUTO_DRAFTS: usize = 8;

impl Speculating {
    /// What `args` ask for; none if nobody drafts. A draft model is downloaded if it is not here.
    pub(crate) fn choose(args: &SpecArgs, hub: HubArgs, voice: &Voice) -> Result<Option<Self>> {
        let named = args.draft_model.is_some();
        let default = if named { SpecArg::Auto } else { SpecArg::Off };
        let how = args.spec.unwrap_or(default);
        match how {
            SpecArg::Off | SpecArg::Ngram if named => {
                return Err(usage("--draft-model needs --spec auto, draft or dflash"));
            }
            SpecArg::Off if args.num_draft_tokens.is_some() || args.draft_sample => {
                return Err(usage(
                    "--num-draft-tokens and --draft-sample need --spec auto, ngram, draft or dflash",
                ));
            }
            SpecArg::Draft | SpecArg::Dflash if !named => {
                return Err(usage("give the model that drafts: --draft-model MODEL"));
            }
            SpecArg::Off => return Ok(None),
            _ => {}
        }
        let drafter = match &args.draft_model {
            None => Drafter::Ngram,
            Some(model) => Drafter::Model(models::dir_or_pull(model, None, hub, voice)?),
        };
        if args.draft_sample && matches!(drafter, Drafter::Ngram) {
            return Err(usage("--draft-sample: n-grams are not drawn"));
        }
        Ok(Some(Speculating {
            drafter,
            drafts: args.num_draft_tokens,
            sample: args.draft_sample,
            adapts: how == SpecArg::Auto,
        }))
    }

    /// Reads the draft model for a target in `dir`, if there is one.
    pub(crate) fn read(&self, dir: &Path, compute: ComputeType) -> Result<Option<DraftModel>> {
        let Drafter::Model(draft) = &self.drafter else {
            return Ok(None);
        };
        let read = || -> Result<DraftModel> {
            let config = ModelConfig::from_dir(draft)?;
            check_vocabulary(&Tokenizer::from_dir(dir)?, &Tokenizer::from_dir(draft)?)?;
            let host = HostModel::load(&config, &Checkpoint::open(draft)?, compute)?;
            Ok(DraftModel { config, host })
        };
        let read = read().with_context(|| format!("the draft model {}", draft.display()))?;
        Ok(Some(read))
    }

    /// Speculation with `draft`, where there is a draft model.
    pub(crate) fn speculation(&self, draft: Option<Box<dyn Runner>>) -> Result<Speculation> {
        let auto = if self.adapts {
            AUTO_DRAFTS
        } else {
            NgramProposer::K
        };
        let drafts = self.drafts.unwrap_or(auto);
        let speculation = match (&self.drafter, draft) {
            (Drafter::Ngram, None) => Speculation::new(NgramProposer::new(
                drafts,
                NgramProposer::MAX_NGRAM,
                NgramProposer::MIN_NGRAM,
            )?),
            (Drafter::Model(_), Some(runner)) => {
                Speculation::new(DraftProposer::new(runner, drafts, self.sample)?)
            }
            _ => bail!("a draft model was read and not loaded, or the other way round"),
        };
        Ok(match self.adapts {
            true => speculation.adapting(),
            false => speculation,
        })
    }
}

/// The plan of two models side by side, each with its own cache of the same positions.
pub(crate) fn together(one: MemoryPlan, other: MemoryPlan) -> MemoryPlan {
    MemoryPlan {
        weights_bytes: one.weights_bytes + other.weights_bytes,
        kv_bytes_per_token: one.kv_bytes_per_token + other.kv_bytes_per_token,
        workspace_bytes: one.workspace_bytes + other.workspace_bytes,
    }
}

/// What speculation did, as `--json` has it.
pub(crate) fn json(spec: &SpecStats) -> serde_json::Value {
    let number = |value: f64| value.is_finite().then_some(value);
    serde_json::json!({
        "steps": spec.steps,
        "drafted": spec.drafted,
        "accepted": spec.accepted,
        "acceptance_rate": number(spec.acceptance_rate()),
        "tokens_per_step": number(spec.tokens_per_step()),
        "held_back": spec.held_back,
        "speedup": spec.speedup(),
    })
}
