//! `cargo xtask bench-peers`: the CPU backend against llama.cpp and against what the machine can do.
//!
//! Both programs run in turns, on the same number of threads, and what counts is the median of the ratios of
//! neighbouring runs: a busy moment then hits both. Every run of ours measures the ceilings too, before and after.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::demo_model;
use crate::llama_cpp::{LlamaCpp, output};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Pairs of runs of each measurement (of those at 8192 tokens of context a third)
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Threads of both programs
    #[arg(long, value_name = "N", default_value_t = 2)]
    threads: usize,
    /// Only the rows whose name contains this; the document is then left alone
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Build what is needed and stop
    #[arg(long)]
    prepare: bool,
}

/// The document that this task writes its part of.
const DOCUMENT: &str = "docs/benchmarks.md";
const BEGIN: &str = "<!-- written by cargo xtask bench-peers -->";
const END: &str = "<!-- end of what cargo xtask bench-peers writes -->";

pub(crate) fn run(root: &Path, arguments: &Arguments) -> Result<()> {
    let folder = root.join("target").join("peers");
    let peer = LlamaCpp::get(&folder)?;
    let model = demo_model::default_folder(root);
    demo_model::make(&model, None, None)?;
    let mut bench = Bench {
        ours: our_program(root)?,
        model: model.to_string_lossy().into_owned(),
        peer_model: peer.demo_model()?,
        peer_q8: peer.demo_model_q8()?,
        peer_random: peer.random_qwen3()?,
        peer,
        load: root.join("testdata/server/load.py"),
        pairs: arguments.pairs,
        threads: arguments.threads,
        ceilings: Vec::new(),
    };
    if arguments.prepare {
        return Ok(());
    }
    let busy = load_average();
    if busy > 0.3 {
        eprintln!("NOTICE: the machine is busy (load {busy}): what follows means little");
    }

    let only = arguments.only.as_deref().unwrap_or_default();
    let mut rows = Vec::new();
    for (name, measure) in MEASUREMENTS.iter().filter(|(name, _)| name.contains(only)) {
        eprintln!("{name} …");
        let row = measure(&mut bench).with_context(|| format!("measuring '{name}'"))?;
        eprintln!("  {}", row.cells().join(" | "));
        rows.push((*name, row));
    }
    let table = document(&bench, &rows, busy)?;
    println!("{table}");
    if arguments.only.is_none() {
        write_part(&root.join(DOCUMENT), &table)?;
    }
    Ok(())
}

type Measure = fn(&mut Bench) -> Result<Row>;

/// Of our bench: a short prompt and 128 tokens, and a long prompt alone.
const DECODE: [&str; 6] = [
    "--prompt-tokens",
    "16",
    "--depth",
    "16",
    "--gen-tokens",
    "128",
];
const PREFILL: [&str; 6] = [
    "--prompt-tokens",
    "512",
    "--depth",
    "16",
    "--gen-tokens",
    "1",
];

