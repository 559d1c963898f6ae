//! A whole worker: model, KV memory, engine, handoff and HTTP front, started in order and stopped in order.
//!
//! **Order.** Ports first, so that a taken one is known before a model is loaded for minutes. Then weights, KV memory,
//! engine, handoff. Stopping goes the other way: no new requests, a bounded time for those under way, the engine, the
//! leases.
//!
//! [`Worker::start`] blocks (it reads files and reserves memory); [`Worker::run`] is async and needs a tokio runtime with
//! I/O and time.

mod config;
mod error;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio_util::sync::CancellationToken;
use towline_fabric::{AgentConfig, Limits, Memory, MemoryOptions, Pages};
use towline_wire::card::Fingerprint;
use towline_wire::id::{AgentName, EngineId};
use towline_wire::kv_params::RemoteKv;

pub use crate::http::{HttpLimits, OnKvFailure, Role};
pub use config::{Transport, WorkerConfig};
pub use error::{ServeError, StartError};

use crate::engine::{Engine, EngineConfig, FinishedKv};
use crate::handoff::{GrantError, Handoff, HandoffConfig};
use crate::http::{
    EngineWithPool, Front, FrontParts, HandoffCounts, KvHandoff, ModelText, Pull, Served, router, serve,
};
use crate::metrics::Metrics;
use crate::model::{CacheError, KvCache, LoadOptions, Model};
use crate::pool::{KvPool, PoolConfig};

/// How prefix keys are made; part of the fingerprint, because workers that share KV find it by key.
const PREFIX_HASH: &str = "blake3-keyed-128 v1";
/// Jobs that wait in the engine. The front's bound on requests is the one that callers meet.
const QUEUE_MAX: usize = 4096;

/// How far the start has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done, for a person.
    pub step: &'static str,
    /// Parts done.
    pub done: u64,
    /// Parts in all.
    pub total: u64,
}

/// A worker that is ready to serve.
pub struct Worker {
    listener: TcpListener,
    address: SocketAddr,
    front: Arc<Front>,
    engine: Arc<EngineWithPool>,
    handoff: Option<Arc<Handoff>>,
}

impl Worker {
    /// Starts everything but the serving of HTTP. Blocks; `progress` is told how far it is.
    ///
    /// # Errors
    /// [`StartError`]; nothing keeps running then.
    pub fn start(config: WorkerConfig, progress: impl Fn(Progress)) -> Result<Self, StartError> {
        let listener = bind(config.listen)?;
        let address = listener.local_addr().map_err(|source| listen_error(config.listen, source))?;
        let model = load(&config, &progress)?;
        progress(Progress { step: "reserving KV memory", done: 0, total: 1 });
        let fingerprint = fingerprint(&model, config.block_tokens);
        let pool = pool(&config, &model, &fingerprint)?;
        let text = Arc::new(ModelText::new(&model));
        let served = served(&config, &model, &pool);
        let bounds = EngineConfig {
            step_tokens: config.step_tokens,
            batch_max: config.max_batch,
            queue_max: QUEUE_MAX,
        };
        let mut metrics = Metrics::new();
        metrics.kv_pages(pool.memory().page_bytes());
        let engine = Engine::start(model, pool.clone(), bounds)?;
        let engine = Arc::new(EngineWithPool { engine, pool: pool.clone() });
        let handoff = match config.role {
            Role::Aggregated => None,
            Role::Prefill | Role::Decode => Some(Arc::new(handoff(&config, pool, fingerprint)?)),
        };
        let front = Front::new(FrontParts {
            served,
            role: config.role,
            text,
            engine: Arc::clone(&engine) as Arc<_>,
            handoff: handoff.clone().map(|handoff| handoff as Arc<dyn KvHandoff>),
            on_kv_failure: config.on_kv_failure,
            metrics: Arc::new(metrics),
            limits: config.limits,
        });
        progress(Progress { step: "ready", done: 1, total: 1 });
        Ok(Self { listener, address, front, engine, handoff })
    }

    /// Where HTTP is served, with the port that was taken.
    pub fn http_addr(&self) -> SocketAddr {
        self.address
    }

    /// `host:port` that other workers dial for KV; `None` for an aggregated worker, which has no KV port.
    pub fn kv_address(&self) -> Option<String> {
        self.handoff.as_ref().map(|handoff| handoff.address().to_owned())
    }

    /// The model's name in requests.
    pub fn model_name(&self) -> &str {
        self.front.model_name()
    }

    /// Serves until `stop`, then lets requests under way finish for at most [`HttpLimits::drain`], and ends everything.
    ///
    /// # Errors
    /// [`ServeError`] when serving can't begin.
    pub async fn run(self, stop: CancellationToken) -> Result<(), ServeError> {
        let Self { listener, address, front, engine, handoff } = self;
        let listener = tokio::net::TcpListener::from_std(listener)
            .map_err(|source| ServeError::Listen { address, source })?;
        let serving = serve(listener, router(Arc::clone(&front)), front.limits().clone(), stop.clone());
        let draining = async {
            stop.cancelled().await;
            front.drain();
        };
        let (cut, ()) = tokio::join!(serving, draining);
        if cut > 0 {
            tracing::warn!(
                connections = cut,
                "connections were cut: their requests took longer than the drain time"
            );
        }
        drop(front);
        // Both wait for threads: the engine for its step, the handoff for its lease thread.
        let end = tokio::task::spawn_blocking(move || {
            engine.engine.shutdown();
            drop(handoff);
        });
        // Should it have panicked, what it was to end has ended.
        _ = end.await;
        Ok(())
    }
}

