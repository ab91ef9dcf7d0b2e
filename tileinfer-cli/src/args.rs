//! What was typed. What it means is decided where it is used.

mod sampling;
mod spec;

use std::path::PathBuf;

use clap::builder::{NonEmptyStringValueParser, RangedU64ValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use sampling::SamplingArgs;
pub(crate) use spec::{SpecArg, SpecArgs};

/// Run language models on this machine: the same text every time.
#[derive(Debug, Parser)]
#[command(name = "tileinfer", version, propagate_version = true)]
#[command(
    after_help = "MODEL is an id on the hub such as Qwen/Qwen3-0.6B, or a directory.

Examples:
  tileinfer pull Qwen/Qwen3-0.6B           get a model
  tileinfer run Qwen/Qwen3-0.6B            chat with it
  tileinfer run Qwen/Qwen3-0.6B \"Why is the sky blue?\"
  tileinfer plan Qwen/Qwen3-8B             would it fit in memory?
  tileinfer doctor                         what this machine has and lacks

Exit codes: 0 done, 1 it failed and says why, 2 wrong usage."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Answer a prompt, or chat on a terminal
    #[command(after_help = "Examples:
  tileinfer run Qwen/Qwen3-0.6B
  tileinfer run Qwen/Qwen3-0.6B \"What is the capital of France?\"
  cat notes.txt | tileinfer run Qwen/Qwen3-0.6B \"Summarize this:\"
  tileinfer run DIR --raw --temperature 0 --max-tokens 32 \"Once upon a time\"

A model that is not there yet is downloaded first. In a chat, /help lists the commands,
\"\"\" begins and ends a text of several lines, Ctrl-C stops an answer, Ctrl-D leaves.")]
    Run(Box<RunArgs>),
    /// Download a model from the hub
    #[command(after_help = "Examples:
  tileinfer pull Qwen/Qwen3-0.6B
  tileinfer pull HuggingFaceTB/SmolLM2-135M-Instruct --revision v1.0
  HF_TOKEN=hf_... tileinfer pull meta-llama/Llama-3.1-8B-Instruct

Only the files that inference needs are fetched, into the cache that Python's huggingface_hub
uses too (HF_HOME, HF_HUB_CACHE). A pull that was cut off goes on where it stopped.")]
    Pull(PullArgs),
    /// List the models in the cache
    #[command(after_help = "Examples:
  tileinfer list
  tileinfer list --json")]
    List(ListArgs),
    /// Remove a model, or one revision of it, from the cache
    #[command(after_help = "Examples:
  tileinfer rm Qwen/Qwen3-0.6B
  tileinfer rm Qwen/Qwen3-0.6B --revision v1.0

Files that another revision shows stay. Nothing is asked: what was freed is printed.")]
    Rm(RmArgs),
    /// Show a model's configuration as it is understood
    #[command(after_help = "Examples:
  tileinfer show Qwen/Qwen3-0.6B
  tileinfer show DIR --json

A model that is not in the cache is looked at on the hub, without downloading it.")]
    Show(ShowArgs),
    /// Say how much memory a model takes, before it is downloaded or loaded
    #[command(after_help = "Examples:
  tileinfer plan Qwen/Qwen3-8B
  tileinfer plan DIR --ctx-size 32768 --json

Only config.json and the headers of the weights are read, on the hub with a few small requests.")]
    Plan(PlanArgs),
    /// Say what this machine has and lacks
    #[command(after_help = "Examples:
  tileinfer doctor
  tileinfer doctor --offline --json")]
    Doctor(DoctorArgs),
    /// Show token ids of a text, the text of token ids, or a rendered chat
    #[command(after_help = "Examples:
  tileinfer tokenize Qwen/Qwen3-0.6B \"Hello, world\" --json
  tileinfer tokenize DIR --decode 19556,28,905
  echo '{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}' | tileinfer tokenize DIR --chat -")]
    Tokenize(TokenizeArgs),
    /// Log probabilities of given tokens, or the perplexity of a text
    #[command(after_help = "Examples:
  tileinfer eval Qwen/Qwen3-0.6B --text book.txt
  tileinfer eval DIR --ids ids.json --top 5 --json
  tileinfer eval DIR --text book.txt --quant int8 --kv-cache-dtype int8 --compare bf16")]
    Eval(EvalArgs),
    /// Measure prefill and decode against what the machine can do
    #[command(after_help = "Examples:
  tileinfer bench Qwen/Qwen3-0.6B
  tileinfer bench --random qwen3-0.6b --prompt-tokens 256 --gen-tokens 64 --json")]
    Bench(BenchArgs),
    /// Write a model again with its linear weights in int8
    #[command(after_help = "Examples:
  tileinfer quantize Qwen/Qwen3-8B models/qwen3-8b-int8
  tileinfer run models/qwen3-8b-int8 \"Hello\"

