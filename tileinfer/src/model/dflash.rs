//! A DFlash drafter on a device (arXiv 2602.06036): a short decoder that fills in a block of tokens in one pass. It
//! stands between its target's embedding and head, and sees the text as keys and values made from the target's
//! hidden states. It knows rows and slots; whose they are, the runner does.

use std::path::Path;

use super::decoder::forward;
use super::load::{DecoderLM, Linear, LoadOptions, Tables, plain};
use super::workspace::Workspace;
use crate::backend::{AttentionShape, Backend, Element, HeadScratch, Mask, QkNorms, StepLayout};
use crate::config::{DFlashConfig, ModelConfig};
use crate::kv::{KvElement, KvLayout};
use crate::sampling::{RowSampler, Sampled};
use crate::weights::{Checkpoint, HostDFlash, Weight};
use crate::{Error, Result};

/// See the module's first line.
pub struct DFlashDrafter<B: Backend> {
    /// What it was made for and how it drafts.
    pub config: DFlashConfig,
    /// Its layers between the target's embedding and head.
    decoder: DecoderLM<B>,
    /// From the target's hidden states side by side to one row, `[hidden, layers * hidden]`.
    fc: B::Weight,
    /// Norm of such a row.
    hidden_norm: B::Tensor,
    /// Keys and values alone of each layer, `[2 kv_heads * head_dim, hidden]`.
    key_values: Vec<Linear<B>>,
}

/// Loads the drafter in `dir` for `target`, a model of `target_config` that is on `backend`. Embedding and head are
/// shared. Reads `config.json` and the weights; that the two belong together is checked before anything is brought
/// to the device.
///
/// # Errors
/// `BadModel` if the drafter is of another kind, broken, or made for another target.
pub fn load_dflash<B: Backend>(
    backend: &B,
    dir: &Path,
    target_config: &ModelConfig,
    target: &DecoderLM<B>,
) -> Result<DFlashDrafter<B>> {
    let (embedding, head) = (target.embedding.clone(), target.head.clone());
    load_dflash_between(
        backend,
        dir,
        target_config,
        embedding,
        head,
        target.max_length(),
    )
}

/// [`load_dflash`] with the target's embedding and head alone, for sequences of up to `max_length` positions.
///
/// # Errors
/// Those of [`load_dflash`].
pub fn load_dflash_between<B: Backend>(
    backend: &B,
    dir: &Path,
    target_config: &ModelConfig,
    embedding: B::Weight,
    head: B::Weight,
    max_length: usize,
) -> Result<DFlashDrafter<B>> {
    let config = DFlashConfig::from_dir(dir)?;
    config.check_target(target_config, dir)?;
    let host = HostDFlash::load(&config, &Checkpoint::open(dir)?, backend.compute_type())?;
    DFlashDrafter::load(
        backend,
        config,
        &host,
        target_config,
        embedding,
        head,
        max_length,
    )
}

impl<B: Backend> DFlashDrafter<B> {
    /// Brings `host` to `backend`, between the `embedding` and the `head` of a target of `target_config`, for
    /// sequences of up to `max_length` positions.
    ///
    /// # Errors
    /// `BadModel` if it was made for another target.
    pub fn load(
        backend: &B,
        config: DFlashConfig,
        host: &HostDFlash,
        target_config: &ModelConfig,
        embedding: B::Weight,
        head: B::Weight,
        max_length: usize,
    ) -> Result<Self> {
        config.check_target(target_config, Path::new("the drafter"))?;
        let tables = Tables {
            embedding,
            vocabulary: target_config.vocab_size,
            head,
            head_rows: target_config.output_vocab_size,
        };
        let options = LoadOptions::new(max_length);
        let mut decoder = DecoderLM::between(
            backend,
            &config.model,
            tables,
            &host.layers,
            &host.final_norm,
            &options,
            &mut |_, _| (),
        )?;
        for (layer, &causal) in decoder.layers.iter_mut().zip(&config.causal) {
            let mask = &mut layer.attention.mask;
            *mask = match *mask {
                Mask::Causal if !causal => Mask::BlockVisible,
                Mask::Window(window) if !causal => Mask::BlockWindow(window),
                mask => mask,
            };
        }
        let queries = config.model.q_width();
        let key_values = host.layers.iter().map(|layer| {
            let weight = Weight::new(layer.qkv.parts()[1..].to_vec())?;
            let bias = layer.qkv_bias.as_ref().map(|bias| &bias[queries..]);
            Ok(Linear {
                weight: plain(backend, &weight)?,
                bias: bias.map(|bias| backend.load_vector(bias)).transpose()?,
            })
        });
        Ok(DFlashDrafter {
            key_values: key_values.collect::<Result<_>>()?,
            fc: plain(backend, &host.fc)?,
            hidden_norm: backend.load_vector(&host.hidden_norm)?,
            decoder,
            config,
        })
    }

