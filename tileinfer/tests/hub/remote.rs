//! Looking at a model without downloading it.

use tileinfer::hub::{HubErrorKind, Silent};
use tileinfer::weights::Header;

use super::mock::{Fault, Server};
use super::*;

/// A safetensors file with a header of at least `length` bytes and one tensor of `data` bytes, and its header.
fn weights(length: usize, data: usize) -> (Vec<u8>, Header) {
    let json = serde_json::json!({
        "__metadata__": {"pad": "x".repeat(length)},
        "w": {"dtype": "BF16", "shape": [data / 2], "data_offsets": [0, data]},
    })
    .to_string();
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json.bytes());
    file.extend(noise(data, 5));
    let header = Header::parse(Path::new("w"), &file, file.len() as u64).unwrap();
    (file, header)
}

fn error_of<T>(result: tileinfer::Result<T>) -> Error {
    match result {
        Ok(_) => panic!("it should have failed"),
        Err(error) => error,
    }
}

#[test]
fn headers_come_by_range_requests() {
    let world = World::new();
    let (small, small_header) = weights(100, 3_000_000);
    let (large, large_header) = weights(200_000, 3_000_000);
    let index = br#"{"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}"#;
    world.hub.commit(
        REPO,
        SECOND,
        &["main"],
        &[
            ("config.json", b"{\"x\":1}"),
            ("model.safetensors.index.json", index),
            ("a.safetensors", &small),
            ("b.safetensors", &large),
        ],
    );
    let client = world.client();
    let remote = client.remote(REPO, None, &Silent).unwrap();
    assert_eq!(remote.commit(), SECOND);
    assert_eq!(remote.read("config.json").unwrap(), b"{\"x\":1}");
    let headers = remote.headers().unwrap();
    assert_eq!(headers.len(), 2);
    assert_eq!(
        (&headers[0].header, headers[0].size),
        (&small_header, small.len() as u64)
    );
    assert_eq!(
        (&headers[1].header, headers[1].size),
        (&large_header, large.len() as u64)
    );
    assert_eq!(headers[1].header.tensors[0].shape, [1_500_000]);
    std::thread::sleep(Duration::from_millis(50));
    let sent: usize = world.hub.seen().iter().map(|seen| seen.sent).sum();
    assert!(sent < 400_000, "{sent}");
    assert!(!world.cache().exists());
}

#[test]
fn ranges_that_are_ignored_cut_or_refused() {
    let world = World::new();
    let (file, header) = weights(100_000, 100_000);
    world.hub.commit(
        "solo",
        FIRST,
        &["main"],
        &[("config.json", b"{}"), ("model.safetensors", &file)],
    );
    let client = world.client();
    let remote = client.remote("solo", None, &Silent).unwrap();
    for fault in [
        Fault::IgnoreRange,
        Fault::Cut(10),
        Fault::Status(503, vec![]),
    ] {
        world
            .hub
            .fault(Server::Storage, "GET", "model.safetensors", 2, fault);
        assert_eq!(remote.headers().unwrap()[0].header, header);
    }
    assert_eq!(
        remote.read_range("model.safetensors", 3..11).unwrap(),
        file[3..11]
    );
    assert_eq!(remote.read_range("model.safetensors", 7..7).unwrap(), b"");
    let beyond = error_of(remote.read_range("model.safetensors", 0..1_000_000));
    assert!(
        matches!(
            beyond,
            Error::Hub {
                kind: HubErrorKind::BadReply,
                ..
            }
        ),
        "{beyond}"
    );
    assert!(matches!(error_of(remote.read("../x")), Error::Usage(_)));
    let absent = error_of(remote.read("none.json"));
    assert!(
        matches!(
            absent,
            Error::Hub {
                kind: HubErrorKind::FileNotFound,
                ..
            }
        ),
        "{absent}"
    );
}

#[test]
fn files_that_are_not_safetensors() {
    let world = World::new();
    for bytes in [
        &b""[..],
        b"x",
        b"\0\0\0\0\0\0\0\0",
        b"\xff\xff\xff\xff\xff\xff\xff\xff{}",
        b"\x05\0\0\0\0\0\0\0{}",
    ] {
        world.hub.commit(
            "solo",
            FIRST,
            &["main"],
            &[("config.json", b"{}"), ("model.safetensors", bytes)],
        );
        let client = world.client();
        let error = error_of(client.remote("solo", None, &Silent).unwrap().headers());
        assert!(
            matches!(error, Error::BadModel { .. }),
            "{bytes:?}: {error}"
        );
    }
}
