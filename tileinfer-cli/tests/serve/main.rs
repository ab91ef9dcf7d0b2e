//! `tileinfer serve` on a real model as those who talk to it meet it: the official packages of two APIs, a
//! browser, a gateway before two replicas. Each test skips, and says so, where the other side is not installed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};

/// Two cores are one test's.
static MACHINE: Mutex<()> = Mutex::new(());

fn machine() -> MutexGuard<'static, ()> {
    MACHINE.lock().unwrap_or_else(|poison| poison.into_inner())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The real model, if it has been made.
fn smollm2() -> Option<PathBuf> {
    let dir = root().join("models/smollm2-135m-instruct");
    if dir.join("model.safetensors").exists() {
        return Some(dir);
    }
    assert!(
        std::env::var_os("CI").is_none(),
        "the real model has to be there in CI"
    );
    eprintln!(
        "SKIPPED: there is no {}; cargo xtask demo-model makes it",
        dir.display()
    );
    None
}

/// A Python that has `packages`, if there is one.
fn python(packages: &str) -> Option<PathBuf> {
    let own = root().join("target/venv/bin/python");
    let has_them = |python: &PathBuf| {
        let import = format!("import {packages}");
        let probe = Command::new(python).args(["-c", &import]).output();
        probe.is_ok_and(|output| output.status.success())
    };
    let found = [own, PathBuf::from("python3")].into_iter().find(has_them);
    if found.is_none() {
        eprintln!("SKIPPED: no Python here has {packages}; cargo xtask ci installs them");
    }
    found
}

/// The first of these programs that is installed.
fn program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> = std::env::split_paths(&path)
        // Where Debian puts daemons.
        .chain([PathBuf::from("/usr/sbin")])
        .collect();
    let found = names
        .iter()
        .flat_map(|name| places.iter().map(move |place| place.join(name)))
        .find(|file| file.is_file());
    if found.is_none() {
        eprintln!("SKIPPED: none of {names:?} is installed");
    }
    found
}

/// A server as a process of its own.
struct Served {
    process: Child,
    url: String,
}

impl Served {
    fn start(model: &Path) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_tileinfer"))
            .arg("serve")
            .arg(model)
            .args(["--address", "127.0.0.1:0"])
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(process.stderr.take().unwrap()).lines();
        let url = said.by_ref().map(Result::unwrap).find_map(|line| {
            let (_, url) = line.split_once("listening on ")?;
            Some(url.split(' ').next()?.to_owned())
        });
        // Whatever else it says must not fill the pipe.
        std::thread::spawn(move || said.for_each(drop));
        Served {
            process,
            url: url.expect("it says where it listens"),
        }
    }

    /// Asked to stop, it does, and without complaint.
    #[cfg(unix)]
    fn stop(mut self) {
        let id = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs a script of `testdata/server` or `deploy`, which says at its end that all is well.
fn passes(python: &Path, script: &str, arguments: &[&str]) {
    let output = Command::new(python)
        .arg(root().join(script))
        .args(arguments)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{wrong}");
    assert!(said.contains("all checks passed"), "{said}");
}

#[cfg(unix)]
#[test]
fn the_official_openai_client_is_content() {
    let _alone = machine();
    let (Some(model), Some(python)) = (smollm2(), python("openai, jsonschema")) else {
        return;
    };
    let served = Served::start(&model);
    let url = format!("{}/v1", served.url);
    passes(
        &python,
        "testdata/server/openai_client.py",
        &[&url, "--schemas", "16"],
    );
    served.stop();
}

#[cfg(unix)]
#[test]
fn the_official_anthropic_client_is_content() {
    let _alone = machine();
    let (Some(model), Some(python)) = (smollm2(), python("anthropic, jsonschema")) else {
        return;
    };
    let served = Served::start(&model);
    passes(
        &python,
        "testdata/server/anthropic_client.py",
        &[&served.url],
    );
    served.stop();
}

#[cfg(unix)]
#[test]
fn the_page_works_in_chromium() {
    let _alone = machine();
    let browsers = [
        "chromium-headless-shell",
        "chromium",
        "google-chrome",
        "chrome",
    ];
    let (Some(model), Some(python), Some(browser)) =
        (smollm2(), python("playwright"), program(&browsers))
    else {
        return;
    };
    let served = Served::start(&model);
    let browser = browser.display().to_string();
    passes(
        &python,
        "testdata/server/page.py",
        &[&served.url, "--browser", &browser],
    );
    served.stop();
}

/// Two replicas behind each gateway that is described in `deploy`.
fn replicas_behind(gateway: &str, packages: &str) {
    let _alone = machine();
    let (Some(model), Some(python)) = (smollm2(), python(packages)) else {
        return;
    };
    if gateway == "nginx" && program(&["nginx"]).is_none() {
        return;
    }
    let (tileinfer, model) = (env!("CARGO_BIN_EXE_tileinfer"), model.display().to_string());
    passes(
        &python,
        "deploy/test_replicas.py",
        &[tileinfer, &model, "--gateway", gateway],
    );
}

#[test]
fn replicas_behind_nginx_survive_a_kill() {
    replicas_behind("nginx", "sys");
}

#[test]
fn replicas_behind_sglang_router_survive_a_kill() {
    replicas_behind("sglang-router", "sglang_router");
}
