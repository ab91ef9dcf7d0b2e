//! llama.cpp as a peer to measure against: its source, its programs, and models it can read. What is
//! measured is not known here.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::demo_model;

/// The Python package whose source distribution holds llama.cpp's.
const PACKAGE: &str = "llama-cpp-python==0.3.36";
/// Its name, unpacked.
const SOURCE: &str = "llama_cpp_python-0.3.36";
const PROGRAMS: [&str; 4] = [
    "llama-batched-bench",
    "llama-bench",
    "llama-quantize",
    "llama-server",
];

/// Programs built from source for this machine, in a folder of their own.
pub(crate) struct LlamaCpp {
    folder: PathBuf,
}

impl LlamaCpp {
    /// Fetches and builds what `folder` lacks; this takes a while the first time.
    pub(crate) fn get(folder: &Path) -> Result<Self> {
        let this = LlamaCpp {
            folder: folder.to_owned(),
        };
        if PROGRAMS.iter().all(|name| this.program(name).exists()) {
            return Ok(this);
        }
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
        let venv = folder.join("venv");
        let bin = venv.join("bin");
        if !bin.join("ninja").exists() {
            let mut make = Command::new("python3");
            execute(make.args(["-m", "venv"]).arg(&venv))?;
            let mut tools = Command::new(bin.join("python"));
            let arguments = ["-m", "pip", "install", "--quiet", "cmake", "ninja"];
            execute(tools.args(arguments))?;
        }
        let source = folder.join(SOURCE);
        if !source.exists() {
            let mut download = Command::new(bin.join("python"));
            let arguments = ["-m", "pip", "download", "--quiet", "--no-deps"];
            download
                .args(arguments)
                .args(["--no-binary", "llama-cpp-python", PACKAGE, "-d"]);
            execute(download.arg(folder))?;
            let mut unpack = Command::new("tar");
            let archive = folder.join(format!("{SOURCE}.tar.gz"));
            execute(unpack.arg("xzf").arg(archive).arg("-C").arg(folder))?;
        }
        let build = folder.join("build");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(
            [bin.clone()]
                .into_iter()
                .chain(std::env::split_paths(&path)),
        )?;
        let mut configure = Command::new(bin.join("cmake"));
        configure
            .env("PATH", &path)
            .arg("-S")
            .arg(source.join("vendor/llama.cpp"));
        configure.arg("-B").arg(&build).args(["-G", "Ninja"]);
        configure.args(["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]);
        configure.args(["-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"]);
        configure.args(["-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_SERVER=ON"]);
        configure.args(["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]);
        execute(&mut configure)?;
        let mut compile = Command::new(bin.join("cmake"));
        compile.env("PATH", &path).arg("--build").arg(&build);
        execute(compile.arg("--target").args(PROGRAMS))?;
        Ok(this)
    }

    fn program(&self, name: &str) -> PathBuf {
        self.folder.join("build/bin").join(name)
    }

    /// SmolLM2-135M-Instruct in bf16, from the same file as the demo model's weights.
    pub(crate) fn demo_model(&self) -> Result<PathBuf> {
        let path = self.folder.join("smollm2-135m-bf16.gguf");
        if !path.exists() {
            let original = self.folder.join("smollm2-135m.gguf");
            fs::write(&original, demo_model::fetch_gguf(&self.folder)?)
                .with_context(|| format!("cannot write {}", original.display()))?;
            let unfinished = path.with_extension("incomplete");
            let mut quantize = Command::new(self.program("llama-quantize"));
            let arguments = quantize.arg("--allow-requantize").arg(original);
            execute(arguments.arg(&unfinished).arg("BF16"))?;
            fs::rename(unfinished, &path)?;
        }
        Ok(path)
    }

    /// The same in Q8_0: eight bits a weight, and a scale for every 32.
    pub(crate) fn demo_model_q8(&self) -> Result<PathBuf> {
        let path = self.folder.join("smollm2-135m-q8_0.gguf");
        if !path.exists() {
            let unfinished = path.with_extension("incomplete");
            let mut quantize = Command::new(self.program("llama-quantize"));
            let arguments = quantize.arg(self.demo_model()?).arg(&unfinished);
            execute(arguments.arg("Q8_0"))?;
            fs::rename(unfinished, &path)?;
        }
        Ok(path)
    }

    /// A server of `sequences` at once on `port`.
    pub(crate) fn server(
        &self,
        model: &Path,
        threads: usize,
        sequences: usize,
        port: u16,
    ) -> Command {
        let mut server = Command::new(self.program("llama-server"));
        server
            .arg("-m")
            .arg(model)
            .args(["-t", &threads.to_string(), "--port", &port.to_string()])
            .args(["-np", &sequences.to_string()])
            .args(["-c", &(1024 * sequences).to_string()]);
        server
    }

    /// A Qwen3-0.6B with random bf16 weights and no tokenizer.
    pub(crate) fn random_qwen3(&self) -> Result<PathBuf> {
        let path = self.folder.join("qwen3-0.6b-random.gguf");
        if !path.exists() {
            let unfinished = path.with_extension("incomplete");
            write_random_qwen3(&unfinished)
                .with_context(|| format!("cannot write {}", unfinished.display()))?;
            fs::rename(unfinished, &path)?;
        }
        Ok(path)
    }

    /// Tokens a second of `llama-bench`, the better of flash attention off and on, which is said too.
    pub(crate) fn bench(
        &self,
        model: &Path,
        threads: usize,
        arguments: &[&str],
    ) -> Result<(f64, String)> {
        let mut bench = Command::new(self.program("llama-bench"));
        bench
            .arg("-m")
            .arg(model)
            .args(["-t", &threads.to_string()]);
        bench.args(["-r", "1", "-fa", "off,on", "-o", "json"]);
        let results: Value = serde_json::from_str(&output(bench.args(arguments))?)?;
        let results = results.as_array().context("llama-bench printed no list")?;
        let rates = results.iter().filter_map(|result| {
            let on = result["flash_attn"] == true || result["flash_attn"] == 1;
            let name = if on { "-fa on" } else { "-fa off" };
            Some((result["avg_ts"].as_f64()?, name.to_owned()))
        });
        rates
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .context("llama-bench printed no result")
    }

    /// Tokens a second of `sequences` that generate `tokens` each, together.
    pub(crate) fn batched(
        &self,
        model: &Path,
        threads: usize,
        sequences: usize,
        tokens: usize,
    ) -> Result<f64> {
        let mut bench = Command::new(self.program("llama-batched-bench"));
        bench
            .arg("-m")
            .arg(model)
            .args(["-t", &threads.to_string()]);
        bench.args(["-c", "4096", "-npp", "16", "-ntg", &tokens.to_string()]);
        bench.args(["-npl", &sequences.to_string(), "--output-format", "jsonl"]);
        let output = output(&mut bench)?;
        let mut results = output.lines().filter_map(|line| {
            let result: Value = serde_json::from_str(line.trim()).ok()?;
            result["speed_tg"].as_f64()
        });
        results
            .next()
            .with_context(|| format!("llama-batched-bench printed no result but: {output}"))
    }
}

/// Runs a command, whose output goes where ours does (but to standard error).
fn execute(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    let status = command
        .stdout(std::io::stderr())
        .status()
        .with_context(|| format!("cannot start {shown}"))?;
    ensure!(status.success(), "{shown} failed ({status})");
    Ok(())
}

/// What a command prints.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let output = command
        .output()
        .with_context(|| format!("cannot start {shown}"))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("{shown} failed ({}): {}", output.status, reason.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Shape of Qwen3-0.6B.
mod qwen3 {
    pub(super) const LAYERS: u32 = 28;
    pub(super) const HIDDEN: u64 = 1024;
    pub(super) const WIDE: u64 = 3072;
    pub(super) const HEADS: u64 = 16;
    pub(super) const KV_HEADS: u64 = 8;
    pub(super) const HEAD: u64 = 128;
    pub(super) const VOCABULARY: u64 = 151_936;
}

/// GGUF ids of what is written here: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
const U32: u32 = 4;
const F32: u32 = 6;
const STRING: u32 = 8;
const TENSOR_F32: u32 = 0;
const TENSOR_BF16: u32 = 30;

fn write_random_qwen3(path: &Path) -> Result<()> {
    use qwen3::*;
    let text = |text: &str| -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    };
    let number = |name: &str, value: u64| {
        (
            format!("qwen3.{name}"),
            U32,
            (value as u32).to_le_bytes().to_vec(),
        )
    };
    let float =
        |name: &str, value: f32| (format!("qwen3.{name}"), F32, value.to_le_bytes().to_vec());
    let pairs = [
        ("general.architecture".to_owned(), STRING, text("qwen3")),
        ("tokenizer.ggml.model".to_owned(), STRING, text("no_vocab")),
        number("block_count", LAYERS.into()),
        number("context_length", 40_960),
        number("embedding_length", HIDDEN),
        number("feed_forward_length", WIDE),
        number("attention.head_count", HEADS),
        number("attention.head_count_kv", KV_HEADS),
        number("attention.key_length", HEAD),
        number("attention.value_length", HEAD),
        number("vocab_size", VOCABULARY),
        float("attention.layer_norm_rms_epsilon", 1e-6),
        float("rope.freq_base", 1e6),
    ];

    // Name and shape, the row's length first.
    let mut tensors = vec![
        ("token_embd.weight".to_owned(), vec![HIDDEN, VOCABULARY]),
        ("output_norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("attn_norm", vec![HIDDEN]),
            ("attn_q", vec![HIDDEN, HEADS * HEAD]),
            ("attn_k", vec![HIDDEN, KV_HEADS * HEAD]),
            ("attn_v", vec![HIDDEN, KV_HEADS * HEAD]),
            ("attn_q_norm", vec![HEAD]),
            ("attn_k_norm", vec![HEAD]),
            ("attn_output", vec![HEADS * HEAD, HIDDEN]),
            ("ffn_norm", vec![HIDDEN]),
            ("ffn_gate", vec![HIDDEN, WIDE]),
            ("ffn_up", vec![HIDDEN, WIDE]),
            ("ffn_down", vec![WIDE, HIDDEN]),
        ] {
            tensors.push((format!("blk.{layer}.{name}.weight"), shape));
        }
    }

    let mut header = Vec::new();
    header.extend(b"GGUF");
    header.extend(3_u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((pairs.len() as u64).to_le_bytes());
    for (name, kind, value) in &pairs {
        header.extend(text(name));
        header.extend(kind.to_le_bytes());
        header.extend(value);
    }
    // All sizes are multiples of the alignment, 32 bytes.
    let mut offset = 0_u64;
    for (name, shape) in &tensors {
        header.extend(text(name));
        header.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|n| header.extend(n.to_le_bytes()));
        let (kind, size) = if shape.len() == 1 {
            (TENSOR_F32, 4)
        } else {
            (TENSOR_BF16, 2)
        };
        header.extend(kind.to_le_bytes());
        header.extend(offset.to_le_bytes());
        offset += shape.iter().product::<u64>() * size;
    }
    header.resize(header.len().next_multiple_of(32), 0);

    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    out.write_all(&header)?;
    let mut state = 1_u64;
    for (_, shape) in &tensors {
        let count: u64 = shape.iter().product();
        for _ in 0..count {
            if shape.len() == 1 {
                out.write_all(&1_f32.to_le_bytes())?;
                continue;
            }
            // Knuth's linear congruential generator; uniform in ±0.035, a standard deviation of 0.02.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let uniform = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
            out.write_all(&half::bf16::from_f32(uniform * 0.07).to_le_bytes())?;
        }
    }
    out.into_inner()?.sync_all()?;
    Ok(())
}
