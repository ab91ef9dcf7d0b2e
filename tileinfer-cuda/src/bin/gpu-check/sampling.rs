//! The device's tokens against the host's: the same from the same logits, whatever a row asks for.

use std::sync::Arc;

use tileinfer::Result;
use tileinfer::backend::{Backend, ComputeType, Element};
use tileinfer::sampling::{
    Distribution, Draw, RowSampler, Sampled, SamplingParams, TokenCounts, TokenMask,
};
use tileinfer_cuda::CudaBackend;
use tileinfer_cuda::sampling::{SamplePlan, list_bytes};

use super::Checker;

/// What a group of draws is about: each adds little to the one before, so that the first to fail says where to
/// look.
const GROUPS: [&str; 10] = [
    "largest logit",
    "temperature",
    "min-p",
    "top-k",
    "top-p",
    "top-k, top-p, min-p",
    "penalties and biases",
    "masks",
    "broken logits",
    "all of it",
];

/// Vocabulary, rows a step, steps a group.
const SHAPES: [[usize; 3]; 6] = [
    [7, 128, 150],
    [300, 128, 570],
    [4096, 64, 80],
    [4097, 64, 80],
    [49_152, 16, 8],
    [151_936, 16, 6],
];

impl Checker {
    pub(super) fn sampling(&mut self) -> Result<()> {
        let (mut drawn, mut differ) = (0, 0);
        for [width, rows, steps] in SHAPES {
            for group in GROUPS {
                let different = self.sampling_group(group, [width, rows, steps])?;
                let mark = if different == 0 { "ok" } else { "FAILED" };
                println!(
                    "{mark} {group}, {width} logits: {} draws, {different} differ",
                    rows * steps
                );
                (drawn, differ) = (drawn + rows * steps, differ + different);
                self.failed += usize::from(different > 0);
            }
        }
        println!("{differ} of {drawn} draws differ from the host's");
        self.sampling_times()
    }

