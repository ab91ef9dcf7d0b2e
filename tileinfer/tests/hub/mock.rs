//! A model hub on loopback, for tests: files in memory, storage on a second port, and faults on demand.
//! Speaks just enough HTTP, one request per connection.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha1::Digest;

/// Which of the two servers was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Server {
    Hub,
    Storage,
}

/// A request as it arrived, and how many body bytes were sent back.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) server: Server,
    pub(crate) method: String,
    /// Percent-decoded, without the query.
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) sent: usize,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }
}

/// What to do instead of answering properly.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// This status with these headers and no body.
    Status(u16, Vec<(&'static str, String)>),
    /// Close the connection after this many bytes of the body.
    Cut(usize),
    /// A body shortened to this length, announced as such.
    Short(usize),
    /// A body with this many bytes more, announced as such.
    Long(usize),
    /// A body with its last byte changed.
    Corrupt,
    /// This many bytes at a time, with this pause.
    Trickle(usize, Duration),
    /// No answer for this long.
    Stall(Duration),
    /// The whole file with 200, whatever range was asked for.
    IgnoreRange,
    /// A proper answer without this header.
    Without(&'static str),
    /// A proper answer with this header replaced.
    With(&'static str, String),
    /// These bytes, then the end.
    Raw(Vec<u8>),
}

struct Rule {
    server: Server,
    method: &'static str,
    path_end: String,
    left: usize,
    fault: Fault,
}

#[derive(Clone)]
struct Entry {
    bytes: Arc<Vec<u8>>,
    /// Kept in storage, under its SHA-256; else in git, under its blob hash.
    large: bool,
}

/// The token without which a repository is refused, and how.
struct Gate {
    token: String,
    status: u16,
    headers: Vec<(&'static str, String)>,
}

#[derive(Default)]
struct Repo {
    revisions: BTreeMap<String, String>,
    commits: BTreeMap<String, BTreeMap<String, Entry>>,
    gate: Option<Gate>,
}

#[derive(Default)]
struct State {
    repos: BTreeMap<String, Repo>,
    rules: Vec<Rule>,
    seen: Vec<Seen>,
    connections: usize,
    /// Signed addresses older than this are refused by the storage.
    first_valid_signature: usize,
    signatures: usize,
}

/// The two servers. They live as long as the process.
#[derive(Clone)]
pub(crate) struct MockHub {
    pub(crate) url: String,
    pub(crate) storage_url: String,
    state: Arc<Mutex<State>>,
}

impl MockHub {
    pub(crate) fn start() -> Self {
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let storage = TcpListener::bind("127.0.0.1:0").unwrap();
        let mock = MockHub {
            url: format!("http://{}", hub.local_addr().unwrap()),
            storage_url: format!("http://{}", storage.local_addr().unwrap()),
            state: Arc::default(),
        };
        for (listener, server) in [(hub, Server::Hub), (storage, Server::Storage)] {
            let mock = mock.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let mock = mock.clone();
                    mock.state.lock().unwrap().connections += 1;
                    std::thread::spawn(move || {
                        // A client that hangs up is no concern of ours.
                        let _ = mock.serve(server, stream);
                    });
                }
            });
        }
        mock
    }

    /// Adds a commit to a repository; `revisions` stand for it from now on.
    pub(crate) fn commit(
        &self,
        repo: &str,
        commit: &str,
        revisions: &[&str],
        files: &[(&str, &[u8])],
    ) {
        let mut state = self.state.lock().unwrap();
        let repo = state.repos.entry(repo.to_owned()).or_default();
        for revision in revisions {
            repo.revisions
                .insert((*revision).to_owned(), commit.to_owned());
        }
        repo.revisions.insert(commit.to_owned(), commit.to_owned());
        let files = files.iter().map(|(path, bytes)| {
            let entry = Entry {
                bytes: Arc::new(bytes.to_vec()),
                large: path.ends_with(".safetensors"),
            };
            ((*path).to_owned(), entry)
        });
        repo.commits.insert(commit.to_owned(), files.collect());
    }

    /// Refuses a repository to everybody without `token`.
    pub(crate) fn gate(
        &self,
        repo: &str,
        token: &str,
        status: u16,
        headers: &[(&'static str, &str)],
    ) {
        let headers = headers.iter().map(|(k, v)| (*k, (*v).to_owned())).collect();
        let mut state = self.state.lock().unwrap();
        state.repos.get_mut(repo).unwrap().gate = Some(Gate {
            token: token.to_owned(),
            status,
            headers,
        });
    }

    /// The next `times` requests of this kind whose path ends so get the fault.
    pub(crate) fn fault(
        &self,
        server: Server,
        method: &'static str,
        path_end: &str,
        times: usize,
        fault: Fault,
    ) {
        self.state.lock().unwrap().rules.push(Rule {
            server,
            method,
            path_end: path_end.to_owned(),
            left: times,
            fault,
        });
    }

    pub(crate) fn no_faults(&self) {
        self.state.lock().unwrap().rules.clear();
    }

    /// Makes all addresses of the storage given out so far invalid.
    pub(crate) fn expire_signatures(&self) {
        let mut state = self.state.lock().unwrap();
        state.first_valid_signature = state.signatures;
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.lock().unwrap().seen.clone()
    }

    pub(crate) fn forget(&self) {
        let mut state = self.state.lock().unwrap();
        state.seen.clear();
        state.connections = 0;
    }

    pub(crate) fn connections(&self) -> usize {
        self.state.lock().unwrap().connections
    }

    fn serve(&self, server: Server, stream: TcpStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        let method = words.next().unwrap_or_default().to_owned();
        let target = words.next().unwrap_or_default().to_owned();
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 || line == "\r\n" {
                break;
            }
            if let Some((key, value)) = line.split_once(':') {
                headers.push((key.trim().to_owned(), value.trim().to_owned()));
            }
        }
        let mut seen = Seen {
            server,
            method,
            path: unquote(path),
            query: query.to_owned(),
            headers,
            sent: 0,
        };
        let fault = self.take_fault(&seen);
        let answer = match &fault {
            Some(Fault::Status(status, headers)) => Answer {
                status: *status,
                headers: headers
                    .iter()
                    .map(|(k, v)| ((*k).to_owned(), v.clone()))
                    .collect(),
                body: Vec::new(),
            },
            Some(Fault::IgnoreRange) => {
                seen.headers
                    .retain(|(name, _)| !name.eq_ignore_ascii_case("range"));
                self.answer(&seen)
            }
            _ => self.answer(&seen),
        };
        // Recorded before it is answered, so that a client that has its answer can look it up.
        let at = {
            let mut state = self.state.lock().unwrap();
            state.seen.push(seen.clone());
            state.seen.len() - 1
        };
        let sent = send(stream, &seen, answer, fault)?;
        if let Some(entry) = self.state.lock().unwrap().seen.get_mut(at) {
            entry.sent = sent;
        }
        Ok(())
    }

    fn take_fault(&self, seen: &Seen) -> Option<Fault> {
        let mut state = self.state.lock().unwrap();
        let rule = state.rules.iter_mut().find(|rule| {
            rule.left > 0
                && rule.server == seen.server
                && rule.method == seen.method
                && seen.path.ends_with(&rule.path_end)
        })?;
        rule.left -= 1;
        Some(rule.fault.clone())
    }

    fn answer(&self, seen: &Seen) -> Answer {
        let mut state = self.state.lock().unwrap();
        if seen.server == Server::Storage {
            return storage(&state, seen);
        }
        if let Some(rest) = seen.path.strip_prefix("/api/models/") {
            return api(&state, seen, rest);
        }
        let Some((repo, rest)) = seen.path[1..].split_once("/resolve/") else {
            return Answer::code(404, "RepoNotFound");
        };
        let Some(entry) = state.repos.get(repo) else {
            // As the real hub does: it does not tell whether the repository exists.
            return Answer::code(401, "RepoNotFound");
        };
        if let Some(refusal) = refusal(entry, seen) {
            return refusal;
        }
        let Some((revision, path)) = entry
            .revisions
            .keys()
            .filter_map(|r| Some((r, rest.strip_prefix(r.as_str())?.strip_prefix('/')?)))
            .max_by_key(|(r, _)| r.len())
        else {
            return Answer::code(404, "RevisionNotFound");
        };
        let commit = entry.revisions[revision].clone();
        let Some(file) = entry.commits[&commit].get(path).cloned() else {
            return Answer::code(404, "EntryNotFound").with("X-Repo-Commit", &commit);
        };
        if !file.large {
            return content(seen, &file.bytes)
                .with("ETag", &format!("\"{}\"", git_sha1(&file.bytes)))
                .with("X-Repo-Commit", &commit);
        }
        let signature = state.signatures;
        state.signatures += 1;
        let hash = sha256(&file.bytes);
        Answer::status(302)
            .with(
                "Location",
                &format!(
                    "{}/{repo}/{path}?hash={hash}&sig={signature}",
                    self.storage_url
                ),
            )
            .with("X-Linked-Etag", &format!("\"{hash}\""))
            .with("X-Linked-Size", &file.bytes.len().to_string())
            .with("X-Repo-Commit", &commit)
    }
}

struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn status(status: u16) -> Self {
        Answer {
            status,
            headers: Vec::new(),
            body: Vec::new(),
        }
    }

    fn code(status: u16, code: &str) -> Self {
        Answer::status(status)
            .with("X-Error-Code", code)
            .with("X-Error-Message", code)
    }

    fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }
}

