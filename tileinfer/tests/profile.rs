//! A profile of a device with a queue, whose ops return before they have run: each is timed by the device's clock, and
//! nothing is recorded unless the profile pauses. The device is a made-up one that counts.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tileinfer::Result;
use tileinfer::backend::{
    Activation, AttentionShape, Backend, ComputeType, Count, Element, KvRows, Profile, Profiled,
    RopeTable, StepLayout,
};
use tileinfer::config::ModelConfig;
use tileinfer::engine::StepLoop;
use tileinfer::kv::{KvLayout, Sequence};
use tileinfer::model::{DecoderLM, LoadOptions};
use tileinfer::runner::{Batch, Input, ModelRunner, Rows, RunnerOptions, Span, Want};
use tileinfer::sampling::{Draw, RowSampler, Sampled};
use tileinfer::weights::{Checkpoint, HostModel, Weight};

/// What a kernel takes on the made-up device.
const KERNEL: Duration = Duration::from_millis(7);

/// A device that computes nothing. Clones are the same one.
#[derive(Clone, Default)]
struct Queue(Arc<Mutex<Log>>);

#[derive(Debug, Default, Clone, PartialEq)]
struct Log {
    /// Whether launches are being timed, or recorded.
    timing: bool,
    recording: bool,
    /// Kernels that were launched and timed, launched and not timed, and recorded.
    timed: u32,
    untimed: u32,
    recorded: u32,
    /// Recordings made and replayed.
    recordings: u32,
    replays: u32,
}

impl Queue {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap()
    }

    /// The log so far, which starts anew.
    fn take(&self) -> Log {
        std::mem::take(&mut self.log())
    }

    fn kernel(&self) -> Result<()> {
        let mut log = self.log();
        let Log {
            timing, recording, ..
        } = *log;
        assert!(!(timing && recording), "a recording that is timed");
        *match (timing, recording) {
            (true, _) => &mut log.timed,
            (_, true) => &mut log.recorded,
            _ => &mut log.untimed,
        } += 1;
        Ok(())
    }
}

/// Rows and width.
type Tensor = (usize, usize);

impl Backend for Queue {
    type Tensor = Tensor;
    type Weight = ();
    type Pages = ();
    type Rope = ();
    type Step = ();
    type Graph = ();

    fn name(&self) -> String {
        "a queue".to_owned()
    }

    fn compute_type(&self) -> ComputeType {
        ComputeType::Bf16
    }

    fn alloc(&self, _: Element, _: usize, width: usize) -> Result<Tensor> {
        Ok((0, width))
    }

    fn set_rows(&self, tensor: &mut Tensor, rows: usize) -> Result<()> {
        tensor.0 = rows;
        Ok(())
    }

    fn shape(&self, tensor: &Tensor) -> (usize, usize) {
        *tensor
    }

    fn upload(&self, _: &mut Tensor, _: usize, _: &[f32]) -> Result<()> {
        Ok(())
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        Ok(vec![0.0; tensor.0 * tensor.1])
    }

    fn load_weight(&self, _: &Weight) -> Result<()> {
        Ok(())
    }

    fn load_rope(&self, _: &RopeTable) -> Result<()> {
        Ok(())
    }

    fn alloc_pages(&self, _: &KvLayout, _: Option<&[f32]>, _: usize) -> Result<()> {
        Ok(())
    }

    fn copy_pages(&self, (): &mut (), _: &[(u32, u32)]) -> Result<()> {
        Ok(())
    }

    fn read_slot(&self, (): &(), _: usize, _: usize, _: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        Ok((Vec::new(), Vec::new()))
    }