The files are compressed-tensors (pack-quantized, one scale a row), which vLLM reads too.
Embedding and head stay as they are; --quant int8 rounds the head when the model is loaded.")]
    Quantize(QuantizeArgs),
    /// Serve a model over HTTP, through the APIs of OpenAI and Anthropic
    #[command(after_help = "Examples:
  tileinfer serve models/smollm2-135m-instruct
  tileinfer serve Qwen/Qwen3-0.6B --address 0.0.0.0:8000 --api-key secret
  curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}'")]
    Serve(ServeArgs),
    /// Print the completions of a shell
    #[command(after_help = "Examples:
  tileinfer completions bash > ~/.local/share/bash-completion/completions/tileinfer
  tileinfer completions zsh > ~/.zfunc/_tileinfer
  tileinfer completions fish > ~/.config/fish/completions/tileinfer.fish")]
    Completions(CompletionsArgs),
    /// Print the manual page, or write one page a verb
    #[command(after_help = "Examples:
  tileinfer man | man -l -
  tileinfer man --dir ~/.local/share/man/man1")]
    Man(ManArgs),
}

/// Which model, and where it runs.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    pub(crate) name: NameArgs,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
}

/// Which model.
#[derive(Debug, Clone, Args)]
pub(crate) struct NameArgs {
    /// An id on the hub such as Qwen/Qwen3-0.6B, or a directory with config.json and safetensors
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

/// How the hub may be used.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct HubArgs {
    /// Never use the network (HF_HUB_OFFLINE=1 says the same)
    #[arg(long)]
    pub(crate) offline: bool,
}

/// Where and how a model runs.
#[derive(Debug, Clone, Args)]
pub(crate) struct PlaceArgs {
    /// auto, cpu, reference or cuda[:N]
    #[arg(long, default_value = "auto", value_name = "DEVICE", value_parser = parse_device)]
    pub(crate) device: DeviceArg,
    /// Type of activations and cache; f32 is the parity mode
    #[arg(long, default_value = "auto", value_enum)]
    pub(crate) dtype: DtypeArg,
    /// The part of a GPU's memory that is taken at most, by this and other programs together
    #[arg(long, default_value = "0.9", value_name = "PART", value_parser = parse_part)]
    pub(crate) gpu_memory_utilization: f64,
    /// Threads of the CPU backend (default: the cores this process may use)
    #[arg(long, value_name = "N", value_parser = at_least_one())]
    pub(crate) threads: Option<usize>,
    /// The longest context (default: the model's maximum, lowered to what fits in memory)
    #[arg(long, short = 'c', value_name = "TOKENS", value_parser = at_least_one())]
    pub(crate) ctx_size: Option<usize>,
    /// Round the linear weights and the head to int8 while loading
    #[arg(long, value_enum)]
    pub(crate) quant: Option<QuantArg>,
    /// Type of the cache: auto is that of the activations, int8 half the bytes
    #[arg(long, default_value = "auto", value_enum)]
    pub(crate) kv_cache_dtype: KvCacheArg,
    /// Divide the keys of an int8 cache by the factors in FILE, or by nothing (default: measured at load)
    #[arg(long, value_name = "FILE|none")]
    pub(crate) kv_smoothing: Option<PathBuf>,
}

/// A part of a whole: above 0, up to 1.
fn parse_part(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(part) if part > 0.0 && part <= 1.0 => Ok(part),
        _ => Err("a number above 0 and up to 1, such as 0.9".to_owned()),
    }
}

/// What `--quant` can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantArg {
    Int8,
}

/// What `--kv-cache-dtype` can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvCacheArg {
    Auto,
    Int8,
}