fn refusal(repo: &Repo, seen: &Seen) -> Option<Answer> {
    let Gate {
        token,
        status,
        headers,
    } = repo.gate.as_ref()?;
    if seen.header("authorization") == Some(&format!("Bearer {token}")) {
        return None;
    }
    let mut answer = Answer::status(*status);
    for (name, value) in headers {
        answer = answer.with(name, value);
    }
    Some(answer)
}

/// A file or the part of it that is asked for.
fn content(seen: &Seen, bytes: &[u8]) -> Answer {
    let range = seen.header("range").and_then(|range| {
        let (start, end) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((start.parse::<usize>().ok()?, end.parse::<usize>().ok()))
    });
    let Some((start, end)) = range else {
        let mut answer = Answer::status(200);
        answer.body = bytes.to_vec();
        return answer;
    };
    if start >= bytes.len() {
        return Answer::status(416).with("Content-Range", &format!("bytes */{}", bytes.len()));
    }
    let end = end.map_or(bytes.len(), |end| (end + 1).min(bytes.len()));
    let mut answer = Answer::status(206).with(
        "Content-Range",
        &format!("bytes {start}-{}/{}", end - 1, bytes.len()),
    );
    answer.body = bytes[start..end].to_vec();
    answer
}

fn storage(state: &State, seen: &Seen) -> Answer {
    let value = |key: &str| {
        seen.query
            .split('&')
            .find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
    };
    let signature: usize = value("sig").and_then(|s| s.parse().ok()).unwrap_or(0);
    if signature < state.first_valid_signature {
        return Answer::status(403);
    }
    let file = state
        .repos
        .values()
        .flat_map(|repo| repo.commits.values())
        .flat_map(|files| files.values())
        .find(|file| Some(sha256(&file.bytes).as_str()) == value("hash"));
    match file {
        Some(file) => content(seen, &file.bytes),
        None => Answer::status(404),
    }
}

