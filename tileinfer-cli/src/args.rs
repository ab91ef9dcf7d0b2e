//! What was typed. What it means is decided where it is used.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Run language models on this machine: the same text every time.
#[derive(Debug, Parser)]
#[command(name = "tileinfer", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Answer a prompt, or chat on a terminal
    #[command(after_help = "Examples:
  tileinfer run models/smollm2-135m-instruct \"What is the capital of France?\"
  cat notes.txt | tileinfer run models/smollm2-135m-instruct \"Summarize this:\"
  tileinfer run DIR --raw --temperature 0 --max-tokens 32 \"Once upon a time\"")]
    Run(Box<RunArgs>),
    /// Show token ids of a text, the text of token ids, or a rendered chat
    #[command(after_help = "Examples:
  tileinfer tokenize models/smollm2-135m-instruct \"Hello, world\" --json
  tileinfer tokenize models/smollm2-135m-instruct --decode 19556,28,905
  echo '{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}' | tileinfer tokenize DIR --chat -")]
    Tokenize(TokenizeArgs),
    /// Log probabilities of given tokens, or the perplexity of a text
    #[command(after_help = "Examples:
  tileinfer eval models/smollm2-135m-instruct --text book.txt
  tileinfer eval DIR --ids ids.json --top 5 --json")]
    Eval(EvalArgs),
    /// Measure prefill and decode against what the machine can do
    #[command(after_help = "Examples:
  tileinfer bench models/smollm2-135m-instruct
  tileinfer bench --random qwen3-0.6b --prompt-tokens 256 --gen-tokens 64 --json")]
    Bench(BenchArgs),
}

/// Which model, and where it runs.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// A model directory (a Hugging Face checkout with config.json and safetensors)
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
}

/// Where and how a model runs.
#[derive(Debug, Clone, Args)]
pub(crate) struct PlaceArgs {
    /// auto, cpu, reference or cuda[:N]
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: String,
    /// Type of activations and cache; f32 is the parity mode
    #[arg(long, default_value = "auto", value_enum)]
    pub(crate) dtype: DtypeArg,
    /// Threads of the CPU backend (default: the cores this process may use)
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// The longest context (default: the model's maximum, lowered to what fits in memory)
    #[arg(long, short = 'c', value_name = "TOKENS")]
    pub(crate) ctx_size: Option<usize>,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
}

/// How much is said on stderr.
#[derive(Debug, Clone, Args)]
pub(crate) struct VoiceArgs {
    /// Say nothing on stderr but errors
    #[arg(long, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Say more on stderr
    #[arg(long)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    Auto,
    Bf16,
    F32,
}

/// How tokens are chosen. What is not given comes from the model's generation_config.json.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token
    #[arg(long, visible_alias = "temp", value_name = "T")]
    pub(crate) temperature: Option<f32>,
    /// Choose among the K likeliest tokens (0: all)
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Choose among the likeliest tokens that together have probability P
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f32>,
    /// Choose among tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f32>,
    /// Divide the logits of tokens that occurred (1: off)
    #[arg(long, value_name = "R")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtract from the logits of tokens that were generated
    #[arg(long, value_name = "A", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract from the logits of tokens once for each time they were generated
    #[arg(long, value_name = "A", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Add to the logits of tokens: ID=B,ID=B
    #[arg(long, value_name = "ID=B,...", value_delimiter = ',', value_parser = parse_bias, allow_hyphen_values = true)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Seed of the noise (default: a random one, printed)
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text
        .split_once('=')
        .ok_or("write ID=BIAS, such as 42=-1.5")?;
    let id = id
        .trim()
        .parse()
        .map_err(|_| format!("'{id}' is not a token id"))?;
    let bias = bias
        .trim()
        .parse()
        .map_err(|_| format!("'{bias}' is not a number"))?;
    Ok((id, bias))
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The prompt; what is piped in follows it after a blank line
    #[arg(value_name = "PROMPT")]
    pub(crate) prompt: Option<String>,
    /// Start from the token ids in FILE, a JSON array (implies --raw)
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_ids: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// Tokens to generate at most (default: to the end of the context)
    #[arg(long, short = 'n', value_name = "N")]
    pub(crate) max_tokens: Option<usize>,
    /// End the answer before this text (repeatable)
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Go on after the model's end token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// System prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Let the model reason first, if its template knows how
    #[arg(long, overrides_with = "no_think")]
    pub(crate) think: bool,
    /// Do not let the model reason first, if its template knows how
    #[arg(long, overrides_with = "think")]
    pub(crate) no_think: bool,
    /// Use the chat template in FILE
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Continue the prompt as it is, without a chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Print one JSON object instead of the text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TokenizeArgs {
    /// A model directory; tokenizer.json is all it needs
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// The text
    #[arg(value_name = "TEXT")]
    pub(crate) text: Option<String>,
    /// Read the text from FILE (- is stdin)
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    pub(crate) file: Option<PathBuf>,
    /// Add the special tokens that the tokenizer's post-processor adds
    #[arg(long)]
    pub(crate) special: bool,
    /// Show the text of these ids instead
    #[arg(long, value_name = "ID,...", value_delimiter = ',', conflicts_with_all = ["text", "file"])]
    pub(crate) decode: Option<Vec<u32>>,
    /// Leave special tokens out of the text
    #[arg(long)]
    pub(crate) skip_special: bool,
    /// Render the chat request in FILE (- is stdin), a JSON object with `messages`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "file", "decode"])]
    pub(crate) chat: Option<PathBuf>,
    /// One request a line from FILE (- is stdin): an object with `text`, `ids` or `messages`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "file", "decode", "chat"])]
    pub(crate) jsonl: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Score these token ids, a JSON array
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present = "text",
        conflicts_with = "text"
    )]
    pub(crate) ids: Option<PathBuf>,
    /// Score this text
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// With --ids, also report the K best tokens at every position
    #[arg(long, value_name = "K", default_value_t = 0, conflicts_with = "text")]
    pub(crate) top: usize,
    /// With --text, compare with the same model in bf16, or with the model in DIR
    #[arg(long, value_name = "bf16|DIR", conflicts_with = "ids")]
    pub(crate) compare: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A model directory
    #[arg(
        value_name = "MODEL",
        required_unless_present = "random",
        conflicts_with = "random"
    )]
    pub(crate) model: Option<String>,
    /// Random weights in the shape of a config.json or of a built-in name
    #[arg(long, value_name = "CONFIG")]
    pub(crate) random: Option<String>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) prompt_tokens: usize,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) gen_tokens: usize,
    /// Context that decoding starts at (default: the prompt)
    #[arg(long, value_name = "TOKENS")]
    pub(crate) depth: Option<usize>,
    /// Runs; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) runs: usize,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) batch: usize,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
