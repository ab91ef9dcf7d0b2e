//! Sixty-four clients at once, each with a marker of its own, over few pages: some share a beginning, some hang up
//! in the middle. Every answer is the one that the request gets alone, no page is lost, memory stays flat. Some
//! seconds long; minutes with `TILEINFER_CROWD_SECONDS=300 cargo test -p tileinfer-server --test crowd`.

#[path = "../server/common.rs"]
#[expect(dead_code, reason = "the tests of routes use the rest")]
mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::{Live, Setup, live};
use serde_json::{Value, json};
use tileinfer::engine::EngineOptions;
use tileinfer::runner::FakeOptions;

const CHAT: &str = "/v1/chat/completions";
const CLIENTS: usize = 64;
/// Requests of a client that differ.
const KINDS: usize = 4;

/// Request `kind` of a client: with a long beginning that many share or one that nobody does, greedy or not,
/// whole or streamed.
fn body(client: usize, kind: usize) -> Value {
    let marker = format!("marker {}", client * 7919 + kind);
    let system = match client % 3 {
        0 => "You are a helpful assistant with a long beginning that many share, word for word, page after page.".to_owned(),
        1 => "You count.".to_owned(),
        _ => format!("{marker} is mine alone, and so is all that follows: {client} times {client}."),
    };
    json!({
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": marker}],
        "max_tokens": 8 + (client * 5 + kind) % 40,
        "seed": client,
        "temperature": if client.is_multiple_of(4) { 0.0 } else { 0.8 },
        "stream": kind % 2 == 1,
    })
}

fn answer(live: &Live, client: usize, kind: usize) -> String {
    let body = body(client, kind);
    if kind.is_multiple_of(2) {
        let answer = live.ok(CHAT, &body);
        return answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned();
    }
    let (chunks, _) = live.stream(CHAT, &body);
    let pieces = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"]["content"]);
    pieces.filter_map(Value::as_str).collect()
}

/// Asks, and hangs up somewhere on the way.
fn hang_up(live: &Live, client: usize, kind: usize, after: Duration) {
    let body = body(client, kind).to_string();
    let mut connection = TcpStream::connect(live.address).unwrap();
    write!(
        connection,
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    connection
        .set_read_timeout(Some(after.max(Duration::from_millis(1))))
        .unwrap();
    // What came by then does not matter, and nothing may have.
    let _ = connection.read(&mut [0; 256]);
}

/// Bytes of this process that lie in memory, where it can be known.
fn resident() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split(' ').nth(1)?.parse::<usize>().ok()? * 4096)
}

#[test]
fn every_answer_is_the_one_it_gets_alone() {
    let seconds = std::env::var("TILEINFER_CROWD_SECONDS").ok();
    let seconds: f64 = seconds.map_or(9.0, |text| text.parse().unwrap());
    let roomy = live(&Setup::default());
    let alone: Vec<Vec<String>> = (0..CLIENTS)
        .map(|client| {
            (0..KINDS)
                .map(|kind| answer(&roomy, client, kind))
                .collect()
        })
        .collect();
    roomy.assert_whole();
    drop(roomy);
    let (mut preemptions, mut cached) = (0, 0);
    let (answered, left) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let shapes = [
        (24, 12, 64, 2, true),
        (40, 5, 9, 1, true),
        (30, 16, 200, 2, false),
    ];
    for (pages, max_spans, max_rows, depth, prefix_cache) in shapes {
        let fake = FakeOptions {
            pages,
            max_spans,
            max_rows,
            depth,
            max_length: 300,
            ..Setup::default().fake
        };
        let engine = EngineOptions {
            prefix_cache,
            ..EngineOptions::default()
        };
        let live = live(&Setup {
            fake,
            engine,
            ..Setup::default()
        });
        let end = Instant::now() + Duration::from_secs_f64(seconds / shapes.len() as f64);
        let crowd = |until: Instant| {
            std::thread::scope(|scope| {
                for client in 0..CLIENTS {
                    let (alone, live, answered, left) = (&alone, &live, &answered, &left);
                    scope.spawn(move || {
                        for turn in 0.. {
                            if Instant::now() > until {
                                break;
                            }
                            let (kind, dice) = (turn % KINDS, (client * 31 + turn * 17) % 23);
                            if dice < 5 {
                                hang_up(live, client, kind, Duration::from_millis(dice as u64 * 3));
                                left.fetch_add(1, Relaxed);
                            } else {
                                let got = answer(live, client, kind);
                                assert_eq!(
                                    got, alone[client][kind],
                                    "client {client}, kind {kind}"
                                );
                                answered.fetch_add(1, Relaxed);
                            }
                        }
                    });
                }
            });
            live.assert_whole();
            resident()
        };
        // Half of the time to get to its size, the other half to stay there.
        let half = Instant::now() + (end - Instant::now()) / 2;
        let (before, after) = (crowd(half), crowd(end));
        println!("{pages} pages: resident {before:?}, then {after:?}");
        if let (Some(before), Some(after)) = (before, after) {
            assert!(
                after < before + (24 << 20),
                "memory grows: {before} to {after}"
            );
        }
        let metrics = live.engine.metrics().snapshot();
        assert_eq!(
            (
                metrics.pages_lost,
                metrics.failed,
                metrics.running,
                metrics.waiting
            ),
            (0, 0, 0, 0)
        );
        preemptions += metrics.preemptions;
        cached += metrics.cached_tokens;
    }
    let (answered, left) = (answered.into_inner(), left.into_inner());
    println!(
        "{answered} answered, {left} hung up, {preemptions} preemptions, {cached} tokens found in the cache"
    );
    assert!(answered > CLIENTS && left > 0 && preemptions > 0 && cached > 0);
}