/// What Python's client asks beside the files: `{id}`, `{id}/revision/{rev}` and `{id}/tree/{rev}`.
fn api(state: &State, seen: &Seen, rest: &str) -> Answer {
    let (id, what, revision) = match (rest.split_once("/revision/"), rest.split_once("/tree/")) {
        (Some((id, revision)), _) => (id, "info", revision),
        (_, Some((id, revision))) => (id, "tree", revision),
        _ => (rest, "info", "main"),
    };
    let Some(repo) = state.repos.get(id) else {
        return Answer::code(401, "RepoNotFound");
    };
    if let Some(refusal) = refusal(repo, seen) {
        return refusal;
    }
    let Some(commit) = repo.revisions.get(revision) else {
        return Answer::code(404, "RevisionNotFound");
    };
    let files = &repo.commits[commit];
    let json = if what == "tree" {
        let entries: Vec<serde_json::Value> = files
            .iter()
            .map(|(path, file)| {
                let size = file.bytes.len();
                let mut entry = serde_json::json!({
                    "type": "file", "path": path, "size": size, "oid": git_sha1(&file.bytes),
                });
                if file.large {
                    entry["lfs"] = serde_json::json!({
                        "oid": sha256(&file.bytes), "size": size, "pointerSize": 130,
                    });
                }
                entry
            })
            .collect();
        serde_json::json!(entries)
    } else {
        let siblings: Vec<_> = files
            .keys()
            .map(|path| serde_json::json!({"rfilename": path}))
            .collect();
        serde_json::json!({
            "_id": "0", "id": id, "modelId": id, "sha": commit, "private": false, "gated": false,
            "disabled": false, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings,
        })
    };
    let mut answer = Answer::status(200).with("Content-Type", "application/json");
    answer.body = json.to_string().into_bytes();
    answer
}

