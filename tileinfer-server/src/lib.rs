//! An HTTP server over the engine that speaks OpenAI's API, and Anthropic's messages. It knows requests, texts and events; tensors, pages and
//! devices it does not know, and no wire type leaves it.
//!
//! [`serve`] is all a program needs; [`Server::app`] is the same without a socket, for tests and for those who
//! have a server of their own.

mod anthropic;
mod answers;
mod calls;
mod chat;
mod completions;
mod error;
mod fields;
mod grammar;
mod logprobs;
mod messages;
mod metrics;
mod output;
mod params;
mod routes;
mod state;
mod stream;
mod tools;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

pub use state::{Model, ServeOptions};

use state::State;

/// A server, with or without its model yet. Clones are the same server.
#[derive(Clone)]
pub struct Server {
    state: Arc<State>,
}

impl Server {
    /// A server whose model is still to come: until then it says that it is loading.
    pub fn new(options: ServeOptions) -> Self {
        Server {
            state: Arc::new(State::new(options)),
        }
    }

    /// Hands it the model. The first one stays.
    pub fn load(&self, model: Model) {
        self.state.load(model);
    }

    /// Its routes.
    pub fn app(&self) -> Router {
        routes::router(&self.state)
    }

    /// Serves on `listener` until `stop` is done; then takes no new requests, lets those that run go on for
    /// [`ServeOptions::grace`] at most, and shuts the engine down.
    ///
    /// # Errors
    /// What the operating system says about the socket.
    pub async fn serve(
        self,
        listener: TcpListener,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> std::io::Result<()> {
        let listener = listener.tap_io(|connection| {
            // A token must not wait for the next one. Where it cannot be set it only costs time.
            let _ = connection.set_nodelay(true);
        });
        let (told, stopping) = oneshot::channel();
        let state = self.state.clone();
        let stop = async move {
            stop.await;
            state.draining.store(true, Relaxed);
            let _ = told.send(());
        };
        let grace = self.state.options.grace;
        let deadline = async move {
            match stopping.await {
                Ok(()) => tokio::time::sleep(grace).await,
                Err(_) => std::future::pending().await,
            }
        };
        let result = tokio::select! {
            result = axum::serve(listener, self.app()).with_graceful_shutdown(stop) => result,
            () = deadline => Ok(()),
        };
        if let Some(loaded) = self.state.loaded() {
            let engine = loaded.model.engine.clone();
            // It waits for a step to end.
            let _ = tokio::task::spawn_blocking(move || engine.shut_down()).await;
        }
        result
    }
}

/// Serves a model until the process is told to stop (Ctrl-C or SIGTERM). The port answers at once, so that
/// health checks see it loading; `load` runs on a thread of its own, and `on_ready` is told the address once
/// requests can come.
///
/// # Errors
/// That of `load`; [`tileinfer::Error::Device`] if the address cannot be listened on.
pub fn serve<E>(
    options: ServeOptions,
    load: impl FnOnce() -> Result<Model, E> + Send + 'static,
    on_ready: impl FnOnce(SocketAddr) + Send + 'static,
) -> Result<(), E>
where
    E: From<tileinfer::Error> + Send + 'static,
{
    let refused = |what: String| {
        move |error: std::io::Error| E::from(tileinfer::Error::Device(format!("{what}: {error}")))
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(refused("no threads for the server".to_owned()))?;
    runtime.block_on(async move {
        let wanted = options.address;
        let listener = TcpListener::bind(wanted).await.map_err(refused(format!("cannot listen on {wanted}")))?;
        let address = listener.local_addr().map_err(refused(format!("cannot listen on {wanted}")))?;
        let server = Server::new(options);
        let (failed, failure) = oneshot::channel();
        let loading = server.clone();
        let thread = std::thread::Builder::new().name("load".to_owned()).spawn(move || match load() {
            Ok(model) => {
                loading.load(model);
                on_ready(address);
            }
            // If the server has stopped there is nobody to tell.
            Err(error) => drop(failed.send(error)),
        });
        thread.map_err(refused("no thread to load the model".to_owned()))?;
        let failure = async {
            match failure.await {
                Ok(error) => error,
                // Loaded: it never fails.
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            served = server.serve(listener, told_to_stop()) => served.map_err(refused(format!("serving on {address}"))),
            error = failure => Err(error),
        }
    })
}

/// Done when the process is told to stop.
async fn told_to_stop() {
    let interrupted = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    #[cfg(unix)]
    let terminated = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    #[cfg(not(unix))]
    let terminated = std::future::pending::<()>();
    tokio::select! {
        () = interrupted => {}
        () = terminated => {}
    }
}
