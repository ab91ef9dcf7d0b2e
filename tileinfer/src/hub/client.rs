//! Questions to the hub over HTTP: one request at a time, redirects by our own rules, waits and new attempts.
//! Knows nothing of the cache.
//!
//! The token goes to the endpoint only. A redirect is followed with it as long as it stays there; any other
//! host gets the bare request, and a redirect from `https` to `http` is refused.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ureq::http::{HeaderValue, Request, Uri, header};

use super::error::{Failure, HubErrorKind};
use super::name::{RepoId, quote};
use super::options::HubOptions;
use super::progress::Progress;
use super::reply::{self, FileFacts, Question, Reply};
use crate::{Error, Result};

/// Redirects followed before giving up.
const MAX_REDIRECTS: usize = 10;

/// Hosts of one hub: a token for one of them is meant for all.
const HUB_HOSTS: [&str; 3] = ["huggingface.co", "www.huggingface.co", "hf.co"];

/// An `http` or `https` address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    text: String,
    https: bool,
    host: String,
    port: u16,
}

impl Address {
    fn parse(text: &str) -> Result<Self, String> {
        let text = text.split('#').next().unwrap_or_default();
        let uri: Uri = text
            .parse()
            .map_err(|_| format!("{text:?} is not an address"))?;
        let https = match uri.scheme_str().map(str::to_ascii_lowercase).as_deref() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(format!("{text:?} is neither http nor https")),
        };
        let authority = uri.authority().map_or("", |a| a.as_str());
        if authority.contains('@') {
            return Err(format!(
                "{:?} hides its host behind a user name",
                uri.host()
            ));
        }
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .ok_or_else(|| format!("{text:?} names no host"))?
            .to_ascii_lowercase();
        let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 });
        Ok(Address {
            text: text.to_owned(),
            https,
            host,
            port,
        })
    }

    /// Where a redirect from here to `location` leads.
    fn join(&self, location: &str) -> Result<Self, String> {
        let lower = location.get(..8).unwrap_or(location).to_ascii_lowercase();
        if lower.starts_with("http://") || lower.starts_with("https://") {
            return Address::parse(location);
        }
        let scheme = if self.https { "https" } else { "http" };
        if location.starts_with("//") {
            return Address::parse(&format!("{scheme}:{location}"));
        }
        let before_path = self.text.find("://").map_or(0, |at| at + 3);
        let host_end = self.text[before_path..]
            .find(['/', '?'])
            .map_or(self.text.len(), |at| before_path + at);
        if location.starts_with('/') {
            return Address::parse(&format!("{}{location}", &self.text[..host_end]));
        }
        Err(format!("{location:?} is not a complete address"))
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    fn same_origin(&self, other: &Address) -> bool {
        (self.https, &self.host, self.port) == (other.https, &other.host, other.port)
    }

    fn is_known_hub(&self) -> bool {
        self.https && self.port == 443 && HUB_HOSTS.contains(&self.host.as_str())
    }

    fn is_loopback(&self) -> bool {
        let host = self.host.trim_matches(['[', ']']);
        host == "localhost"
            || host
                .parse::<std::net::IpAddr>()
                .is_ok_and(|ip| ip.is_loopback())
    }
}

/// A file as the hub describes it, and where its bytes are right now.
#[derive(Debug, Clone)]
pub(super) struct RemoteFile {
    pub(super) path: String,
    pub(super) facts: FileFacts,
    pub(super) address: Address,
}

/// An answer with its body still to be read.
pub(super) struct Answer {
    pub(super) reply: Reply,
    pub(super) body: Box<dyn Read>,
    /// Whether it came from the hub itself rather than from its storage.
    pub(super) from_hub: bool,
}

/// The hub at one endpoint.
#[derive(Debug)]
pub(super) struct Client {
    agent: ureq::Agent,
    endpoint: Address,
    authorization: Option<HeaderValue>,
    pub(super) options: HubOptions,
}