/// What there is to measure, in the order of the table.
const MEASUREMENTS: [(&str, Measure); 14] = [
    ("SmolLM2-135M, decode 128 tokens", |b| {
        b.against(&DECODE, "decode", |b| {
            b.peer.bench(
                &b.peer_model,
                b.threads,
                &["-p", "0", "-n", "128", "-d", "16"],
            )
        })
    }),
    ("SmolLM2-135M, decode at 8192 tokens", |b| {
        let arguments = [
            "--prompt-tokens",
            "16",
            "--depth",
            "8192",
            "--gen-tokens",
            "32",
            "--ctx-size",
            "8448",
        ];
        let pairs = b.pairs;
        b.pairs = pairs.div_ceil(3);
        let row = b.against(&arguments, "decode", |b| {
            b.peer.bench(
                &b.peer_model,
                b.threads,
                &["-p", "0", "-n", "32", "-d", "8192"],
            )
        });
        b.pairs = pairs;
        row
    }),
    ("SmolLM2-135M, prefill 512", |b| {
        b.against(&PREFILL, "prefill", |b| {
            b.peer
                .bench(&b.peer_model, b.threads, &["-p", "512", "-n", "0"])
        })
    }),
    ("SmolLM2-135M, 8 sequences", |b| {
        let arguments = [
            "--prompt-tokens",
            "16",
            "--depth",
            "16",
            "--gen-tokens",
            "64",
            "--batch",
            "8",
        ];
        b.against(&arguments, "decode", |b| {
            let rate = b.peer.batched(&b.peer_model, b.threads, 8, 64)?;
            Ok((rate, String::new()))
        })
    }),
    ("SmolLM2-135M, 8 sequences against one of ours", |b| {
        let one = [
            "--prompt-tokens",
            "16",
            "--depth",
            "16",
            "--gen-tokens",
            "64",
        ];
        let eight = [&one[..], &["--batch", "8"]].concat();
        b.against_ourselves(&eight, &one, &[])
    }),
    (
        "SmolLM2-135M, decode, all threads against one of ours",
        |b| b.against_ourselves(&DECODE, &DECODE, &["--threads", "1"]),
    ),
    (
        "SmolLM2-135M, prefill 512, all threads against one of ours",
        |b| b.against_ourselves(&PREFILL, &PREFILL, &["--threads", "1"]),
    ),
    ("SmolLM2-135M, int8, decode 128 tokens", |b| {
        let arguments = [&DECODE[..], &["--quant", "int8"]].concat();
        b.against(&arguments, "decode", |b| {
            b.peer
                .bench(&b.peer_q8, b.threads, &["-p", "0", "-n", "128", "-d", "16"])
        })
    }),
    ("SmolLM2-135M, int8, prefill 512", |b| {
        let arguments = [&PREFILL[..], &["--quant", "int8"]].concat();
        b.against(&arguments, "prefill", |b| {
            b.peer
                .bench(&b.peer_q8, b.threads, &["-p", "512", "-n", "0"])
        })
    }),
    ("SmolLM2-135M, server, 8 streams", Bench::servers),
    ("SmolLM2-135M, process start to first token", Bench::start),
    ("SmolLM2-135M, peak memory", Bench::memory),
    // From here on the model is another one.
    ("Qwen3-0.6B shape, decode 64 tokens", |b| {
        let arguments = [
            "--prompt-tokens",
            "16",
            "--depth",
            "16",
            "--gen-tokens",
            "64",
        ];
        b.random().against(&arguments, "decode", |b| {
            b.peer.bench(
                &b.peer_random,
                b.threads,
                &["-p", "0", "-n", "64", "-d", "16"],
            )
        })
    }),
    ("Qwen3-0.6B shape, prefill 256", |b| {
        let arguments = [
            "--prompt-tokens",
            "256",
            "--depth",
            "16",
            "--gen-tokens",
            "1",
        ];
        b.random().against(&arguments, "prefill", |b| {
            b.peer
                .bench(&b.peer_random, b.threads, &["-p", "256", "-n", "0"])
        })
    }),
];

struct Bench {
    ours: PathBuf,
    /// Our model: a folder, or `--random` and a name.
    model: String,
    peer: LlamaCpp,
    peer_model: PathBuf,
    peer_q8: PathBuf,
    peer_random: PathBuf,
    pairs: u32,
    threads: usize,
    /// The client that loads servers.
    load: PathBuf,
    /// Read bandwidth in GB/s and f32 rate in TFLOP/s of every run on all threads.
    ceilings: Vec<(f64, f64)>,
}

/// A line of the table: medians.
struct Row {
    ours: String,
    /// What ours is compared with.
    other: String,
    ratio: Option<f64>,
    /// Of the ceiling measured in the same run.
    fraction: Option<f64>,
}

impl Row {
    fn cells(&self) -> [String; 4] {
        let number =
            |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.2}"));
        [
            self.ours.clone(),
            self.other.clone(),
            number(self.ratio),
            number(self.fraction),
        ]
    }
}

impl Bench {
    /// `self` with a Qwen3-0.6B of random weights for our model.
    fn random(&mut self) -> &mut Self {
        self.model = "--random=qwen3-0.6b".to_owned();
        self
    }

    /// One run of ours: tokens a second and the fraction of the ceiling, of `part` (prefill or decode).
    fn run(&mut self, arguments: &[&str], part: &str, more: &[&str]) -> Result<(f64, f64)> {
        let mut command = Command::new(&self.ours);
        command
            .arg("bench")
            .arg(&self.model)
            .args(["--json", "--runs", "1", "--quiet"]);
        if more.is_empty() {
            command.args(["--threads", &self.threads.to_string()]);
        }
        let result: Value = serde_json::from_str(&output(command.args(arguments).args(more))?)?;
        let number = |value: &Value| value.as_f64().context("bench printed no number");
        if more.is_empty() {
            let ceilings = &result["ceilings"];
            let read = number(&ceilings["read_gb_s"])?;
            self.ceilings
                .push((read, number(&ceilings["matmul_tflop_s"])?));
        }
        Ok((
            number(&result[part]["tok_s"])?,
            number(&result[part]["fraction"])?,
        ))
    }

