//! Who drafts: from the flags to a proposer, checked before any weight is loaded.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tileinfer::backend::ComputeType;
use tileinfer::config::{DFlashConfig, ModelConfig};
use tileinfer::plan::MemoryPlan;
use tileinfer::runner::Runner;
use tileinfer::spec::{
    DFlashProposer, DraftProposer, NgramProposer, SpecStats, Speculation, check_vocabulary,
};
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, HostDFlash, HostModel};

use crate::args::{HubArgs, SpecArg, SpecArgs};
use crate::models;
use crate::usage;
use crate::voice::Voice;

/// Who drafts, and how much.
#[derive(Debug, Clone)]
pub(crate) struct Speculating {
    /// The directory of the model that drafts; n-grams if there is none.
    model: Option<PathBuf>,
    /// Whether that is to be a DFlash drafter, if it was said.
    dflash: Option<bool>,
    /// Drafts a step at most.
    drafts: Option<usize>,
    /// Whether drafts are drawn.
    sample: bool,
    /// Whether as many as pay.
    adapts: bool,
}

/// A model that drafts, read and checked.
pub(crate) enum Drafter {
    /// Another language model.
    Model {
        config: ModelConfig,
        host: HostModel,
    },
    /// A drafter that reads the target's hidden states.
    DFlash {
        config: DFlashConfig,
        host: HostDFlash,
    },
}

impl Drafter {
    /// Its configuration, and the bytes of its weights as they are loaded. A DFlash drafter's do not become int8.
    pub(crate) fn size(&self, compute: ComputeType, int8: bool) -> (&ModelConfig, u64) {
        match self {
            Drafter::Model { config, host } => (config, host.loaded_bytes(compute, int8)),
            Drafter::DFlash { config, host } => (&config.model, host.bytes()),
        }
    }
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
        if args.draft_sample && !named {
            return Err(usage("--draft-sample: n-grams are not drawn"));
        }
        let model = args.draft_model.as_ref();
        let model = model.map(|model| models::dir_or_pull(model, None, hub, voice));
        Ok(Some(Speculating {
            model: model.transpose()?,
            dflash: match how {
                SpecArg::Draft => Some(false),
                SpecArg::Dflash => Some(true),
                _ => None,
            },
            drafts: args.num_draft_tokens,
            sample: args.draft_sample,
            adapts: how == SpecArg::Auto,
        }))
    }

    /// Reads the model that drafts for the one of `target` in `dir`, if there is one.
    pub(crate) fn read(
        &self,
        dir: &Path,
        target: &ModelConfig,
        compute: ComputeType,
    ) -> Result<Option<Drafter>> {
        let Some(draft) = &self.model else {
            return Ok(None);
        };
        let read = || -> Result<Drafter> {
            let checkpoint = || Checkpoint::open(draft);
            if self.is_dflash() {
                if self.dflash == Some(false) {
                    bail!("it is a drafter for another model's hidden states: --spec dflash");
                }
                let config = DFlashConfig::from_dir(draft)?;
                config.check_target(target, draft)?;
                let host = HostDFlash::load(&config, &checkpoint()?, compute)?;
                return Ok(Drafter::DFlash { config, host });
            }
            let config = ModelConfig::from_dir(draft)?;
            check_vocabulary(&Tokenizer::from_dir(dir)?, &Tokenizer::from_dir(draft)?)?;
            let host = HostModel::load(&config, &checkpoint()?, compute)?;
            Ok(Drafter::Model { config, host })
        };
        let read = read().with_context(|| format!("the draft model {}", draft.display()))?;
        Ok(Some(read))
    }

    /// Whether a DFlash drafter drafts.
    pub(crate) fn is_dflash(&self) -> bool {
        let is_drafter = |dir: &PathBuf| DFlashConfig::is_drafter(dir);
        self.dflash == Some(true) || self.model.as_ref().is_some_and(is_drafter)
    }

    /// Speculation for `target`, with `draft` where another model drafts.
    pub(crate) fn speculation(
        &self,
        target: &dyn Runner,
        draft: Option<Box<dyn Runner>>,
    ) -> Result<Speculation> {
        let usual = if self.adapts {
            AUTO_DRAFTS
        } else {
            NgramProposer::K
        };
        let drafts = self.drafts.unwrap_or(usual);
        let speculation = match draft {
            Some(runner) => Speculation::new(DraftProposer::new(runner, drafts, self.sample)?),
            None if self.model.is_some() => {
                Speculation::new(DFlashProposer::new(target, self.drafts, self.sample)?)
            }
            None => Speculation::new(NgramProposer::new(
                drafts,
                NgramProposer::MAX_NGRAM,
                NgramProposer::MIN_NGRAM,
            )?),
        };
        Ok(match self.adapts {
            true => speculation.adapting(),
            false => speculation,
        })
    }

    /// What is to be said to someone whose model may reason before it answers.
    pub(crate) fn warn_of_thinking(&self, thinking: Option<bool>, voice: &Voice) {
        if self.is_dflash() && thinking != Some(false) {
            voice.note(
                "DFlash drafters are trained on answers with or without reasoning, those for Qwen3 without: if few drafts are accepted, try --no-think (or --think)",
            );
        }
    }
}

/// The plan of two models side by side, each with its own cache of the same positions.
pub(crate) fn together(one: MemoryPlan, other: MemoryPlan) -> MemoryPlan {
    MemoryPlan {
        weights_bytes: one.weights_bytes + other.weights_bytes,
        kv_bytes_per_token: one.kv_bytes_per_token + other.kv_bytes_per_token,
        rope_bytes_per_position: one.rope_bytes_per_position + other.rope_bytes_per_position,
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