fn bind(address: SocketAddr) -> Result<TcpListener, StartError> {
    let bound = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    bound.map_err(|source| listen_error(address, source))
}

fn listen_error(address: SocketAddr, source: std::io::Error) -> StartError {
    StartError::Listen { address, source }
}

fn load(config: &WorkerConfig, progress: &impl Fn(Progress)) -> Result<Model, StartError> {
    let tell = |at: crate::model::Progress<'_>| {
        progress(Progress { step: "loading the model", done: at.done as u64, total: at.total as u64 });
    };
    let options = LoadOptions {
        threads: config.threads,
        step_tokens: config.step_tokens,
        progress: Some(&tell),
        ..LoadOptions::default()
    };
    Ok(Model::load(&config.model, &options)?)
}

/// What another worker's KV must equal to be used here.
fn fingerprint(model: &Model, block_tokens: u32) -> Fingerprint {
    let ours = model.fingerprint();
    Fingerprint {
        weights: ours.weights,
        architecture: ours.architecture,
        rope: ours.rope,
        cache_dtype: ours.cache_dtype,
        layout: model.layout(block_tokens).describe(),
        prefix_hash: PREFIX_HASH.into(),
    }
}

fn pool(config: &WorkerConfig, model: &Model, fingerprint: &Fingerprint) -> Result<KvPool, StartError> {
    let layout = model.layout(config.block_tokens);
    layout.validate().map_err(|error| CacheError::Layout { what: error.to_string() })?;
    let block_bytes: u64 = layout.groups.iter().map(|group| group.block_bytes()).sum();
    let blocks = config.kv_cache_bytes / block_bytes.max(1);
    if blocks < 2 {
        return Err(StartError::KvMemory { bytes: config.kv_cache_bytes, block_bytes });
    }
    let options = MemoryOptions { pages: Pages::HugeIfGranted, ..MemoryOptions::default() };
    let memory = Memory::allocate_with("towline-kv", blocks * block_bytes, options)?;
    tracing::info!(
        target: "kv_memory",
        bytes = memory.len(),
        page_bytes = memory.page_bytes(),
        why = memory.why_normal_pages(),
        "KV memory reserved"
    );
    let settings = PoolConfig {
        prefix_cache: config.prefix_cache,
        order: config.block_order,
        fingerprint: fingerprint.describe(),
    };
    Ok(KvPool::new(KvCache::new(Arc::new(memory), &layout)?, settings))
}

fn served(config: &WorkerConfig, model: &Model, pool: &KvPool) -> Served {
    let stem = config.model.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let name = config.model_name.clone().or(stem);
    let room = pool.stats().total.saturating_mul(pool.block_tokens());
    Served {
        name: name.unwrap_or_else(|| "model".into()),
        // What the KV memory can't hold, no request may ask for.
        context: model.config().context.min(room),
        temperature: config.temperature,
        top_p: config.top_p,
    }
}

fn handoff(config: &WorkerConfig, pool: KvPool, fingerprint: Fingerprint) -> Result<Handoff, StartError> {
    let mut engine = [0; 16];
    getrandom::fill(&mut engine).map_err(|error| StartError::Random { detail: error.to_string() })?;
    let engine = EngineId::from_bytes(engine);
    let name = match &config.name {
        Some(name) => AgentName::new(name.as_str())?,
        None => AgentName::new(format!("{}-{}", config.role.as_str(), short(&engine)))?,
    };
    let agent = AgentConfig {
        name,
        engine,
        key: config.key.clone(),
        listen: config.kv_listen,
        advertise: config.kv_advertise.clone(),
        shm: config.shm(),
        tcp: matches!(config.transport, Transport::Auto | Transport::Tcp),
        fingerprint,
        copy_threads: config.copy_threads,
        tcp_streams: config.tcp_streams,
        limits: Limits::default(),
        ucx: config.ucx(),
        telemetry: config.telemetry.clone(),
    };
    let settings = HandoffConfig {
        agent,
        transport: config.transport.choice(),
        contract: config.contract.clone(),
        audience: config.deployment.clone(),
        lease_ttl: config.lease,
        pull_deadline: config.pull_deadline,
        digest: config.digest,
    };
    Ok(Handoff::start(settings, pool)?)
}

/// The beginning of an engine's id: enough to tell workers apart in a log.
fn short(engine: &EngineId) -> String {
    engine.to_string().chars().take(8).collect()
}

impl KvHandoff for Handoff {
    fn grant(
        &self,
        request_id: &str,
        prompt: &[u32],
        cached: usize,
        kv: FinishedKv,
    ) -> Result<RemoteKv, GrantError> {
        Self::grant(self, request_id, prompt, cached, kv)
    }

    fn pull<'a>(&'a self, remote: &'a RemoteKv, prompt: &'a [u32], salt: &'a str) -> Pull<'a> {
        Box::pin(Self::pull(self, remote, prompt, salt))
    }

    fn counts(&self) -> HandoffCounts {
        let leases = self.lease_stats();
        HandoffCounts {
            leases_held: self.leases_held(),
            leases_released: leases.released.load(Ordering::Relaxed),
            leases_expired: leases.expired.load(Ordering::Relaxed),
            leases_revoked: leases.revoked.load(Ordering::Relaxed),
            agent: self.agent().stats(),
        }
    }
}