    fn against(
        &mut self,
        arguments: &[&str],
        part: &str,
        theirs: impl Fn(&Self) -> Result<(f64, String)>,
    ) -> Result<Row> {
        let (mut ours, mut fractions, mut others, mut ratios) = (vec![], vec![], vec![], vec![]);
        let mut setting = String::new();
        for _ in 0..self.pairs {
            let (rate, fraction) = self.run(arguments, part, &[])?;
            let (other, name) = theirs(self)?;
            setting = name;
            eprintln!("  {rate:.1} and {other:.1} tokens/s, {fraction:.2} of the ceiling");
            ours.push(rate);
            fractions.push(fraction);
            others.push(other);
            ratios.push(rate / other);
        }
        Ok(Row {
            ours: format!("{:.1} tokens/s", median(&mut ours)),
            other: format!("llama.cpp {setting} {:.1} tokens/s", median(&mut others))
                .replace("  ", " "),
            ratio: Some(median(&mut ratios)),
            fraction: Some(median(&mut fractions)),
        })
    }

    /// Ours with `arguments` against ours with `others` and `more`.
    fn against_ourselves(
        &mut self,
        arguments: &[&str],
        others: &[&str],
        more: &[&str],
    ) -> Result<Row> {
        let prefill = arguments.ends_with(&["--gen-tokens", "1"]);
        let part = if prefill { "prefill" } else { "decode" };
        let (mut ours, mut fractions, mut theirs, mut ratios) = (vec![], vec![], vec![], vec![]);
        for _ in 0..self.pairs {
            let (rate, fraction) = self.run(arguments, part, &[])?;
            let (other, _) = self.run(others, part, more)?;
            ours.push(rate);
            fractions.push(fraction);
            theirs.push(other);
            ratios.push(rate / other);
        }
        Ok(Row {
            ours: format!("{:.1} tokens/s", median(&mut ours)),
            other: format!("ours {:.1} tokens/s", median(&mut theirs)),
            ratio: Some(median(&mut ratios)),
            fraction: Some(median(&mut fractions)),
        })
    }

    /// Ours and llama.cpp's server, both up, asked in turns by the same client.
    fn servers(&mut self) -> Result<Row> {
        const STREAMS: usize = 8;
        let (port, other_port) = (free_port()?, free_port()?);
        let mut ours = Command::new(&self.ours);
        ours.args(["serve", &self.model, "--quiet", "--device", "cpu"])
            .args(["--threads", &self.threads.to_string()])
            .args(["--address", &format!("127.0.0.1:{port}")]);
        let theirs = self
            .peer
            .server(&self.peer_model, self.threads, STREAMS, other_port);
        let _servers = [
            Server::start(ours, port)?,
            Server::start(theirs, other_port)?,
        ];
        let (mut rates, mut others, mut ratios) = (vec![], vec![], vec![]);
        let (mut waits, mut other_waits) = (vec![], vec![]);
        for turn in 0..self.pairs {
            let (rate, wait) = load(&self.load, port, STREAMS, turn)?;
            let (other, other_wait) = load(&self.load, other_port, STREAMS, turn)?;
            eprintln!(
                "  {rate:.1} and {other:.1} tokens/s, {wait:.0} and {other_wait:.0} ms to the first"
            );
            ratios.push(rate / other);
            rates.push(rate);
            others.push(other);
            waits.push(wait);
            other_waits.push(other_wait);
        }
        let cell = |rates: &mut [f64], waits: &mut [f64]| {
            let (rate, wait) = (median(rates), median(waits));
            format!("{rate:.1} tokens/s, {wait:.0} ms to the first")
        };
        Ok(Row {
            ours: cell(&mut rates, &mut waits),
            other: format!("llama-server {}", cell(&mut others, &mut other_waits)),
            ratio: Some(median(&mut ratios)),
            fraction: None,
        })
    }