/// No count of tokens, threads or sequences is larger; so sums of some of them cannot overflow.
const MOST: u64 = 1 << 48;

fn at_most() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=MOST)
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=MOST)
}

/// What `--device` can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    Auto,
    Cpu,
    Reference,
    /// A GPU, as the driver counts them.
    Cuda(usize),
}

fn parse_device(text: &str) -> Result<DeviceArg, String> {
    match text.split_once(':') {
        None => match text {
            "auto" => Ok(DeviceArg::Auto),
            "cpu" => Ok(DeviceArg::Cpu),
            "reference" => Ok(DeviceArg::Reference),
            "cuda" => Ok(DeviceArg::Cuda(0)),
            _ => Err("use auto, cpu, reference, cuda or cuda:N".to_owned()),
        },
        Some(("cuda", number)) => number
            .parse()
            .map(DeviceArg::Cuda)
            .map_err(|_| "use cuda:N with the number of a GPU".to_owned()),
        Some(_) => Err("use auto, cpu, reference, cuda or cuda:N".to_owned()),
    }
}

/// How much is said on stderr.
#[derive(Debug, Clone, Copy, Args)]
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

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) revision: RevisionArgs,
    /// The prompt; what is piped in follows it after a blank line
    #[arg(value_name = "PROMPT")]
    pub(crate) prompt: Option<String>,
    /// Start from the token ids in FILE, a JSON array (implies --raw)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "system", "chat_template", "think", "no_think"])]
    pub(crate) prompt_ids: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    /// Tokens to generate at most (default: to the end of the context)
    #[arg(long, short = 'n', value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<usize>,
    /// End the answer before this text (repeatable)
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
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
    /// Keep no history of what is typed in a chat
    #[arg(long)]
    pub(crate) no_history: bool,
}

/// Which revision of a model on the hub.
#[derive(Debug, Args)]
pub(crate) struct RevisionArgs {
    /// A branch, a tag or a commit on the hub (default: main)
    #[arg(long, value_name = "REV")]
    pub(crate) revision: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// An id on the hub such as Qwen/Qwen3-0.6B
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) revision: RevisionArgs,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// An id on the hub such as Qwen/Qwen3-0.6B
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// Remove only this branch, tag or commit (default: all of the model)
    #[arg(long, value_name = "REV")]
    pub(crate) revision: Option<String>,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) name: NameArgs,
    #[command(flatten)]
    pub(crate) revision: RevisionArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) revision: RevisionArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Which shell
    #[arg(value_name = "SHELL", value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Write tileinfer.1 and one page a verb into DIR
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct TokenizeArgs {
    #[command(flatten)]
    pub(crate) name: NameArgs,
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
pub(crate) struct QuantizeArgs {
    #[command(flatten)]
    pub(crate) name: NameArgs,
    /// A new directory
    #[arg(value_name = "OUT")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// A branch, tag or commit on the hub
    #[arg(long, value_name = "REV")]
    pub(crate) revision: Option<String>,
    /// Where to listen
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    pub(crate) address: std::net::SocketAddr,
    /// Ask clients for this key
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// Let pages of this origin use the server (repeatable; * is any)
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors_origin: Vec<String>,
    /// The name that clients see (default: the id, or the directory's name)
    #[arg(long, value_name = "NAME")]
    pub(crate) served_name: Option<String>,
    /// Requests that run at once (default: 8 on the CPU, 64 on a GPU)
    #[arg(long, value_name = "N", value_parser = at_least_one())]
    pub(crate) max_sequences: Option<usize>,
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// An id on the hub such as Qwen/Qwen3-0.6B, or a directory with config.json and safetensors
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
    pub(crate) hub: HubArgs,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) voice: VoiceArgs,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one())]
    pub(crate) prompt_tokens: usize,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one())]
    pub(crate) gen_tokens: usize,
    /// Context that decoding starts at (default: the prompt)
    #[arg(long, value_name = "TOKENS", value_parser = at_most())]
    pub(crate) depth: Option<usize>,
    /// Runs; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one())]
    pub(crate) runs: usize,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one())]
    pub(crate) batch: usize,
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    /// Add a table of what each op takes (on a GPU in runs of their own, op by op)
    #[arg(long)]
    pub(crate) profile: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
