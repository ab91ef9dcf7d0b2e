//! A server on a free port over a fake runner, and a plain client for it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use tileinfer::chat::ChatTemplate;
use tileinfer::engine::{Engine, EngineOptions, StepLoop};
use tileinfer::runner::{Batch, FakeOptions, FakeRunner, Runner, RunnerLimits, StepOutput, Ticket};
use tileinfer::sampling::GenerationDefaults;
use tileinfer::tokenizer::Tokenizer;
use tileinfer_server::{Model, ServeOptions, Server};
use tokio::sync::oneshot;

/// The folders of `testdata/tokenizers` with `tokenizer.json` unpacked.
static UNPACKED: LazyLock<TempDir> = LazyLock::new(|| {
    let target = tempfile::tempdir().unwrap();
    for name in ["smollm2", "qwen3"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../testdata/tokenizers")
            .join(name);
        let copy = target.path().join(name);
        fs::create_dir(&copy).unwrap();
        for file in fs::read_dir(&folder).unwrap() {
            let file = file.unwrap().path();
            if file.extension().is_some_and(|extension| extension == "xz") {
                let mut packed = BufReader::new(File::open(&file).unwrap());
                let mut plain = File::create(copy.join(file.file_stem().unwrap())).unwrap();
                lzma_rs::xz_decompress(&mut packed, &mut plain).unwrap();
            } else {
                fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
            }
        }
    }
    target
});

pub(crate) fn model_dir(name: &str) -> PathBuf {
    UNPACKED.path().join(name)
}

/// What a test wants to be different.
pub(crate) struct Setup {
    pub(crate) model: &'static str,
    pub(crate) fake: FakeOptions,
    pub(crate) engine: EngineOptions,
    pub(crate) options: ServeOptions,
    /// Texts that the model answers with, one request after the other, instead of what the fake runner says.
    pub(crate) script: Vec<String>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            model: "smollm2",
            fake: FakeOptions {
                page_size: 16,
                max_rows: 256,
                ..FakeOptions::default()
            },
            engine: EngineOptions::default(),
            options: ServeOptions::default(),
            script: Vec::new(),
        }
    }
}

/// A server that runs.
pub(crate) struct Live {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Engine,
    pub(crate) tokenizer: Tokenizer,
    stop: Option<oneshot::Sender<()>>,
    ended: Mutex<Receiver<()>>,
}

/// What ends texts in the folders used here: `<|im_end|>`.
pub(crate) fn stop_ids(tokenizer: &Tokenizer) -> Vec<u32> {
    vec![tokenizer.token_id("<|im_end|>").unwrap()]
}

/// A model over a fake runner.
pub(crate) fn model(setup: &Setup) -> Model {
    let dir = model_dir(setup.model);
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    let vocabulary = tokenizer.vocab_size();
    let fake = FakeRunner::new(&FakeOptions {
        vocabulary,
        ..setup.fake.clone()
    });
    let stop_ids = stop_ids(&tokenizer);
    let runner: Box<dyn Runner> = if setup.script.is_empty() {
        Box::new(fake)
    } else {
        let ended =
            |text: &String| [tokenizer.encode(text, false).unwrap(), stop_ids.clone()].concat();
        let script = setup.script.iter().flat_map(ended).collect();
        Box::new(Scripted {
            fake,
            script,
            said: 0,
        })
    };
    let engine =
        Engine::start(StepLoop::new(runner), Some(tokenizer.clone()), setup.engine).unwrap();
    let template = Some(ChatTemplate::load(&dir).unwrap());
    let defaults = GenerationDefaults {
        stop_ids,
        ..GenerationDefaults::default()
    };
    Model {
        name: "test/model".to_owned(),
        engine,
        tokenizer,
        template,
        defaults,
    }
}

pub(crate) fn live(setup: &Setup) -> Live {
    let model = model(setup);
    let (engine, tokenizer) = (model.engine.clone(), model.tokenizer.clone());
    let server = Server::new(setup.options.clone());
    server.load(model);
    let (address, stop, ended) = start(server);
    Live {
        address,
        engine,
        tokenizer,
        stop: Some(stop),
        ended: Mutex::new(ended),
    }
}

/// A server on a free port, what stops it, and what hears that it has.
pub(crate) fn start(server: Server) -> (SocketAddr, oneshot::Sender<()>, Receiver<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let (done, ended) = channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let stopped = async move { drop(stopped.await) };
            server.serve(listener, stopped).await.unwrap();
        });
        drop(runtime);
        // Most tests do not wait for it.
        let _ = done.send(());
    });
    (address, stop, ended)
}

impl Live {
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Status, headers of interest and body.
    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let mut response = agent().post(&self.url(path)).send_json(body).unwrap();
        (
            response.status().as_u16(),
            response.body_mut().read_json().unwrap(),
        )
    }

    /// The answer to a request that must be one.
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{answer}");
        answer
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let mut response = agent().get(&self.url(path)).call().unwrap();
        (
            response.status().as_u16(),
            response.body_mut().read_to_string().unwrap(),
        )
    }

    /// The chunks of a stream, which must end with `[DONE]`; pings are counted.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> (Vec<Value>, usize) {
        let mut response = agent().post(&self.url(path)).send_json(body).unwrap();
        assert_eq!(response.status().as_u16(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        read_stream(BufReader::new(response.body_mut().as_reader()))
    }

    /// Idle, and every page where it belongs.
    pub(crate) fn assert_whole(&self) {
        let report = self.engine.when_idle().expect("the engine runs");
        assert!(report.is_whole(), "{report:?}");
    }

    /// Tells it to stop.
    pub(crate) fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits until it has stopped.
    pub(crate) fn wait(&self, at_most: Duration) {
        self.ended
            .lock()
            .unwrap()
            .recv_timeout(at_most)
            .expect("the server ends");
    }
}

pub(crate) fn read_stream(reader: impl BufRead) -> (Vec<Value>, usize) {
    let (mut chunks, mut pings, mut done) = (Vec::new(), 0, false);
    for line in reader.lines() {
        let line = line.unwrap();
        assert!(!done || line.is_empty(), "{line:?} after the end");
        match line.split_once(' ') {
            Some(("data:", "[DONE]")) => done = true,
            Some(("data:", data)) => chunks.push(serde_json::from_str(data).unwrap()),
            Some((":", "ping")) => pings += 1,
            _ => assert!(line.is_empty(), "{line:?}"),
        }
    }
    assert!(
        done || chunks
            .last()
            .is_some_and(|chunk: &Value| chunk.get("error").is_some()),
        "{chunks:?}"
    );
    (chunks, pings)
}

/// A client that reads errors like any answer.
pub(crate) fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .build()
        .into()
}

/// Waits until `what` holds.
pub(crate) fn until(what: impl Fn() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "it never happens"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A fake runner that says what a script says, token after token: for one request at a time.
struct Scripted {
    fake: FakeRunner,
    script: Vec<u32>,
    said: usize,
}

impl Runner for Scripted {
    fn device(&self) -> String {
        "scripted".to_owned()
    }

    fn limits(&self) -> &RunnerLimits {
        self.fake.limits()
    }

    fn launch(&mut self, batch: &Batch) -> tileinfer::Result<Ticket> {
        self.fake.launch(batch)
    }

    fn read(&mut self, ticket: Ticket) -> tileinfer::Result<StepOutput> {
        let mut output = self.fake.read(ticket)?;
        for sampled in output.spans.iter_mut().flat_map(|span| &mut span.sampled) {
            sampled.token = self.script[self.said % self.script.len()];
            self.said += 1;
        }
        Ok(output)
    }
}