    fn start(&mut self) -> Result<Row> {
        let mut seconds = Vec::new();
        let mut tokens = 0;
        for _ in 0..=2 * self.pairs {
            let mut command = self.generate(1);
            let result: Value = serde_json::from_str(&output(&mut command)?)?;
            tokens = result["usage"]["prompt_tokens"]
                .as_u64()
                .context("run printed no usage")?;
            let first = result["timings"]["start_to_first_s"].as_f64();
            seconds.push(first.context("run printed no start_to_first_s")?);
        }
        // The first run fills the page cache.
        seconds.remove(0);
        Ok(Row {
            ours: format!("{:.3} s ({tokens} tokens)", median(&mut seconds)),
            other: String::new(),
            ratio: None,
            fraction: None,
        })
    }

    /// A command that generates from a prompt of some forty tokens, without a chance to end early.
    fn generate(&self, tokens: u32) -> Command {
        let prompt = "The northern lights are caused by charged particles from the sun that meet the gases of \
                      the upper atmosphere, and their colours depend on which gas is met and how high above \
                      the ground this happens, so";
        let mut command = Command::new(&self.ours);
        command.args([
            "run",
            &self.model,
            "--json",
            "--quiet",
            "--raw",
            "--ignore-eos",
            "--temperature",
            "0",
        ]);
        command.args([
            "--max-tokens",
            &tokens.to_string(),
            "--threads",
            &self.threads.to_string(),
        ]);
        command.arg(prompt).stdin(Stdio::null());
        command
    }

    fn memory(&mut self) -> Result<Row> {
        let plan: Value = {
            let mut command = Command::new(&self.ours);
            serde_json::from_str(&output(command.args(["plan", &self.model, "--json"]))?)?
        };
        let number = |name: &str| {
            plan[name]
                .as_f64()
                .with_context(|| format!("plan printed no {name}"))
        };
        let (prompt_and_more, tokens) = (64, 256);
        let weights = number("weights_bytes")? / 1e6;
        let pool = number("kv_bytes_per_token")? * f64::from(prompt_and_more + tokens) / 1e6;
        let mut child = self.generate(tokens).stdout(Stdio::null()).spawn()?;
        let status = format!("/proc/{}/status", child.id());
        let mut peak = 0.0_f64;
        while child.try_wait()?.is_none() {
            let text = fs::read_to_string(&status).unwrap_or_default();
            let kilobytes = text.lines().find_map(|line| {
                line.strip_prefix("VmHWM:")?
                    .trim()
                    .strip_suffix("kB")?
                    .trim()
                    .parse()
                    .ok()
            });
            peak = peak.max(kilobytes.unwrap_or(0.0) * 1024.0 / 1e6);
            std::thread::sleep(Duration::from_millis(5));
        }
        if peak == 0.0 {
            bail!("the peak of memory could not be read from {status}");
        }
        Ok(Row {
            ours: format!("{peak:.0} MB"),
            other: format!(
                "weights {weights:.0} MB + used pages {pool:.0} MB, {:.0} MB more",
                peak - weights - pool
            ),
            ratio: None,
            fraction: None,
        })
    }
}

/// A server, which ends with this value.
struct Server(std::process::Child);

impl Server {
    /// Starts `command` and waits until it answers on `port`.
    fn start(mut command: Command, port: u16) -> Result<Self> {
        let shown = format!("{command:?}");
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {shown}"))?;
        let mut server = Server(child);
        for _ in 0..600 {
            if let Some(status) = server.0.try_wait()? {
                bail!("{shown} ended: {status}");
            }
            let healthy = || -> std::io::Result<bool> {
                let mut stream = TcpStream::connect(("127.0.0.1", port))?;
                stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer)?;
                Ok(answer.split(' ').nth(1) == Some("200"))
            };
            if healthy().unwrap_or(false) {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        bail!("{shown} did not become healthy within a minute")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Tokens a second and milliseconds to the first token of one round of `streams`.
fn load(client: &Path, port: u16, streams: usize, seed: u32) -> Result<(f64, f64)> {
    let mut command = Command::new("python3");
    command
        .arg(client)
        .arg(format!("http://127.0.0.1:{port}"))
        .args(["--rounds", "1", "--streams", &streams.to_string()])
        .args(["--seed", &seed.to_string()]);
    let result: Value = serde_json::from_str(&output(&mut command)?)?;
    let number = |name: &str| {
        result[name]
            .as_f64()
            .with_context(|| format!("the client printed no {name}"))
    };
    Ok((number("tokens_per_second")?, number("first_token_ms")?))
}

/// Builds the command line program for speed.
fn our_program(root: &Path) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(root)
        .args(["build", "--release", "-p", "tileinfer-cli"])
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("`cargo build --release -p tileinfer-cli` failed ({status})");
    }
    Ok(root.join("target/release/tileinfer"))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (values[(n - 1) / 2] + values[n / 2]) / 2.0
}

/// Tasks that ran or waited, on average over the last minute.
fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ')
        .next()
        .and_then(|load| load.parse().ok())
        .unwrap_or(0.0)
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split(':').nth(1)?.trim().to_owned())
    };
    let cores = text
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    let name = field("model name").unwrap_or_else(|| "an unknown processor".to_owned());
    let numbers = [field("cpu family"), field("model\t")].map(Option::unwrap_or_default);
    format!(
        "{cores} cores of {name} (family {}, model {})",
        numbers[0], numbers[1]
    )
}

