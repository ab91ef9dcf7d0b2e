//! A DFlash drafter's `config.json` in z-lab's format: the configuration of a Qwen3 model, and what ties it to its
//! target. What its masks mean for attention is decided where it is loaded.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::ModelConfig;
use super::fields::Fields;
use super::read::{parse, read_text};
use crate::{Error, Result};

/// The resolved configuration of a DFlash drafter.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DFlashConfig {
    /// Its own layers. Windows are in it; embedding and head are the target's.
    pub model: ModelConfig,
    /// Tokens of a block: the newest token and the drafts after it.
    pub block_size: usize,
    /// The token that stands where a draft is wanted.
    pub mask_token: u32,
    /// Layers of its target.
    pub num_target_layers: usize,
    /// Layers of the target whose output it reads, from 0, in the order in which they stand side by side.
    pub target_layers: Vec<usize>,
    /// Of each layer, whether a slot of a block sees only those before it.
    pub causal: Vec<bool>,
}

/// Tokens of a block where the file does not say.
const BLOCK_SIZE: usize = 16;

/// Later kinds of drafters, by what only they have; each drafts by other rules.
const OTHERS: [(&str, &str); 12] = [
    ("conv_kernel_size", "DFlash 2"),
    ("selector_rank", "DFlash 2"),
    ("selector_top_k", "DFlash 2"),
    ("markov_rank", "DSpark"),
    ("markov_head_type", "DSpark"),
    ("enable_confidence_head", "DSpark"),
    ("sample_from_anchor", "DSpark"),
    ("speculators_model_type", "the speculators format"),
    ("eagle_config", "EAGLE"),
    ("projector_type", "Domino"),
    ("draft_vocab_size", "a drafter with a vocabulary of its own"),
    ("num_anchors", "DSpark"),
];

/// What some drafters compute besides.
const EXTRAS: [&str; 7] = [
    "attention_sink_bias",
    "attention_value_scale",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "use_swa",
    "swa_window_size",
];

impl DFlashConfig {
    /// Whether the model in `dir` is a drafter rather than a language model, of whichever kind.
    pub fn is_drafter(dir: &Path) -> bool {
        let value = read_text(&dir.join("config.json"))
            .ok()
            .flatten()
            .and_then(|text| serde_json::from_str::<Value>(&text).ok());
        value.is_some_and(|value| {
            let named = |name: &Value| name.as_str().is_some_and(|name| kind(name).is_some());
            let architectures = value["architectures"].as_array();
            architectures.is_some_and(|names| names.iter().any(named))
                || value.get("dflash_config").is_some()
                || value.get("speculators_model_type").is_some()
        })
    }

    /// Reads `config.json` in a drafter's directory.
    ///
    /// # Errors
    /// `BadModel` naming the file and the field, or the kind of drafter if it is one that is not supported.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join("config.json");
        let text = read_text(&path)?.ok_or_else(|| {
            Error::bad_model(
                dir,
                "there is no config.json here; give the directory of a DFlash drafter",
            )
        })?;
        Self::from_json(&text, &path)
    }

    /// Reads the text of a `config.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// Those of [`DFlashConfig::from_dir`].
    pub fn from_json(text: &str, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let value = parse(text, path)?;
        let outer = Fields::new(path, &value)?;
        let nested = outer.object("dflash_config")?;
        let all: Vec<&Fields<'_>> = nested.iter().chain([&outer]).collect();
        refuse_others(&outer, &all)?;
        let model = ModelConfig::from_json(text, path)?;
        // What stands in `dflash_config` counts before the same at the top.
        let whole = |name: &str, range: std::ops::RangeInclusive<usize>| {
            for fields in &all {
                if let Some(value) = fields.whole(name, range.clone())? {
                    return Ok(Some(value));
                }
            }
            Ok::<_, Error>(None)
        };
        let num_target_layers = whole("num_target_layers", 1..=1 << 12)?
            .ok_or_else(|| outer.error("num_target_layers", "is missing"))?;
        let mask_token = whole("mask_token_id", 0..=(1 << 24) - 1)?.ok_or_else(|| {
            outer.error(
                "dflash_config.mask_token_id",
                "is missing: the token that stands where a draft is wanted",
            )
        })?;
        let target_layers = match all
            .iter()
            .find(|fields| fields.get("target_layer_ids").is_some())
        {
            Some(fields) => listed_layers(fields, num_target_layers)?,
            None => usual_layers(num_target_layers, model.num_layers),
        };
        let causal = match outer.flag("is_causal")? {
            Some(causal) => vec![causal; model.num_layers],
            None => model
                .layers
                .iter()
                .map(|layer| layer.window.is_some())
                .collect(),
        };
        Ok(DFlashConfig {
            block_size: whole("block_size", 2..=1 << 10)?.unwrap_or(BLOCK_SIZE),
            mask_token: mask_token as u32,
            num_target_layers,
            target_layers,
            causal,
            model,
        })
    }

    /// Refuses a target that the drafter was not made for: its hidden states, embedding and head are used.
    ///
    /// # Errors
    /// `BadModel` naming what differs; `path` is what it calls the drafter.
    pub fn check_target(&self, target: &ModelConfig, path: &Path) -> Result<()> {
        let mine = &self.model;
        let pairs = [
            (
                "num_target_layers",
                self.num_target_layers,
                "num_hidden_layers",
                target.num_layers,
            ),
            (
                "hidden_size",
                mine.hidden_size,
                "hidden_size",
                target.hidden_size,
            ),
            (
                "vocab_size",
                mine.vocab_size,
                "vocab_size",
                target.vocab_size,
            ),
        ];
        for (name, drafter, theirs, target) in pairs {
            if drafter != target {
                return Err(Error::bad_model(
                    path,
                    format!(
                        "the drafter was made for another model: its {name} is {drafter}, the target's {theirs} is {target}"
                    ),
                ));
            }
        }
        if self.mask_token as usize >= target.vocab_size {
            return Err(Error::bad_model(
                path,
                format!(
                    "mask_token_id is {}, the target's embedding has {} rows",
                    self.mask_token, target.vocab_size
                ),
            ));
        }
        Ok(())
    }
}

