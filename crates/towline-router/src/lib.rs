//! The OpenAI-compatible front of a disaggregated deployment: a request goes in once, two workers answer it.
//!
//! **What it is.** A library: [`Router::new`] takes a [`Config`], [`Router::serve`] answers on a listener until it
//! is told to stop, [`Router::app`] is the same service for a host that brings its own. A request is computed by a
//! *prefill* worker, whose answer names the KV cache it keeps, and continued by a *decode* worker, which fetches
//! that cache and writes the tokens; the client sees one ordinary answer.
//!
//! **What it may not do.** No printing, exiting or flags (the binary's). It never looks at the KV itself, never
//! lets a client's transfer parameters through to a worker, never shows a worker's address to a client, never
//! keeps a token back. Choosing is a pure function over a view ([`choose`]); clocks and sockets are the shell's.
//!
//! **Words.**
//! - *worker*: an engine behind one URL; its *role* is prefill, decode or aggregated (both in one).
//! - *leg*: one request from the router to one worker; the *serial plan* is a prefill leg, then a decode leg.
//! - *route*: the workers chosen for a request; *view*: what the choice may look at.
//! - *cool-down*: the time a worker that failed repeatedly is left alone.
//! - *TTFT*: from the request's arrival here to the first byte of the answer's body.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use towline_router::{Config, Router};
//!
//! let config = Config {
//!     prefill: vec!["http://10.0.0.7:8000".parse()?],
//!     decode: vec!["http://10.0.0.8:8000".parse()?],
//!     ..Config::default()
//! };
//! let listener = towline_router::bind("127.0.0.1:8080".parse()?)?;
//! let shutdown = tokio_util::sync::CancellationToken::new();
//! Router::new(config).serve(listener, shutdown).await?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod admission;
mod api;
pub mod choose;
pub mod config;
mod error;
mod fields;
mod headers;
mod health;
mod legs;
mod metrics;
mod models;
mod plan;
mod pool;
mod probe;
mod relay;
mod request;
mod serve;
mod sse;
mod stall;

use std::sync::Arc;

pub use config::{Config, Limits, WorkerUrl, WorkerUrlError};
pub use serve::{ServeError, bind};

use admission::Admission;
use legs::Legs;
use metrics::Metrics;
use pool::Pool;

/// The router: cheap to clone, every clone is the same deployment.
#[derive(Clone, Debug)]
pub struct Router {
    state: Arc<State>,
}

/// What every request shares.
#[derive(Debug)]
struct State {
    config: Config,
    pool: Arc<Pool>,
    legs: Legs,
    metrics: Arc<Metrics>,
    admission: Admission,
    listed: tokio::sync::Mutex<Option<std::time::Instant>>,
}

impl Router {
    /// A router over the workers of `config`. Opens nothing: the first socket is opened by the first request or,
    /// under [`Router::serve`], by the first probe.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let metrics = Arc::new(Metrics::new());
        let pool = Arc::new(Pool::new(&config));
        let legs = Legs::new(&config.limits);
        let admission = Admission::new(&config.limits);
        let listed = tokio::sync::Mutex::new(None);
        Self { state: Arc::new(State { config, pool, legs, metrics, admission, listed }) }
    }

    /// The service itself, for a host with its own server. Without [`Router::serve`] nobody probes the workers:
    /// their health is then known from requests alone.
    pub fn app(&self) -> axum::Router {
        api::app(Arc::clone(&self.state))
    }
}
