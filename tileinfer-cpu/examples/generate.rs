//! From a model directory to text, with the library alone:
//! `cargo run --release -p tileinfer-cpu --example generate -- DIR "Once upon a time"`

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use tileinfer::config::ModelConfig;
use tileinfer::engine::{GenerationOptions, StepLoop};
use tileinfer::generate::answer;
use tileinfer::model::{DecoderLM, LoadOptions};
use tileinfer::runner::{ModelRunner, RunnerOptions};
use tileinfer::sampling::SamplingParams;
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, ComputeType, HostModel};
use tileinfer_cpu::CpuBackend;

fn main() -> tileinfer::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = || tileinfer::Error::Usage("give a model directory and a prompt".to_owned());
    let (dir, prompt) = (
        arguments.next().ok_or_else(usage)?,
        arguments.next().ok_or_else(usage)?,
    );
    let dir = Path::new(&dir);

    // The weights stay mapped; the backend reads them where they lie.
    let config = ModelConfig::from_dir(dir)?;
    let host = HostModel::load(&config, &Checkpoint::open(dir)?, ComputeType::Bf16)?;
    let backend = CpuBackend::new(ComputeType::Bf16, 2);
    let options = LoadOptions::new(2048);
    let model = DecoderLM::load(&backend, &config, &host, &options, &mut |_, _| ())?;
    let runner = ModelRunner::new(backend, model, &RunnerOptions::for_length(2048))?;
    let mut steps = StepLoop::new(Box::new(runner));

    let tokenizer = Tokenizer::from_dir(dir)?;
    let options = GenerationOptions {
        sampling: Arc::new(SamplingParams::default()),
        seed: 0,
        max_tokens: Some(64),
        stop_ids: config.eos_token_ids.clone().into(),
        vocabulary: tokenizer.vocab_size(),
        top_logprobs: None,
    };
    let prompt = tokenizer.encode(&prompt, true)?;
    let sequence = steps.new_sequence();
    let mut print = |text: &str| {
        print!("{text}");
        ControlFlow::Continue(())
    };
    let answer = answer(
        &mut steps,
        &tokenizer,
        sequence,
        &prompt,
        options,
        &[],
        &mut |_| (),
        &mut print,
    )?;
    println!(
        "\n{} tokens, {}",
        answer.generated.tokens.len(),
        answer.generated.finish.as_str()
    );
    Ok(())
}