/// What an architecture drafts by, if it drafts.
fn kind(architecture: &str) -> Option<&'static str> {
    const KINDS: [(&str, &str); 8] = [
        ("DFlashDraftModel", "DFlash"),
        ("DFlash2", "DFlash 2"),
        ("DSpark", "DSpark"),
        ("Eagle", "EAGLE"),
        ("EAGLE", "EAGLE"),
        ("DFlashLaguna", "Laguna"),
        ("Assistant", "an assistant"),
        ("Speculator", "the speculators format"),
    ];
    let found = KINDS.iter().find(|(part, _)| architecture.contains(part));
    found.map(|&(_, kind)| kind)
}

fn refuse_others(outer: &Fields<'_>, all: &[&Fields<'_>]) -> Result<()> {
    let only = "only DFlash in z-lab's first format (DFlashDraftModel) is supported";
    let names = outer.list("architectures")?.unwrap_or_default();
    for name in names.iter().filter_map(Value::as_str) {
        match kind(name) {
            Some("DFlash") | None => {}
            Some(other) => {
                return Err(outer.error(
                    "architectures",
                    format_args!("names {name}, which is {other}; {only}"),
                ));
            }
        }
    }
    for fields in all {
        for (name, kind) in OTHERS {
            // A rank of 0 is how one of them says that it is none, and it still drafts by its own rules.
            if fields.get(name).is_some() {
                return Err(fields.error(name, format_args!("is what {kind} has; {only}")));
            }
        }
        for name in EXTRAS {
            if fields
                .get(name)
                .is_some_and(|value| value.as_bool() != Some(false))
            {
                return Err(fields.error(name, "is set; drafters that have it are not supported"));
            }
        }
    }
    Ok(())
}

fn listed_layers(fields: &Fields<'_>, num_target_layers: usize) -> Result<Vec<usize>> {
    const NAME: &str = "target_layer_ids";
    let list = fields.list(NAME)?.unwrap_or_default();
    // The last layer's output is normed where the reference reads it; no drafter is known that does.
    let last = num_target_layers - 1;
    let allowed = || {
        fields.wrong(
            NAME,
            format_args!("a list of layers before the target's last one, {last}"),
        )
    };
    if list.is_empty() || list.len() > 64 {
        return Err(allowed());
    }
    list.iter()
        .map(|id| {
            let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
            id.filter(|&id| id < last).ok_or_else(allowed)
        })
        .collect()
}

/// Layers spread from the second to the third last: what drafters are trained with unless they say otherwise.
fn usual_layers(target: usize, drafter: usize) -> Vec<usize> {
    if drafter == 1 {
        return vec![target / 2];
    }
    let step = (target as f64 - 4.0) / (drafter - 1) as f64;
    // As Python rounds: halves to even.
    (0..drafter)
        .map(|i| (1.0 + i as f64 * step).round_ties_even().max(0.0) as usize)
        .collect()
}
