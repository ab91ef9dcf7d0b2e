//! What all requests share: the options, the model once it is loaded, and the counts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tileinfer::chat::ChatTemplate;
use tileinfer::engine::{Engine, EngineState};
use tileinfer::sampling::{GenerationDefaults, random_seed};
use tileinfer::tokenizer::Tokenizer;

use crate::error::{ApiError, ApiResult};
use crate::grammar::Grammars;
use crate::metrics::ServerMetrics;
use crate::output::Style;

/// How a server behaves.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Where it listens.
    pub address: std::net::SocketAddr,
    /// The key that clients have to send; none: no key is asked for.
    pub api_key: Option<String>,
    /// Origins whose pages may use it from a browser: `https://host`, or `*`. None: only its own page.
    pub cors_origins: Vec<String>,
    /// Bytes of a request at most.
    pub max_body_bytes: usize,
    /// Messages of a conversation at most.
    pub max_messages: usize,
    /// Bytes of a JSON schema, and of all tools together, at most.
    pub max_schema_bytes: usize,
    /// Answers to one request at most: `n` times the prompts.
    pub max_choices: usize,
    /// How often a stream that has nothing to say sends a sign of life.
    pub ping: Duration,
    /// How long requests may run on once it is told to stop.
    pub grace: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        ServeOptions {
            address: ([127, 0, 0, 1], 8080).into(),
            api_key: None,
            cors_origins: Vec::new(),
            max_body_bytes: 16 << 20,
            max_messages: 4096,
            max_schema_bytes: 256 << 10,
            max_choices: 64,
            ping: Duration::from_secs(10),
            grace: Duration::from_secs(30),
        }
    }
}

/// A model that is served.
#[derive(Clone)]
pub struct Model {
    /// What requests call it.
    pub name: String,
    /// What runs it.
    pub engine: Engine,
    /// Its tokenizer, which the engine has too.
    pub tokenizer: Tokenizer,
    /// Its chat template; without one there are no chat completions.
    pub template: Option<ChatTemplate>,
    /// What holds where a request says nothing.
    pub defaults: GenerationDefaults,
}

/// A model and what is found out about it once.
pub(crate) struct Loaded {
    pub(crate) model: Model,
    pub(crate) style: Style,
    /// Seconds since 1970 when it was loaded.
    pub(crate) created: u64,
    grammars: OnceLock<Result<Grammars, String>>,
}

impl Loaded {
    /// What turns grammars into masks, made when first asked for.
    pub(crate) fn grammars(&self) -> ApiResult<&Grammars> {
        let make = || Grammars::new(&self.model.tokenizer, &self.model.defaults.stop_ids);
        let grammars = self.grammars.get_or_init(make).as_ref();
        grammars.map_err(|reason| {
            ApiError::internal(format!(
                "this model's tokens cannot follow a grammar: {reason}"
            ))
        })
    }
}

/// See the module's first line.
pub(crate) struct State {
    pub(crate) options: ServeOptions,
    pub(crate) metrics: Arc<ServerMetrics>,
    pub(crate) draining: AtomicBool,
    loaded: OnceLock<Arc<Loaded>>,
    serial: AtomicU64,
    salt: u64,
}

impl State {
    pub(crate) fn new(options: ServeOptions) -> Self {
        State {
            options,
            metrics: Arc::default(),
            draining: AtomicBool::new(false),
            loaded: OnceLock::new(),
            serial: AtomicU64::new(0),
            // Only names depend on it; without randomness they still differ from each other.
            salt: random_seed().unwrap_or_else(|_| now_nanos()),
        }
    }

    pub(crate) fn load(&self, model: Model) {
        let style = Style::of(model.template.as_ref());
        let loaded = Loaded {
            model,
            style,
            created: now_nanos() / 1_000_000_000,
            grammars: OnceLock::new(),
        };
        // A server has one model; the first stays.
        let _ = self.loaded.set(Arc::new(loaded));
    }

    /// The model, if there is one.
    pub(crate) fn loaded(&self) -> Option<&Arc<Loaded>> {
        self.loaded.get()
    }

    /// The model, ready to answer.
    pub(crate) fn ready(&self) -> ApiResult<Arc<Loaded>> {
        let loaded = self
            .loaded
            .get()
            .ok_or_else(|| ApiError::unavailable("the model is still loading"))?;
        if self.draining.load(Relaxed) {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        match loaded.model.engine.state() {
            EngineState::Running => Ok(loaded.clone()),
            EngineState::Stopped => Err(ApiError::unavailable("the engine has stopped")),
            EngineState::Dead(reason) => Err(ApiError::unavailable(format!(
                "the engine is dead: {reason}"
            ))),
        }
    }

    /// A name that no other thing has: `digits` characters of base 36.
    pub(crate) fn unique(&self, digits: usize) -> String {
        // A bijection of the count, so that names differ, and look it.
        let mut value =
            (self.serial.fetch_add(1, Relaxed) ^ self.salt).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        value ^= value >> 32;
        let mut name = String::with_capacity(digits);
        for _ in 0..digits {
            name.extend(char::from_digit((value % 36) as u32, 36));
            value = (value / 36) ^ value.rotate_right(23);
        }
        name
    }
}

/// Nanoseconds since 1970.
pub(crate) fn now_nanos() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}