impl Client {
    pub(super) fn new(options: HubOptions) -> Result<Self> {
        let text = options.endpoint.trim_end_matches('/');
        let endpoint = Address::parse(text)
            .map_err(|reason| Error::usage(format!("HF_ENDPOINT cannot be used: {reason}")))?;
        let authorization = match &options.token {
            None => None,
            Some(token) => {
                let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| {
                    Error::usage("the hub token holds characters that no token has; check HF_TOKEN and the token file")
                })?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let mut config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .https_only(endpoint.https)
            .user_agent(concat!("tileinfer/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_resolve(Some(options.head_timeout))
            .timeout_connect(Some(options.head_timeout))
            .timeout_per_write(Some(options.read_timeout))
            .max_idle_connections_per_host(options.workers.max(1))
            .proxy(options.proxy.clone().filter(|_| !endpoint.is_loopback()));
        if let Some(path) = &options.ca_bundle {
            config = config.tls_config(tls_with(path)?);
        }
        Ok(Client {
            agent: config.build().new_agent(),
            endpoint,
            authorization,
            options,
        })
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint.text
    }

    /// Address of a file: the revision is quoted as a whole, the path part by part.
    fn file_address(&self, repo: &RepoId, revision: &str, path: &str) -> Result<Address> {
        let text = format!(
            "{}/{repo}/resolve/{}/{}",
            self.endpoint.text,
            quote(revision, None),
            quote(path, Some(b'/'))
        );
        Address::parse(&text).map_err(Error::usage)
    }

    /// Asks once for the hub's description of a file, and where to get it.
    pub(super) fn describe(
        &self,
        repo: &RepoId,
        revision: &str,
        path: &str,
    ) -> Result<RemoteFile, Failure> {
        let question = Question {
            endpoint: self.endpoint(),
            repo: repo.as_str(),
            revision,
            path,
            token: self.authorization.is_some(),
        };
        let mut address = self.file_address(repo, revision, path)?;
        for _ in 0..=MAX_REDIRECTS {
            let (reply, _) = self.request("HEAD", &address, None, self.options.head_timeout)?;
            let Some(location) = reply.redirect() else {
                let facts = reply::file_facts(&reply, &question)?;
                return Ok(RemoteFile {
                    path: path.to_owned(),
                    facts,
                    address,
                });
            };
            let next = self.redirected(&address, location)?;
            if !self.is_hub(&next) && !next.is_known_hub() {
                // Storage: what we want to know stands on this very answer.
                let facts = reply::file_facts(&reply, &question)?;
                return Ok(RemoteFile {
                    path: path.to_owned(),
                    facts,
                    address: next,
                });
            }
            address = next;
        }
        Err(self.too_many_redirects(&question))
    }

    /// Gets a file, or from byte `range.start` on, or a part of it. The answer may be of any status but a redirect.
    pub(super) fn get(
        &self,
        repo: &RepoId,
        file: &RemoteFile,
        range: Option<(u64, Option<u64>)>,
    ) -> Result<Answer, Failure> {
        let mut address = file.address.clone();
        for _ in 0..=MAX_REDIRECTS {
            let (reply, body) = self.request("GET", &address, range, self.options.read_timeout)?;
            let Some(location) = reply.redirect() else {
                return Ok(Answer {
                    from_hub: self.is_hub(&address),
                    reply,
                    body,
                });
            };
            address = self.redirected(&address, location)?;
        }
        Err(self.too_many_redirects(&self.question(repo, file)))
    }

    pub(super) fn question<'a>(&'a self, repo: &'a RepoId, file: &'a RemoteFile) -> Question<'a> {
        Question {
            endpoint: self.endpoint(),
            repo: repo.as_str(),
            revision: &file.facts.commit,
            path: &file.path,
            token: self.authorization.is_some(),
        }
    }

    /// What a download's answer that is no success means.
    pub(super) fn refused(&self, repo: &RepoId, file: &RemoteFile, answer: &Answer) -> Failure {
        if answer.from_hub {
            return reply::refusal(&answer.reply, &self.question(repo, file));
        }
        let status = answer.reply.status;
        let error = HubErrorKind::Status(status).error(format!(
            "the storage at {} answers {status} for {} of {repo}; try again later",
            file.address.host(),
            file.path
        ));
        match status {
            // Signed addresses are short-lived; what stores answer to an old one differs.
            400 | 401 | 403 | 404 | 410 => Failure::Expired(error),
            408 | 429 | 500 | 502 | 503 | 504 => {
                Failure::Passing(error, answer.reply.retry_after())
            }
            _ => Failure::Final(error),
        }
    }

    /// Reads bytes `range` of a file into memory.
    pub(super) fn read_range(
        &self,
        repo: &RepoId,
        file: &RemoteFile,
        range: Range<u64>,
    ) -> Result<Vec<u8>, Failure> {
        let length = range.end.saturating_sub(range.start);
        if length == 0 {
            return Ok(Vec::new());
        }
        let mut answer = self.get(repo, file, Some((range.start, Some(range.end - 1))))?;
        let skip = match answer.reply.status {
            206 => match answer.reply.content_range() {
                Some((Some(start), _)) if start == range.start => 0,
                _ => {
                    return Err(Failure::Final(HubErrorKind::BadReply.error(format!(
                        "asked for bytes {}–{} of {}, {} sends others",
                        range.start,
                        range.end,
                        file.path,
                        file.address.host()
                    ))));
                }
            },
            // The range was ignored: what precedes it has to be read past.
            200 => range.start,
            _ => return Err(self.refused(repo, file, &answer)),
        };
        let short = |error: io::Error| {
            Failure::Passing(
                HubErrorKind::Unreachable.error(format!(
                    "the connection to {} broke while reading {}: {error}",
                    file.address.host(),
                    file.path
                )),
                None,
            )
        };
        io::copy(&mut (&mut answer.body).take(skip), &mut io::sink()).map_err(short)?;
        let mut bytes = Vec::new();
        (&mut answer.body)
            .take(length)
            .read_to_end(&mut bytes)
            .map_err(short)?;
        if bytes.len() as u64 != length {
            return Err(short(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(bytes)
    }

    /// Repeats `attempt` while its failures may pass, with growing waits. `attempt` gets its number and says in
    /// [`Failure::Passing`] when to try again; the count starts over when it sets `progressed`.
    pub(super) fn persist<T>(
        &self,
        what: &str,
        progress: &dyn Progress,
        stop: &AtomicBool,
        mut attempt: impl FnMut(&mut bool) -> Result<T, Failure>,
    ) -> Result<T> {
        let mut tried = 0;
        loop {
            let mut progressed = false;
            let (error, asked) = match attempt(&mut progressed) {
                Ok(value) => return Ok(value),
                Err(Failure::Passing(error, asked)) => (error, asked),
                Err(failure) => return Err(failure.into_error()),
            };
            tried = if progressed { 1 } else { tried + 1 };
            let wait = self.options.backoff * (1 << (tried - 1).min(3));
            let wait = wait.max(asked.unwrap_or_default());
            if tried >= self.options.tries.max(1) || wait > self.options.max_wait {
                return Err(error);
            }
            progress.note(&format!(
                "{what}: {error}. Trying again in {:.0} s ({} of {})",
                wait.as_secs_f64().ceil(),
                tried + 1,
                self.options.tries
            ));
            pause(wait, stop);
            if stop.load(Ordering::Relaxed) {
                return Err(error);
            }
        }
    }

    /// The one place from which a request leaves.
    fn request(
        &self,
        method: &str,
        address: &Address,
        range: Option<(u64, Option<u64>)>,
        timeout: Duration,
    ) -> Result<(Reply, Box<dyn Read>), Failure> {
        if self.options.offline {
            return Err(Failure::Final(HubErrorKind::Offline.error(
                "the network is needed and switched off (--offline, HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)",
            )));
        }
        let mut request = Request::builder().method(method).uri(&address.text);
        if let Some(value) = &self.authorization
            && self.is_hub(address)
        {
            request = request.header(header::AUTHORIZATION, value);
        }
        if let Some((start, end)) = range {
            let end = end.map(|end| end.to_string()).unwrap_or_default();
            request = request.header(header::RANGE, format!("bytes={start}-{end}"));
        }
        let request = request.body(()).map_err(|error| {
            Failure::Final(Error::usage(format!(
                "{} cannot be asked for: {error}",
                address.text
            )))
        })?;
        let request = self
            .agent
            .configure_request(request)
            .timeout_recv_response(Some(timeout))
            .timeout_per_read(Some(timeout))
            .build();
        let response = self
            .agent
            .run(request)
            .map_err(|error| no_answer(address, error))?;
        let (parts, body) = response.into_parts();
        let reply = Reply {
            status: parts.status.as_u16(),
            headers: parts
                .headers
                .iter()
                .map(|(name, value)| {
                    let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
                    (name.as_str().to_owned(), value)
                })
                .collect(),
        };
        Ok((reply, Box::new(body.into_reader())))
    }

    /// Whether an address belongs to the hub, so that the token may go there.
    fn is_hub(&self, address: &Address) -> bool {
        address.same_origin(&self.endpoint)
            || (address.is_known_hub() && self.endpoint.is_known_hub())
    }

    fn redirected(&self, from: &Address, location: &str) -> Result<Address, Failure> {
        let refuse = |reason: String| {
            Failure::Final(HubErrorKind::BadRedirect.error(format!(
                "{} redirects to a place that is not safe to follow: {reason}",
                from.host
            )))
        };
        let next = from.join(location).map_err(refuse)?;
        if from.https && !next.https {
            return Err(refuse(format!("{} is not encrypted", next.host)));
        }
        Ok(next)
    }

    fn too_many_redirects(&self, question: &Question) -> Failure {
        Failure::Final(HubErrorKind::BadRedirect.error(format!(
            "{} redirects in circles for {} of {}",
            question.endpoint, question.path, question.repo
        )))
    }
}

fn no_answer(address: &Address, error: ureq::Error) -> Failure {
    let host = format!("{}:{}", address.host, address.port);
    let reason = match error {
        ureq::Error::Timeout(which) => format!("no answer in time ({which:?})"),
        ureq::Error::HostNotFound => "there is no such host".to_owned(),
        ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::RequireHttpsOnly(_) => {
            return Failure::Final(
                HubErrorKind::BadRedirect.error(format!("{host} cannot be asked: {error}")),
            );
        }
        other => other.to_string(),
    };
    if reason.contains("certificate") {
        return Failure::Final(HubErrorKind::Unreachable.error(format!(
            "{host} shows a certificate that is not trusted ({reason}); if a proxy of your network reads along, set SSL_CERT_FILE to the PEM file of its authority"
        )));
    }
    Failure::Passing(
        HubErrorKind::Unreachable.error(format!(
            "cannot reach {host}: {reason}; check the network, the proxy and HF_ENDPOINT, or use --offline"
        )),
        None,
    )
}

fn tls_with(path: &std::path::Path) -> Result<ureq::tls::TlsConfig> {
    let pem = std::fs::read(path).map_err(|error| Error::io(path, error))?;
    let certificates: Vec<ureq::tls::Certificate<'static>> = ureq::tls::parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(ureq::tls::PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(Error::usage(format!(
            "{} holds no certificates; check REQUESTS_CA_BUNDLE and SSL_CERT_FILE",
            path.display()
        )));
    }
    Ok(ureq::tls::TlsConfig::builder()
        .root_certs(ureq::tls::RootCerts::new_with_certs(&certificates))
        .build())
}