    /// Draws that differ.
    fn sampling_group(&mut self, group: &str, [width, rows, steps]: [usize; 3]) -> Result<usize> {
        let backend = CudaBackend::with_ops(ComputeType::Bf16, self.ops.clone());
        let mut tensor = backend.alloc(Element::F32, rows, width)?;
        backend.set_rows(&mut tensor, rows)?;
        let mut step = backend.alloc_step(rows, 1, 1)?;
        let mut different = 0;
        for _ in 0..steps {
            let mut logits: Vec<f32> = (0..rows).flat_map(|_| self.logits(width)).collect();
            if group == "broken logits" {
                // One row: its error is that of the step.
                let row = self.below(rows) * width;
                if self.below(3) == 0 {
                    logits[row..row + width].fill(f32::NEG_INFINITY);
                } else {
                    let at = row + self.below(width);
                    logits[at] = self.of(&[f32::NAN, f32::INFINITY]);
                }
            }
            let samplers: Vec<Option<RowSampler>> = (0..rows)
                .map(|row| {
                    let mut sampler = self.sampler(group, width);
                    let other = self.of(&[row, row, (row + 1) % rows]);
                    let logits = &logits[other * width..][..width];
                    sampler.draw = self.draw(&sampler, logits);
                    Some(sampler)
                })
                .collect();
            backend.upload(&mut tensor, 0, &logits)?;
            backend.sample(&mut step, &tensor, &samplers)?;
            let device = backend.read_samples(&step);
            let host = on_host(&samplers, &logits);
            let first_error = host.iter().find_map(|row| row.as_ref().err());
            let device = match (device, first_error) {
                (Ok(device), _) => device,
                (Err(error), Some(expected)) if error.to_string() == expected.to_string() => {
                    continue;
                }
                (Err(error), expected) => {
                    different += rows;
                    println!("the device says {error}, the host {expected:?}");
                    continue;
                }
            };
            for (row, (host, device)) in host.iter().zip(&device).enumerate() {
                if host.as_ref().is_ok_and(|host| host == device) {
                    continue;
                }
                different += 1;
                if different > 3 {
                    continue;
                }
                let logits = &logits[row * width..][..width];
                let at = |sampled: &Sampled| {
                    let token = sampled.token;
                    (token, logits.get(token as usize).copied())
                };
                println!(
                    "row {row}: the device draws {:?}, the host {:?}; {:?}",
                    at(device),
                    host.as_ref().map(at).map_err(ToString::to_string),
                    samplers[row]
                );
            }
        }
        Ok(different)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// Few values give ties, many give none.
    fn logits(&mut self, width: usize) -> Vec<f32> {
        let steps = self.of(&[2, 9, 1000, 1 << 24]);
        let scale = self.of(&[0.0, 1.0, 20.0, 20.0, 300.0]);
        let holes = self.of(&[0, 0, 3, 90]);
        let offset = self.of(&[0.0, 0.5, 1.0]);
        let logit = |random: u64| {
            if (random >> 32) % 100 < holes {
                return f32::NEG_INFINITY;
            }
            let step = (random & 0xffff_ffff) % steps;
            (step as f32 / steps as f32 - offset) * scale
        };
        let mut logits: Vec<f32> = (0..width).map(|_| logit(self.next())).collect();
        // No row without a token: that is an error, which ends a step.
        logits[0] = logits[0].max(-1.0);
        logits
    }

    fn sampler(&mut self, group: &str, width: usize) -> RowSampler {
        let has = |what: &str| group.contains(what) || group == "all of it";
        let mut params = SamplingParams {
            temperature: self.of(&[1e-6, 0.1, 0.7, 1.0, 1.0, 1.7, 50.0, f32::MAX]),
            ..SamplingParams::default()
        };
        if group == "largest logit" || (group == "all of it" && self.below(5) == 0) {
            params.temperature = 0.0;
        }
        if has("min-p") {
            params.min_p = self.of(&[0.0, 1e-6, 0.05, 0.3, 1.0]);
        }
        if has("top-k") {
            params.top_k = self.of(&[0, 1, 2, 3, 20, 50, 1000, u32::MAX]);
        }
        if has("top-p") {
            params.top_p = self.of(&[1.0, 1e-40, 0.1, 0.5, 0.8, 0.9, 0.95, 0.999, 0.999_999_94]);
        }
        let mut counts = None;
        let mut drafts = Vec::new();
        if has("penalties") {
            params.repetition_penalty = self.of(&[1.0, 1.1, 1.3, 0.6]);
            params.presence_penalty = self.of(&[0.0, 1.5, -0.4]);
            params.frequency_penalty = self.of(&[0.0, 0.3, -1.1]);
            let prompt: Vec<u32> = (0..40).map(|_| self.below(width + 2) as u32).collect();
            let mut seen = TokenCounts::new(&prompt);
            (0..200).for_each(|_| seen.push_output(self.below(width) as u32));
            drafts = (0..3).map(|_| self.below(width) as u32).collect();
            counts = Some(Arc::new(seen));
            let step = width.div_ceil(5);
            let first = self.below(width - 4 * (width / 5));
            for id in (first..width).step_by(step) {
                let bias = self.of(&[-100.0, -1.0, 2.5]);
                params.logit_bias.push((id as u32, bias));
            }
        }
        let mut vocabulary = usize::MAX;
        let mut mask = None;
        if has("masks") {
            let words = width.div_ceil(32);
            let len = self.of(&[words, words, words.div_ceil(2), words + 3]);
            let mut allowed = TokenMask::from_words((0..len).map(|_| self.next() as u32).collect());
            // A bias must name a token below the limit.
            if params.logit_bias.is_empty() {
                vocabulary = self.of(&[width, width + 5, width.div_ceil(2)]);
            }
            // As for the logits.
            allowed.allow(0);
            mask = Some(Arc::new(allowed));
        }
        RowSampler {
            params: Arc::new(params),
            counts,
            drafts,
            mask,
            seed: self.next(),
            position: self.next() >> self.of(&[20, 45, 60]),
            vocabulary,
            top_logprobs: (group == "all of it" && self.below(40) == 0).then_some(2),
            draw: Draw::Token,
        }
    }

    /// What a token is drawn for: in half of the rows the text, else it is a draft or stands in place of one, which
    /// was drawn from `logits` or is any.
    fn draw(&mut self, sampler: &RowSampler, logits: &[f32]) -> Draw {
        let kind = self.below(4);
        if kind < 2 {
            return Draw::Token;
        }
        if kind == 2 {
            return Draw::Draft;
        }
        let mut drafter = RowSampler {
            draw: Draw::Draft,
            ..sampler.clone()
        };
        if self.below(2) == 0 {
            let mut params = SamplingParams::clone(&sampler.params);
            params.temperature *= 0.8;
            drafter.params = Arc::new(params);
        }
        let any = self.below(logits.len() + 3) as u32;
        let from = match drafter.sample(logits) {
            Ok(drafted) if self.below(8) > 0 => drafted.drawn_from,
            _ => None,
        };
        let from = from.unwrap_or_else(|| Arc::new(Distribution::one_hot(any)));
        let draft = match self.below(5) {
            0 => any,
            _ => from.ids[self.below(from.ids.len())],
        };
        Draw::Verify { draft, from }
    }

    /// What sampling takes at the size of a real vocabulary: of a token, a draft and a draft's verification.
    pub(super) fn sampling_times(&mut self) -> Result<()> {
        let width = 151_936;
        for rows in [1, 16, 64] {
            let logits: Vec<f32> = (0..rows * width)
                .map(|_| (self.next() >> 40) as f32 * (24.0 / (1 << 24) as f32))
                .collect();
            let row = logits[..width].to_vec();
            let logits = self.array(super::Type::F32, &logits)?;
            let tokens = self.integers(&vec![0; rows])?;
            let lists = list_bytes(rows, width);
            let lists = self.ops.device().alloc("lists", lists)?;
            let mut line = format!("{rows} rows of {width} logits:");
            for (name, top_k, top_p) in [
                ("temperature", 0, 1.0),
                ("top-k", 20, 1.0),
                ("top-p", 0, 0.95),
                ("top-k and top-p", 20, 0.95),
            ] {
                let params = SamplingParams {
                    temperature: 0.7,
                    top_k,
                    top_p,
                    ..SamplingParams::default()
                };
                let sampler = |draw| RowSampler {
                    params: Arc::new(params.clone()),
                    counts: None,
                    drafts: Vec::new(),
                    mask: None,
                    seed: 5,
                    position: 7,
                    vocabulary: width,
                    top_logprobs: None,
                    draw,
                };
                let drafted = sampler(Draw::Draft).sample(&row)?;
                let verify = Draw::Verify {
                    draft: drafted.token,
                    from: drafted.drawn_from.unwrap_or_default(),
                };
                line += &format!(" {name}");
                for draw in [Draw::Token, Draw::Draft, verify] {
                    let plan = SamplePlan::new(&vec![Some(sampler(draw)); rows], width);
                    let mut words = vec![0; plan.words()];
                    plan.write(&mut words);
                    let words = self.integers(&words)?;
                    let (logits, words) = (logits.at(), words.at());
                    let to = [tokens.at(), lists.address()];
                    let time = self.time(8, |_| {
                        self.ops.sample(to, logits, [rows, width], &plan, words)
                    })?;
                    line += &format!(" {time:.1}");
                }
                line += " us,";
            }
            println!("{}", line.trim_end_matches(','));
        }
        Ok(())
    }
}

/// The host's answer for each row, on all cores.
fn on_host(samplers: &[Option<RowSampler>], logits: &[f32]) -> Vec<Result<Sampled>> {
    let width = logits.len() / samplers.len();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = samplers.len().div_ceil(cores);
    std::thread::scope(|scope| {
        let shares = samplers
            .chunks(share)
            .zip(logits.chunks(share * width))
            .map(|(samplers, logits)| {
                scope.spawn(move || {
                    let rows = samplers.iter().flatten().zip(logits.chunks(width));
                    rows.map(|(sampler, row)| sampler.sample(row))
                        .collect::<Vec<_>>()
                })
            });
        let shares: Vec<_> = shares.collect();
        shares
            .into_iter()
            .flat_map(|share| share.join().expect("sampling does not panic"))
            .collect()
    })
}