    /// The hidden states of the target that it reads, by transformers' index: the stream after layer `k`, counted
    /// from 0, is `k + 1`.
    pub fn taps(&self) -> Vec<usize> {
        self.config.target_layers.iter().map(|k| k + 1).collect()
    }
}

/// A drafter with its pages and buffers. Its pages go with the target's: a position's keys and values have the
/// same slot in both, so block tables, copies and shared beginnings are the target's.
pub(crate) struct DFlashBlock<B: Backend> {
    drafter: DFlashDrafter<B>,
    pages: Vec<B::Pages>,
    /// Buffers of a step of blocks.
    pub(crate) block: Workspace<B>,
    /// The step of blocks whose drafts a target's step has taken last: they may not have been read yet.
    taken: B::Step,
    /// Whether the workspace's step is the second of the two.
    second: bool,
    /// Drafts of each block in the workspace's step, until a target's step takes them.
    drafted: Option<Vec<usize>>,
    context: Context<B>,
}

/// Names drafts that a target's step has taken.
#[derive(Debug)]
pub(crate) struct Taken {
    second: bool,
}

/// Buffers for the rows of a target's step.
struct Context<B: Backend> {
    /// `[rows, hidden]`, out of `fc`.
    joined: B::Tensor,
    /// The same after the norm.
    normed: B::Tensor,
    /// f32 `[rows, 2 kv_heads * head_dim]`.
    key_values: B::Tensor,
    /// No queries.
    queries: B::Tensor,
    heads: HeadScratch<B::Tensor>,
}

impl<B: Backend> DFlashBlock<B> {
    /// Pages like the target's `pages` of `page_size` positions, and buffers for steps of up to `rows` rows of the
    /// target and of `spans` blocks with block tables of `table_width`.
    pub(crate) fn new(
        backend: &B,
        drafter: DFlashDrafter<B>,
        page_size: usize,
        pages: usize,
        rows: usize,
        spans: usize,
        table_width: usize,
    ) -> Result<Self> {
        let decoder = &drafter.decoder;
        let AttentionShape {
            kv_heads, head_dim, ..
        } = decoder.layers[0].attention;
        let layout = KvLayout {
            page_size,
            kv_heads,
            head_dim,
            element: KvElement::Compute(backend.compute_type()),
        };
        let alloc = |width| backend.alloc(Element::Model, rows, width);
        let shape = AttentionShape {
            heads: 0,
            ..decoder.layers[0].attention
        };
        let kv = kv_heads * head_dim;
        let block_rows = spans * drafter.config.block_size;
        Ok(DFlashBlock {
            pages: decoder
                .layers
                .iter()
                .map(|_| backend.alloc_pages(&layout, None, pages))
                .collect::<Result<_>>()?,
            block: Workspace::new(backend, decoder, block_rows, spans, table_width, &[])?,
            taken: backend.alloc_step(block_rows, spans, table_width)?,
            second: false,
            drafted: None,
            context: Context {
                joined: alloc(decoder.hidden)?,
                normed: alloc(decoder.hidden)?,
                key_values: backend.alloc(Element::F32, rows, 2 * kv)?,
                queries: alloc(0)?,
                heads: HeadScratch::new(backend, &shape, rows)?,
            },
            drafter,
        })
    }

    /// How it drafts.
    pub(crate) fn config(&self) -> &DFlashConfig {
        &self.drafter.config
    }

    /// Copies whole pages `(from, to)`, as the target does.
    pub(crate) fn copy_pages(&mut self, backend: &B, copies: &[(u32, u32)]) -> Result<()> {
        for pages in &mut self.pages {
            backend.copy_pages(pages, copies)?;
        }
        Ok(())
    }

    /// Sizes the buffers for a target's step of `rows` rows.
    pub(crate) fn begin_context(&mut self, backend: &B, rows: usize) -> Result<()> {
        let context = &mut self.context;
        for tensor in [
            &mut context.joined,
            &mut context.normed,
            &mut context.key_values,
            &mut context.queries,
        ] {
            backend.set_rows(tensor, rows)?;
        }
        context.heads.set_rows(backend, rows)
    }