    fn alloc_step(&self, _: usize, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn prepare(&self, (): &mut (), _: &StepLayout, _: Option<&()>) -> Result<()> {
        self.kernel()
    }

    fn take_drafts(&self, (): &mut (), (): &()) -> Result<()> {
        self.kernel()
    }

    fn embed(&self, _: &mut Tensor, (): &(), (): &()) -> Result<()> {
        self.kernel()
    }

    fn rms_norm(&self, _: &mut Tensor, _: &Tensor, _: &Tensor, _: f32) -> Result<()> {
        self.kernel()
    }

    fn add(&self, _: &mut Tensor, _: &Tensor) -> Result<()> {
        self.kernel()
    }

    fn linear(&self, _: &mut Tensor, (): &(), _: Option<&Tensor>, _: &Tensor) -> Result<()> {
        self.kernel()
    }

    fn head_norm(&self, _: &mut Tensor, _: &Tensor, _: f32) -> Result<()> {
        self.kernel()
    }

    fn rope(&self, _: &mut Tensor, (): &(), (): &(), _: bool) -> Result<()> {
        self.kernel()
    }

    fn store_kv(&self, (): &mut (), _: &KvRows<Tensor>, (): &()) -> Result<()> {
        self.kernel()
    }

    fn attention(
        &self,
        _: &mut Tensor,
        _: &Tensor,
        (): &(),
        (): &(),
        _: &AttentionShape,
    ) -> Result<()> {
        self.kernel()
    }

    fn activation(&self, _: &mut Tensor, _: &Tensor, _: &Activation) -> Result<()> {
        self.kernel()
    }

    fn copy_columns(&self, _: &mut Tensor, _: usize, _: &Tensor, _: usize, _: usize) -> Result<()> {
        self.kernel()
    }

    fn gather_wanted(&self, _: &mut Tensor, _: &Tensor, (): &()) -> Result<()> {
        self.kernel()
    }

    fn sample(&self, (): &mut (), _: &Tensor, _: &[Option<RowSampler>]) -> Result<()> {
        self.kernel()
    }

    fn read_samples(&self, (): &()) -> Result<Vec<Sampled>> {
        Ok(vec![Sampled {
            token: 1,
            logprob: None,
            top: Vec::new(),
            drawn_from: None,
        }])
    }

    fn supports_graphs(&self) -> bool {
        true
    }

    fn capture(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.log().recordings += 1;
        self.log().recording = true;
        body()?;
        self.log().recording = false;
        Ok(())
    }

    fn replay(&self, (): &()) -> Result<()> {
        self.log().replays += 1;
        Ok(())
    }

    fn time(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let before = self.log().timed;
        self.log().timing = true;
        body()?;
        self.log().timing = false;
        Ok(KERNEL * (self.log().timed - before))
    }
}

/// A small model on the device, a sequence of it, and what counts.
struct Steps {
    config: ModelConfig,
    steps: StepLoop,
    sequence: Sequence,
    queue: Queue,
    profile: Profile,
}

impl Steps {
    fn new(paused: bool) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/models/qwen3");
        let config = ModelConfig::from_dir(&dir).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let host = HostModel::load(&config, &checkpoint, ComputeType::Bf16).unwrap();
        let (queue, profile) = (Queue::default(), Profile::default());
        if paused {
            profile.pause();
        }
        let backend = Profiled::new(queue.clone(), &profile);
        let load = LoadOptions::new(64);
        let model = DecoderLM::load(&backend, &config, &host, &load, &mut |_, _| ()).unwrap();
        let options = RunnerOptions::for_length(64);
        let steps = StepLoop::new(Box::new(
            ModelRunner::new(backend, model, &options).unwrap(),
        ));
        Steps {
            sequence: steps.new_sequence(),
            config,
            steps,
            queue,
            profile,
        }
    }

    /// A step of some new tokens, the last of which is sampled after: what the device saw of it.
    fn step(&mut self, tokens: usize) -> Log {
        let (ids, start) = (vec![1; tokens], self.sequence.len());
        self.sequence.reserve(start, start + tokens).unwrap();
        let sampler = RowSampler {
            params: Arc::default(),
            counts: None,
            drafts: Vec::new(),
            mask: None,
            seed: 0,
            position: (start + tokens) as u64,
            vocabulary: self.config.vocab_size,
            top_logprobs: None,
            draw: Draw::Token,
        };
        let want = Want {
            rows: Rows::Last,
            sample: vec![sampler],
            ..Want::default()
        };
        let span = Span {
            input: Input::Ids(ids.clone()),
            start,
            table: self.sequence.table(),
            want,
        };
        let batch = Batch {
            spans: vec![span],
            ..Batch::default()
        };
        self.steps.runner().unwrap().step(&batch).unwrap();
        self.sequence.append(&ids).unwrap();
        self.queue.take()
    }
}