/// Sends an answer with its fault; returns how many bytes of the body went out.
fn send(
    mut stream: TcpStream,
    seen: &Seen,
    mut answer: Answer,
    fault: Option<Fault>,
) -> std::io::Result<usize> {
    let mut cut = usize::MAX;
    let mut step = (usize::MAX, Duration::ZERO);
    match fault {
        Some(Fault::Raw(bytes)) => {
            stream.write_all(&bytes)?;
            return Ok(bytes.len());
        }
        Some(Fault::Cut(length)) => cut = length,
        Some(Fault::Short(length)) => answer.body.truncate(length),
        Some(Fault::Long(extra)) => answer.body.extend(vec![0; extra]),
        Some(Fault::Corrupt) => {
            if let Some(last) = answer.body.last_mut() {
                *last ^= 1;
            }
        }
        Some(Fault::Trickle(bytes, pause)) => step = (bytes, pause),
        Some(Fault::Stall(pause)) => std::thread::sleep(pause),
        Some(Fault::Without(name)) => answer
            .headers
            .retain(|(n, _)| !n.eq_ignore_ascii_case(name)),
        Some(Fault::With(name, value)) => {
            answer
                .headers
                .retain(|(n, _)| !n.eq_ignore_ascii_case(name));
            answer.headers.push((name.to_owned(), value));
        }
        Some(Fault::Status(..) | Fault::IgnoreRange) | None => {}
    }
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", answer.status);
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("Content-Length: {}\r\n\r\n", answer.body.len()));
    stream.write_all(head.as_bytes())?;
    let mut sent = 0;
    if seen.method != "HEAD" {
        let body = &answer.body[..answer.body.len().min(cut)];
        for chunk in body.chunks(step.0.min(body.len().max(1))) {
            stream.write_all(chunk)?;
            sent += chunk.len();
            std::thread::sleep(step.1);
        }
    }
    stream.flush()?;
    // Closing with unread input would reset the connection and lose what was sent.
    stream.shutdown(std::net::Shutdown::Write)?;
    let _ = stream.read(&mut [0; 64]);
    Ok(sent)
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&sha2::Sha256::digest(bytes))
}

pub(crate) fn git_sha1(bytes: &[u8]) -> String {
    let mut hash = sha1::Sha1::new();
    hash.update(format!("blob {}\0", bytes.len()));
    hash.update(bytes);
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unquote(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let code = (bytes[at] == b'%')
            .then(|| u8::from_str_radix(text.get(at + 1..at + 3)?, 16).ok())
            .flatten();
        match code {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}