    /// Writes the keys and values that a target's step has for the drafter, from its tapped streams `taps`,
    /// `[rows, layers * hidden]`, to the slots of `step`. Rows that are not kept are written over later.
    pub(crate) fn write_context(
        &mut self,
        backend: &B,
        taps: &B::Tensor,
        step: &B::Step,
    ) -> Result<()> {
        let (drafter, context) = (&self.drafter, &mut self.context);
        let decoder = &drafter.decoder;
        backend.linear(&mut context.joined, &drafter.fc, None, taps)?;
        backend.rms_norm(
            &mut context.normed,
            &context.joined,
            &drafter.hidden_norm,
            decoder.eps,
        )?;
        let layers = decoder.layers.iter().zip(&drafter.key_values);
        for ((layer, linear), pages) in layers.zip(&mut self.pages) {
            let norms = QkNorms {
                query: None,
                key: layer.key_norm.as_ref(),
                eps: decoder.eps,
            };
            let shape = AttentionShape {
                heads: 0,
                ..layer.attention
            };
            backend.linear_qk_norm_rope_store(
                &mut context.queries,
                pages,
                &mut context.heads,
                &mut context.key_values,
                (&linear.weight, linear.bias.as_ref()),
                &context.normed,
                norms,
                layer.rotates.then_some(&decoder.rope),
                step,
                &shape,
            )?;
        }
        Ok(())
    }

    /// Prepares a step of the blocks in `layout`. Gives back what a recording of it depends on besides its shape:
    /// whether it is in the second of two step buffers, and how often shared buffers have moved.
    pub(crate) fn begin(&mut self, backend: &B, layout: &StepLayout) -> Result<(bool, usize)> {
        self.drafted = None;
        let (decoder, block) = (&self.drafter.decoder, &mut self.block);
        block.begin(backend, decoder, layout, None)?;
        Ok((self.second, block.moves()))
    }

    /// Runs the blocks: the logits of the rows that are wanted are in the block's workspace then. The keys and
    /// values of the blocks are beyond what is kept of their sequences.
    pub(crate) fn forward(&mut self, backend: &B) -> Result<()> {
        let (decoder, block) = (&self.drafter.decoder, &mut self.block);
        forward(backend, decoder, &mut self.pages, block)
    }

    /// Draws the rows that are wanted by `samplers`: `drafts` of each block.
    pub(crate) fn sample(
        &mut self,
        backend: &B,
        samplers: &[Option<RowSampler>],
        drafts: Vec<usize>,
    ) -> Result<()> {
        let block = &mut self.block;
        backend.sample(&mut block.step, &block.logits, samplers)?;
        self.drafted = Some(drafts);
        Ok(())
    }

    /// The drafts that no target's step has taken, of each block. Waits for them.
    pub(crate) fn read(&self, backend: &B) -> Result<Vec<Vec<Sampled>>> {
        let drafted = self.drafted.as_ref();
        let drafted =
            drafted.ok_or_else(|| Error::Bug("there are no drafts to read".to_owned()))?;
        let mut all = backend.read_samples(&self.block.step)?.into_iter();
        let blocks = drafted.iter();
        Ok(blocks
            .map(|&count| all.by_ref().take(count).collect())
            .collect())
    }

    /// The step that a target's step of `layout` takes its drafts from.
    pub(crate) fn drafts(&self, layout: &StepLayout) -> Result<Option<&B::Step>> {
        let there = self.drafted.iter().flatten().sum::<usize>();
        match layout.drafts.iter().map(|&(_, index)| index as usize).max() {
            None => Ok(None),
            Some(last) if last < there => Ok(Some(&self.block.step)),
            Some(last) => Err(Error::Bug(format!(
                "draft {last} is to be verified where there are {there}"
            ))),
        }
    }

    /// A target's step has taken the drafts, which stay readable until another one does: names them.
    pub(crate) fn take(&mut self) -> Taken {
        std::mem::swap(&mut self.block.step, &mut self.taken);
        self.drafted = None;
        self.second = !self.second;
        Taken {
            second: !self.second,
        }
    }

    /// The ids of drafts that were taken. Waits for them.
    pub(crate) fn read_taken(&self, backend: &B, taken: &Taken) -> Result<Vec<u32>> {
        let step = match taken.second == self.second {
            true => &self.block.step,
            false => &self.taken,
        };
        let drafts = backend.read_samples(step)?.into_iter();
        Ok(drafts.map(|draft| draft.token).collect())
    }
}