fn find<'a>(counts: &'a [(String, Count)], what: &str) -> &'a Count {
    let found = counts.iter().find(|(name, _)| name == what);
    &found
        .unwrap_or_else(|| panic!("{what} is not among {counts:?}"))
        .1
}

#[test]
fn every_op_takes_what_the_device_says() {
    let mut steps = Steps::new(false);
    for tokens in [5, 1, 1, 1, 1] {
        let log = steps.step(tokens);
        let counts = steps.profile.take();
        // Whatever was launched was timed, and all of that is in the table.
        assert!(log.timed > 0);
        let Log { timed, .. } = log;
        let only = Log {
            timed,
            ..Log::default()
        };
        assert_eq!(log, only);
        let all: Duration = counts.iter().map(|(_, count)| count.time).sum();
        assert_eq!(all, KERNEL * timed);

        let layers = steps.config.layers.len();
        let once = find(&counts, "embed");
        assert_eq!((once.calls, once.time), (1, KERNEL));
        let attention = find(&counts, "attention");
        assert_eq!(attention.calls, layers as u64);
        assert_eq!(attention.time, KERNEL * layers as u32);
        // Several kernels of one op are one entry: a product, three splits, two norms, two rotations, a copy, a write.
        let fused = counts.iter();
        let mut fused = fused.filter(|(name, _)| name.starts_with("linear_qk_norm_rope_store"));
        let (_, fused) = fused.next().unwrap();
        assert_eq!(fused.calls, layers as u64);
        assert_eq!(fused.time, KERNEL * 10 * layers as u32);

        // Every layer ends in two, three kernels each: a product, a sum and a norm.
        let ends = counts.iter();
        let ends = ends.filter(|(name, _)| name.starts_with("linear_add_rms_norm"));
        let ends: Vec<_> = ends.map(|(_, count)| count).collect();
        let calls: u64 = ends.iter().map(|count| count.calls).sum();
        let time: Duration = ends.iter().map(|count| count.time).sum();
        assert_eq!(calls, 2 * layers as u64);
        assert_eq!(time, KERNEL * 3 * calls as u32);

        let (hidden, vocabulary) = (steps.config.hidden_size, steps.config.output_vocab_size);
        let head = find(&counts, &format!("linear {hidden} -> {vocabulary}"));
        assert_eq!((head.calls, head.time), (1, KERNEL));
        assert_eq!(head.flop, 2 * (hidden * vocabulary) as u64);
        assert!(head.bytes > 2 * (hidden * vocabulary) as u64);
    }
}

#[test]
fn a_paused_profile_lets_steps_be_recorded() {
    let mut steps = Steps::new(true);
    let logs: Vec<Log> = (0..6).map(|_| steps.step(1)).collect();
    assert!(steps.profile.take().is_empty());
    let sum = |of: fn(&Log) -> u32| logs.iter().map(of).sum::<u32>();
    // One recording for each of the two step buffers, after a launch in each.
    assert_eq!(sum(|log| log.timed), 0);
    assert_eq!(sum(|log| log.recordings), 2);
    assert_eq!(sum(|log| log.replays), 4);
    let replayed = logs.last().unwrap().clone();
    assert!(logs[0].untimed > replayed.untimed + 10, "{logs:?}");

    // What was recorded is not used while ops are counted, and is again after.
    steps.profile.resume();
    let counted = steps.step(1);
    assert_eq!((counted.recordings, counted.replays), (0, 0));
    assert_eq!((counted.timed, counted.untimed), (logs[0].untimed, 0));
    assert!(!steps.profile.take().is_empty());
    steps.profile.pause();
    assert_eq!(steps.step(1), replayed);
    assert!(steps.profile.take().is_empty());
}