fn document(bench: &Bench, rows: &[(&str, Row)], busy: f64) -> Result<String> {
    let date = output(Command::new("date").args(["-u", "+%F"]))?;
    let range = |of: fn(&(f64, f64)) -> f64| {
        let mut values: Vec<f64> = bench.ceilings.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        match (values.first(), values.last()) {
            (Some(first), Some(last)) => format!(
                "{first:.1} to {last:.1}, median {:.1}",
                median(&mut values.clone())
            ),
            _ => "not measured".to_owned(),
        }
    };
    let mut text = format!(
        "{BEGIN}\n## CPU, against llama.cpp\n\n{}; {} threads; {}; load before: {busy}. Made by\n\n    cargo xtask bench-peers --pairs {} --threads {}\n\nllama.cpp is that of the source distribution of llama-cpp-python 0.3.36, built for this machine (`GGML_NATIVE`), its weights bf16 too (Q8_0 where ours are int8); flash attention off or on, whichever was faster. The programs ran in turns; rates are medians, and \"ratio\" is the median of the ratios of neighbouring runs. \"Of the ceiling\" is what ours reached of the read bandwidth (decode) or of the f32 multiply-add rate (prefill) that the same run measured before and after: read {} GB/s, multiply-add {} GFLOP/s over all runs.\n",
        date.trim(),
        bench.threads,
        processor(),
        bench.pairs,
        bench.threads,
        range(|ceilings| ceilings.0),
        range(|ceilings| ceilings.1 * 1e3),
    );
    text.push_str("\n| | ours | compared with | ratio | of the ceiling |\n|---|---|---|---|---|\n");
    for (name, row) in rows {
        text.push_str(&format!("| {name} | {} |\n", row.cells().join(" | ")));
    }
    text.push_str(END);
    text.push('\n');
    Ok(text)
}

/// Replaces this task's part of the document at `path`, or begins one.
fn write_part(path: &Path, part: &str) -> Result<()> {
    let old = fs::read_to_string(path).unwrap_or_else(|_| "# Benchmarks\n\n".to_owned());
    let text = match (old.find(BEGIN), old.find(END)) {
        (Some(begin), Some(end)) if begin < end => {
            format!(
                "{}{}{}",
                &old[..begin],
                part,
                old[end + END.len()..].trim_start_matches('\n')
            )
        }
        _ => format!("{}\n\n{part}", old.trim_end()),
    };
    let unfinished = path.with_extension("incomplete");
    fs::write(&unfinished, text)
        .with_context(|| format!("cannot write {}", unfinished.display()))?;
    fs::rename(&unfinished, path).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_keeps_what_others_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("benchmarks.md");
        let part = |text: &str| format!("{BEGIN}\n{text}\n{END}\n");
        write_part(&path, &part("one")).unwrap();
        let first = fs::read_to_string(&path).unwrap();
        assert_eq!(first, format!("# Benchmarks\n\n{}", part("one")));
        fs::write(&path, format!("{first}\n## More\n")).unwrap();
        write_part(&path, &part("two")).unwrap();
        let second = fs::read_to_string(&path).unwrap();
        assert!(second.contains("two") && !second.contains("one") && second.ends_with("## More\n"));
    }

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