/// Sleeps, unless `stop` is set meanwhile.
fn pause(wait: Duration, stop: &AtomicBool) {
    let start = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let left = wait.saturating_sub(start.elapsed());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Address {
        Address::parse(text).unwrap()
    }

    #[test]
    fn addresses() {
        let plain = address("https://Hub.example/a/b?c#d");
        assert_eq!(
            (plain.host(), plain.port, plain.https),
            ("hub.example", 443, true)
        );
        assert_eq!(address("http://[::1]:80/x").port, 80);
        for bad in [
            "",
            "/x",
            "ftp://a/b",
            "file:///etc/passwd",
            "https://",
            "https://a@b/",
            "https://hub:pw@evil/",
            "https://a b/",
        ] {
            assert!(Address::parse(bad).is_err(), "{bad}");
        }
        let base = address("https://hub.example:8443/org/name?x=1");
        for (location, expected) in [
            ("/y/z", "https://hub.example:8443/y/z"),
            ("//other/y", "https://other/y"),
            ("HTTPS://other/y", "HTTPS://other/y"),
        ] {
            assert_eq!(base.join(location).unwrap().text, expected);
        }
        for bad in ["y", "", "javascript:x", "file:///x", "https://user@other/"] {
            assert!(base.join(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn who_gets_the_token() {
        let client = |endpoint: &str| {
            let mut options = HubOptions::new("/nowhere");
            options.endpoint = endpoint.to_owned();
            Client::new(options).unwrap()
        };
        let cases = [
            ("https://huggingface.co", "https://huggingface.co/x", true),
            ("https://huggingface.co", "https://HF.co/x", true),
            ("https://huggingface.co", "http://huggingface.co/x", false),
            (
                "https://huggingface.co",
                "https://huggingface.co:444/x",
                false,
            ),
            (
                "https://huggingface.co",
                "https://huggingface.co.evil.example/x",
                false,
            ),
            (
                "https://huggingface.co",
                "https://cdn-lfs.huggingface.co/x",
                false,
            ),
            ("https://mirror.example", "https://huggingface.co/x", false),
            ("http://127.0.0.1:1000", "http://127.0.0.1:1000/x", true),
            ("http://127.0.0.1:1000", "http://127.0.0.1:1001/x", false),
        ];
        for (endpoint, target, expected) in cases {
            assert_eq!(
                client(endpoint).is_hub(&address(target)),
                expected,
                "{endpoint} {target}"
            );
        }
    }

    #[test]
    fn a_redirect_to_plain_http_is_refused() {
        let client = Client::new(HubOptions::new("/nowhere")).unwrap();
        let from = address("https://huggingface.co/x");
        assert!(client.redirected(&from, "http://huggingface.co/y").is_err());
        assert!(client.redirected(&from, "https://cdn.example/y").is_ok());
    }
}
