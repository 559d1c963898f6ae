//! What every request sees: the model, the engine, the handoff, the bounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::stream::BoxStream;
use tokio::sync::Semaphore;

use super::kv::{KvHandoff, OnKvFailure};
use super::request::{Served, Text};
use crate::engine::{Engine, EngineStats, Event, Job, SubmitError};
use crate::metrics::Metrics;
use crate::pool::{KvPool, PoolStats};

/// What a worker does in a deployment. Plain requests are served by every role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Computes prompts and lends their KV.
    Prefill,
    /// Pulls KV and generates.
    Decode,
    /// Does all of it alone.
    #[default]
    Aggregated,
}

impl Role {
    /// The word in flags and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
        }
    }

    /// The role of that word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Prefill, Self::Decode, Self::Aggregated].into_iter().find(|role| role.as_str() == word)
    }
}

/// A job's events; dropping it cancels the job.
pub type Events = BoxStream<'static, Event>;

/// What the front needs of the engine; a trait so that tests can script what it says.
pub trait Generate: Send + Sync {
    /// Takes a job.
    ///
    /// # Errors
    /// [`SubmitError`]: nothing runs.
    fn submit(&self, job: Job) -> Result<Events, SubmitError>;
    /// Whether it takes jobs at all; once it does not, it never will again.
    fn is_running(&self) -> bool;
    /// Counters, for metrics.
    fn stats(&self) -> EngineStats;
    /// KV blocks in each state, for metrics.
    fn blocks(&self) -> PoolStats;
}

/// The engine with its pool, as a [`Generate`].
pub struct EngineWithPool {
    /// The engine.
    pub engine: Engine,
    /// Its pool.
    pub pool: KvPool,
}

impl Generate for EngineWithPool {
    fn submit(&self, job: Job) -> Result<Events, SubmitError> {
        let handle = self.engine.submit(job)?;
        let events = futures_util::stream::unfold(handle, |mut handle| async move {
            handle.next().await.map(|event| (event, handle))
        });
        Ok(Box::pin(events))
    }

    fn is_running(&self) -> bool {
        self.engine.is_running()
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    fn blocks(&self) -> PoolStats {
        self.pool.stats()
    }
}

/// Bounds of the front. Each has a reason; none is "enough for everybody".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Bytes of a body. Default 16 MiB: a million tokens of text as token lists.
    pub body_bytes: usize,
    /// Requests under way, waiting ones included. Default 256: more only wait longer, and each may hold a body.
    pub requests: usize,
    /// Connections. Default 1024: a file and some 20 KiB each.
    pub connections: usize,
    /// Header fields of a request. Default 64: proxies add a dozen.
    pub headers: usize,
    /// Bytes of a request's head. Default 64 KiB.
    pub head_bytes: usize,
    /// Time for a request's head, and the longest a connection may idle. Default 60 s: longer than routers poll.
    pub head_timeout: Duration,
    /// Time for a request's body. Default 30 s: 16 MiB over 5 Mbit/s.
    pub body_timeout: Duration,
    /// How long requests under way may go on after the worker was told to stop. Default 10 s.
    pub drain: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            body_bytes: 16 << 20,
            requests: 256,
            connections: 1024,
            headers: 64,
            head_bytes: 64 << 10,
            head_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(30),
            drain: Duration::from_secs(10),
        }
    }
}

/// What a [`Front`] is made of.
pub struct FrontParts {
    /// The model.
    pub served: Served,
    /// The role.
    pub role: Role,
    /// Its tokenizer and template.
    pub text: Arc<dyn Text>,
    /// The engine.
    pub engine: Arc<dyn Generate>,
    /// The handoff; without one, only plain requests are served.
    pub handoff: Option<Arc<dyn KvHandoff>>,
    /// What becomes of a request whose KV could not be pulled.
    pub on_kv_failure: OnKvFailure,
    /// Where to count.
    pub metrics: Arc<Metrics>,
    /// Bounds.
    pub limits: HttpLimits,
}

/// The state behind the endpoints.
pub struct Front {
    parts: FrontParts,
    permits: Arc<Semaphore>,
    draining: AtomicBool,
    created: u64,
}

impl Front {
    /// A front that is ready.
    pub fn new(parts: FrontParts) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(parts.limits.requests.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self { parts, permits, draining: AtomicBool::new(false), created: unix_now() })
    }

    /// From now on new requests are refused with 503 and `/ready` says no.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether [`Front::drain`] was called.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// The bounds.
    pub fn limits(&self) -> &HttpLimits {
        &self.parts.limits
    }

    /// The counters.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.parts.metrics
    }

    /// The model's name in requests.
    pub fn model_name(&self) -> &str {
        &self.parts.served.name
    }

    /// When the model was loaded, in seconds since 1970.
    pub(super) fn created(&self) -> u64 {
        self.created
    }

    pub(super) fn served(&self) -> &Served {
        &self.parts.served
    }

    pub(super) fn role(&self) -> Role {
        self.parts.role
    }

    pub(super) fn text(&self) -> &dyn Text {
        &*self.parts.text
    }

    pub(super) fn engine(&self) -> &dyn Generate {
        &*self.parts.engine
    }

    pub(super) fn handoff(&self) -> Option<&dyn KvHandoff> {
        self.parts.handoff.as_deref()
    }

    pub(super) fn on_kv_failure(&self) -> OnKvFailure {
        self.parts.on_kv_failure
    }

    pub(super) fn permits(&self) -> &Arc<Semaphore> {
        &self.permits
    }
}

/// Seconds since 1970; zero on a clock set before it.
pub(super) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
