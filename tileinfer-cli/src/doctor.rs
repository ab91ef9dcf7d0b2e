//! `tileinfer doctor`: what this machine has and lacks, with a remedy for each thing missing. It changes nothing.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tileinfer::Error;
use tileinfer::hub::{Hub, HubErrorKind, HubOptions, Silent};
use tileinfer_cpu::Level;
#[cfg(feature = "cuda")]
use tileinfer_cuda::driver::DeviceInfo;

use crate::args::DoctorArgs;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::memory::{self, readable};

/// What was found out about one thing.
#[derive(Serialize)]
struct Finding {
    /// Whether nothing is missing.
    ok: bool,
    /// One line for a person.
    found: String,
    /// What to do, if something is missing.
    remedy: Option<String>,
    /// The same in fields.
    #[serde(flatten)]
    details: Map<String, Value>,
}

impl Finding {
    fn good(found: impl Into<String>) -> Self {
        Finding {
            ok: true,
            found: found.into(),
            remedy: None,
            details: Map::new(),
        }
    }

    fn lacking(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Finding {
            ok: false,
            remedy: Some(remedy.into()),
            ..Finding::good(found)
        }
    }

    fn with(mut self, name: &str, value: Value) -> Self {
        self.details.insert(name.to_owned(), value);
        self
    }
}

pub(crate) fn doctor(args: &DoctorArgs) -> Result<()> {
    let options = HubOptions::from_env().map(|mut options| {
        options.offline |= args.hub.offline;
        options
    });
    let findings = [
        ("tileinfer", Finding::good(env!("CARGO_PKG_VERSION"))),
        ("cpu", cpu()),
        ("memory", memory()),
        ("gpu", gpu()),
        ("driver", driver()),
        ("kernel_pack", kernel_pack()),
        (
            "toolchain",
            Finding::good("none is needed: neither Python nor a compiler"),
        ),
        ("cache", either(&options, cache)),
        ("hub", either(&options, hub)),
    ];
    let mut out = std::io::stdout().lock();
    if args.json {
        let object: Map<String, Value> = findings
            .iter()
            .map(|(name, finding)| ((*name).to_owned(), json!(finding)))
            .collect();
        writeln!(out, "{}", Value::Object(object))?;
        return Ok(());
    }
    for (name, finding) in &findings {
        let mark = if finding.ok { "ok" } else { "--" };
        writeln!(
            out,
            "{mark}  {:12} {}",
            name.replace('_', " "),
            finding.found
        )?;
        if let Some(remedy) = &finding.remedy {
            writeln!(out, "    {:12} {remedy}", "")?;
        }
    }
    Ok(())
}

fn cpu() -> Finding {
    let level = Level::best();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let model = cpu_model();
    let found = format!("{model}, {cores} threads, using {}", level.name());
    let finding = if level.name() == "portable" {
        Finding::lacking(
            found,
            "this CPU has none of AVX2, AVX-512 and NEON: models run, slowly",
        )
    } else {
        Finding::good(found)
    };
    let usable: Vec<&str> = Level::all().into_iter().map(Level::name).collect();
    finding
        .with("model", json!(model))
        .with("features", json!(cpu_features()))
        .with("usable", json!(usable))
        .with("instruction_set", json!(level.name()))
        .with("threads", json!(cores))
}

fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':'));
    name.map_or(std::env::consts::ARCH, |(_, name)| name.trim())
        .to_owned()
}

/// The features that matter here, as far as this CPU has them.
fn cpu_features() -> Vec<&'static str> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! detect {
            ($($feature:tt),*) => {
                $(if std::arch::is_x86_feature_detected!($feature) { found.push($feature); })*
            };
        }
        detect!(
            "avx2",
            "fma",
            "f16c",
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512vnni",
            "avx512bf16"
        );
    }
    #[cfg(target_arch = "aarch64")]
    {
        macro_rules! detect {
            ($($feature:tt),*) => {
                $(if std::arch::is_aarch64_feature_detected!($feature) { found.push($feature); })*
            };
        }
        detect!("neon", "dotprod", "bf16", "i8mm", "sve");
    }
    found.sort_unstable();
    found
}

fn memory() -> Finding {
    let available = memory::available();
    let total = memory::total();
    let of = total.map(|total| format!(" of {}", readable(total)));
    let found = format!(
        "{} available{}",
        readable(available),
        of.unwrap_or_default()
    );
    let finding = if available < 1_000_000_000 {
        Finding::lacking(
            found,
            "close other programs: even a small model wants a gigabyte",
        )
    } else {
        Finding::good(found)
    };
    finding
        .with("available_bytes", json!(available))
        .with("total_bytes", json!(total))
}

#[cfg(feature = "cuda")]
fn gpu() -> Finding {
    match gpu::devices() {
        Ok(found) => {
            let one = |info: &DeviceInfo| {
                let (major, minor) = info.capability;
                format!(
                    "{} (sm_{major}{minor}, {})",
                    info.name,
                    readable(info.memory)
                )
            };
            let names: Vec<_> = found.iter().map(one).collect();
            let details = found.iter().map(|info| {
                let (major, minor) = info.capability;
                json!({
                    "name": info.name,
                    "architecture": format!("sm_{major}{minor}"),
                    "memory_bytes": info.memory,
                    "multiprocessors": info.multiprocessors,
                })
            });
            let details = details.collect();
            Finding::good(names.join(", ")).with("devices", details)
        }
        Err(error) => Finding::lacking(
            error.to_string(),
            "models run on the CPU; a GPU needs the NVIDIA driver 580 or newer",
        )
        .with("devices", json!([])),
    }
}

