//! What a worker is asked to be. Plain data: flags, files and the environment are the binary's.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use towline_fabric::{ShmConfig, Telemetry, TransportChoice, UcxConfig};
use towline_wire::auth::ClusterKey;
use towline_wire::contract::Contract;
use towline_wire::digest::DigestMode;
use towline_wire::receipt::TransportKind;

use crate::http::{HttpLimits, OnKvFailure, Role};
use crate::model::STEP_TOKENS_DEFAULT;
use crate::pool::{BlockOrder, PrefixCache};

/// Which wire carries KV.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// The best that both workers have.
    #[default]
    Auto,
    /// Shared memory of one host, or none.
    Shm,
    /// TCP, or none.
    Tcp,
    /// UCX, opened so, or none.
    Ucx(UcxConfig),
}

impl Transport {
    pub(super) fn choice(&self) -> TransportChoice {
        match self {
            Self::Auto => TransportChoice::Auto,
            Self::Shm => TransportChoice::Only(TransportKind::Shm),
            Self::Tcp => TransportChoice::Only(TransportKind::Tcp),
            Self::Ucx(_) => TransportChoice::Only(TransportKind::Ucx),
        }
    }
}

/// A worker's settings; [`WorkerConfig::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// What it does in the deployment. Default: all of it.
    pub role: Role,
    /// The GGUF file.
    pub model: PathBuf,
    /// The model's name in requests; the file's name without its ending unless given.
    pub model_name: Option<String>,
    /// Where HTTP is served; port 0 takes a free one. Default 127.0.0.1:0.
    pub listen: SocketAddr,
    /// Where other workers reach this one's KV; port 0 takes a free one. Default 127.0.0.1:0.
    pub kv_listen: SocketAddr,
    /// `host:port` that they dial when it is not the address listened on.
    pub kv_advertise: Option<String>,
    /// This worker's name in receipts and logs; the role with random digits unless given.
    pub name: Option<String>,
    /// Which wire KV may take, offered and used.
    pub transport: Transport,
    /// Where workers of one host find each other's memory; off when `transport` is tcp or ucx.
    pub shm: ShmConfig,
    /// Threads that copy KV out of shared memory, 1 to 64. Default 2.
    pub copy_threads: usize,
    /// TCP streams to a peer, and threads that serve them, 1 to 16. Default 2.
    pub tcp_streams: usize,
    /// What the path to a prefill worker must be. Default: anything.
    pub contract: Contract,
    /// The cluster's secret, equal on all workers.
    pub key: ClusterKey,
    /// The deployment's name: KV of another is refused, even under the same key. Default `default`.
    pub deployment: String,
    /// Threads that compute, 1 to 256. Default: all cores.
    pub threads: usize,
    /// Memory for KV. Default 1 GiB: 46,000 tokens of SmolLM2-135M.
    pub kv_cache_bytes: u64,
    /// Tokens in a KV block, equal on all workers. Default 16.
    pub block_tokens: u32,
    /// Most sequences computed together. Default 8.
    pub max_batch: usize,
    /// Most tokens of a step, prompts and decoding together.
    pub step_tokens: usize,
    /// Whether KV of past prompts is kept for prompts that begin alike. Default on.
    pub prefix_cache: PrefixCache,
    /// In which order free KV blocks are handed out. Answers don't depend on it.
    pub block_order: BlockOrder,
    /// What becomes of a request whose KV could not be pulled. Default: it fails.
    pub on_kv_failure: OnKvFailure,
    /// Which blocks are digested when lent, and so checked when pulled. Default: all.
    pub digest: DigestMode,
    /// How long lent KV waits for its decode worker. Default 30 s, as vLLM's.
    pub lease: Duration,
    /// How long a pull may take, connecting included. Default 10 s.
    pub pull_deadline: Duration,
    /// Who is told what each transfer of KV came to. Default: nobody.
    pub telemetry: Option<Arc<dyn Telemetry>>,
    /// Temperature of requests that give none. Default 1, as OpenAI's; small models talk better sense near 0.2.
    pub temperature: f32,
    /// `top_p` of requests that give none. Default 1.
    pub top_p: f32,
    /// Bounds of the HTTP front.
    pub limits: HttpLimits,
}

impl WorkerConfig {
    /// The defaults, for a model and a cluster key.
    pub fn new(model: impl Into<PathBuf>, key: ClusterKey) -> Self {
        let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self {
            role: Role::default(),
            model: model.into(),
            model_name: None,
            listen: anywhere,
            kv_listen: anywhere,
            kv_advertise: None,
            name: None,
            transport: Transport::default(),
            shm: ShmConfig::default(),
            copy_threads: 2,
            tcp_streams: 2,
            contract: Contract::default(),
            key,
            deployment: "default".into(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            kv_cache_bytes: 1 << 30,
            block_tokens: 16,
            max_batch: 8,
            step_tokens: STEP_TOKENS_DEFAULT,
            prefix_cache: PrefixCache::default(),
            block_order: BlockOrder::default(),
            on_kv_failure: OnKvFailure::default(),
            digest: DigestMode::default(),
            lease: Duration::from_secs(30),
            pull_deadline: Duration::from_secs(10),
            telemetry: None,
            temperature: 1.0,
            top_p: 1.0,
            limits: HttpLimits::default(),
        }
    }

    /// The shared memory that is offered.
    pub(super) fn shm(&self) -> ShmConfig {
        match self.transport {
            Transport::Auto | Transport::Shm => self.shm.clone(),
            Transport::Tcp | Transport::Ucx(_) => ShmConfig::Off,
        }
    }

    /// UCX, if it is the one.
    pub(super) fn ucx(&self) -> Option<UcxConfig> {
        if let Transport::Ucx(config) = &self.transport { Some(config.clone()) } else { None }
    }
}
