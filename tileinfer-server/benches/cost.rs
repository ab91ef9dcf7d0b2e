//! What serving itself costs, without a model: many streams over the fake runner, whose own arithmetic is counted
//! too. The server is a process of its own, held on one core where `taskset` is there.
//!
//!     cargo bench -p tileinfer-server --bench cost [-- STREAMS TOKENS]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use tileinfer::chat::ChatTemplate;
use tileinfer::engine::{Engine, EngineOptions, StepLoop};
use tileinfer::runner::{FakeOptions, FakeRunner};
use tileinfer::sampling::GenerationDefaults;
use tileinfer::tokenizer::Tokenizer;
use tileinfer_server::{Model, ServeOptions};

const SERVER: &str = "--be-the-server";

fn main() {
    let numbers: Vec<usize> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.parse().ok())
        .collect();
    let streams = numbers.first().copied().unwrap_or(256);
    let tokens = numbers.get(1).copied().unwrap_or(300);
    if std::env::args().any(|argument| argument == SERVER) {
        serve(streams, tokens);
    } else {
        measure(streams, tokens);
    }
}

/// A model that computes next to nothing.
fn serve(streams: usize, tokens: usize) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/models/qwen3");
    let load = move || {
        let tokenizer = Tokenizer::from_dir(&dir)?;
        let max_length = tokens + 64;
        let page_size = 16;
        let fake = FakeRunner::new(&FakeOptions {
            vocabulary: tokenizer.vocab_size(),
            max_length,
            page_size,
            pages: (streams + 1) * max_length.div_ceil(page_size),
            max_rows: 2 * streams,
            max_spans: streams,
            depth: 2,
            ..FakeOptions::default()
        });
        let source = "{% for message in messages %}{{ message.content }}{% endfor %}:";
        Ok::<_, tileinfer::Error>(Model {
            name: "fake".to_owned(),
            engine: Engine::start(
                StepLoop::new(Box::new(fake)),
                Some(tokenizer.clone()),
                EngineOptions::default(),
            )?,
            template: Some(ChatTemplate::from_source(source, serde_json::Map::new())?),
            tokenizer,
            defaults: GenerationDefaults::default(),
        })
    };
    let options = ServeOptions {
        address: ([127, 0, 0, 1], 0).into(),
        ..ServeOptions::default()
    };
    tileinfer_server::serve(options, load, |address| println!("{address}")).unwrap();
}

fn measure(streams: usize, tokens: usize) {
    let (mut server, pinned) = start(streams, tokens);
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let address: SocketAddr = line.trim().parse().unwrap();
    ask_all(address, streams, 8);
    let (before, start) = (processor_seconds(&server), Instant::now());
    ask_all(address, streams, tokens);
    let wall = start.elapsed().as_secs_f64();
    let busy = processor_seconds(&server)
        .zip(before)
        .map(|(after, before)| after - before);
    server.kill().unwrap();
    server.wait().unwrap();
    let all = (streams * tokens) as f64;
    println!(
        "{streams} streams of {tokens} tokens in {wall:.2} s: {:.0} tokens/s{}",
        all / wall,
        if pinned {
            ", the server on one core"
        } else {
            ""
        }
    );
    if let Some(busy) = busy {
        println!(
            "{:.1} µs of processor time a token: {:.0} tokens/s of a whole core",
            busy / all * 1e6,
            all / busy
        );
    }
}

fn start(streams: usize, tokens: usize) -> (Child, bool) {
    let own: PathBuf = std::env::current_exe().unwrap();
    let numbers = [streams.to_string(), tokens.to_string()];
    let mut pinned = Command::new("taskset");
    pinned.args(["-c", "0"]).arg(&own);
    let mut commands = [(pinned, true), (Command::new(&own), false)].into_iter();
    let started = commands.find_map(|(mut command, pinned)| {
        let command = command.arg(SERVER).args(&numbers).stdout(Stdio::piped());
        Some((command.spawn().ok()?, pinned))
    });
    started.expect("this program starts itself")
}

/// Asks for so many streams at once and reads each to its end.
fn ask_all(address: SocketAddr, streams: usize, tokens: usize) {
    let connections: Vec<TcpStream> = (0..streams)
        .map(|i| {
            let body = format!(
                "{{\"messages\":[{{\"role\":\"user\",\"content\":\"stream {i}\"}}],\"stream\":true,\"max_tokens\":{tokens},\"seed\":{i}}}"
            );
            let mut connection = TcpStream::connect(address).unwrap();
            write!(
                connection,
                "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
            .unwrap();
            connection
        })
        .collect();
    std::thread::scope(|scope| {
        for mut connection in connections {
            scope.spawn(move || {
                let (mut buffer, mut tail) = (vec![0; 64 << 10], Vec::new());
                loop {
                    let read = connection.read(&mut buffer).unwrap();
                    if read == 0 {
                        break;
                    }
                    tail.extend(&buffer[..read]);
                    tail.drain(..tail.len().saturating_sub(64));
                }
                let tail = String::from_utf8_lossy(&tail);
                assert!(tail.contains("[DONE]"), "{tail}");
            });
        }
    });
}

/// Processor time that a process has used, where it can be known.
fn processor_seconds(process: &Child) -> Option<f64> {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).ok()?;
    // The name, in brackets, may hold blanks.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: f64 = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    // Linux counts in hundredths whatever it does inside.
    Some(ticks / 100.0)
}