#[cfg(feature = "cuda")]
fn kernel_pack() -> Finding {
    let found = gpu::devices().and_then(|found| {
        let packs = found.iter().map(|info| {
            let (path, kernels) = gpu::pack(info)?;
            Ok(json!({"path": path, "kernels": kernels}))
        });
        packs.collect::<tileinfer::Result<Vec<_>>>()
    });
    match found {
        Ok(packs) => {
            let paths: Vec<_> = packs.iter().map(|pack| pack["path"].to_string()).collect();
            Finding::good(paths.join(", ")).with("packs", json!(packs))
        }
        Err(error) => {
            Finding::lacking(error.to_string(), "models run on the CPU until it is there")
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn kernel_pack() -> Finding {
    no_cuda("no kernels for a GPU are built in")
}

#[cfg(not(feature = "cuda"))]
fn gpu() -> Finding {
    let found: Vec<String> = fs::read_dir("/proc/driver/nvidia/gpus")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("information")).ok())
        .filter_map(|text| {
            let line = text.lines().find(|line| line.starts_with("Model:"))?;
            Some(line["Model:".len()..].trim().to_owned())
        })
        .collect();
    let finding = if found.is_empty() {
        no_cuda("no NVIDIA GPU is seen")
    } else {
        no_cuda(&found.join(", "))
    };
    finding.with("devices", json!(found))
}

fn driver() -> Finding {
    let version = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let line = version.as_deref().and_then(|text| text.lines().next());
    let finding = match line {
        Some(line) => Finding::good(line),
        None => Finding::lacking(
            "no NVIDIA driver is loaded",
            "only a GPU would need it: the CPU needs none",
        ),
    };
    finding.with("version", json!(line))
}

#[cfg(not(feature = "cuda"))]
fn no_cuda(found: &str) -> Finding {
    Finding::lacking(
        found,
        "this tileinfer was built without CUDA: models run on the CPU",
    )
}

/// What `check` finds, or what is wrong with the environment.
fn either(
    options: &tileinfer::Result<HubOptions>,
    check: impl Fn(&HubOptions) -> Finding,
) -> Finding {
    match options {
        Ok(options) => check(options),
        Err(error) => Finding::lacking(error.to_string(), "set the variable, or unset it"),
    }
}

fn cache(options: &HubOptions) -> Finding {
    let path = &options.cache;
    // The folder is made by the first pull: until then its parent has to be writable.
    let existing = path.ancestors().find(|folder| folder.exists());
    let shown = path.display();
    let written = existing.map(try_writing);
    let writable = matches!(written, Some(Ok(())));
    let finding = match written {
        Some(Ok(())) => Finding::good(format!("{shown} can be written")),
        Some(Err(error)) => Finding::lacking(
            format!("{shown} cannot be written: {error}"),
            "models that are in it run; to pull, set HF_HUB_CACHE to a folder of yours, or make this one writable",
        ),
        None => Finding::lacking(
            format!("{shown} is nowhere"),
            "set HF_HUB_CACHE to a folder",
        ),
    };
    finding
        .with("path", json!(path))
        .with("writable", json!(writable))
}

fn try_writing(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(format!(".tileinfer-{}.part", std::process::id()));
    File::create_new(&probe)?;
    fs::remove_file(probe)
}

/// Asks for a model that no hub has: whatever a hub says to that, it is there.
fn hub(options: &HubOptions) -> Finding {
    let mut options = options.clone();
    options.tries = 1;
    options.head_timeout = options.head_timeout.min(Duration::from_secs(5));
    let (endpoint, offline) = (options.endpoint.clone(), options.offline);
    let has_token = options.token.is_some();
    let (finding, reachable) = if offline {
        let remedy =
            "the network is switched off (--offline, HF_HUB_OFFLINE): only models in the cache run";
        (
            Finding::lacking(format!("{endpoint} was not asked"), remedy),
            None,
        )
    } else {
        let answer = Hub::new(options)
            .and_then(|hub| hub.remote("tileinfer/doctor", None, &Silent).map(|_| ()));
        match answer {
            Err(Error::Hub { kind, message }) if !answers(&kind) => (
                Finding::lacking(
                    message,
                    format!(
                        "check the network, a proxy (HTTPS_PROXY) and HF_ENDPOINT; models in the cache run without {endpoint}"
                    ),
                ),
                Some(false),
            ),
            Err(
                error @ Error::Hub {
                    kind: HubErrorKind::BadToken,
                    ..
                },
            ) => (
                Finding::lacking(
                    error.to_string(),
                    "make a new token on the hub and set HF_TOKEN",
                ),
                Some(true),
            ),
            Err(error) if !matches!(error, Error::Hub { .. }) => (
                Finding::lacking(error.to_string(), "check HF_ENDPOINT and HF_TOKEN"),
                Some(false),
            ),
            _ => (Finding::good(format!("{endpoint} answers")), Some(true)),
        }
    };
    finding
        .with("endpoint", json!(endpoint))
        .with("reachable", json!(reachable))
        .with("offline", json!(offline))
        .with("token", json!(has_token))
}

/// Whether an error comes from a hub that works.
fn answers(kind: &HubErrorKind) -> bool {
    !matches!(
        kind,
        HubErrorKind::Unreachable
            | HubErrorKind::NotAHub
            | HubErrorKind::Status(_)
            | HubErrorKind::BadRedirect
            | HubErrorKind::BadReply
            | HubErrorKind::Offline
    )
}
