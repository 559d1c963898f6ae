//! Prefill to decode in one process, over real agents: the same answer, the same proof, and every way to fail.
//!
//! A [`Side`] is a worker without its HTTP: an engine on a tiny model, its pool, its agent. Two of them, a prompt, and
//! `kv_transfer_params` carried by hand are a whole handoff.

mod faults;
pub(crate) mod gate;
mod parts;
mod proof;
mod same_answer;

use std::sync::Arc;
use std::time::Duration;

use towline_fabric::{AgentConfig, Limits, Memory, ShmConfig, TransportChoice};
use towline_wire::auth::ClusterKey;
use towline_wire::card::Fingerprint;
use towline_wire::contract::Contract;
use towline_wire::digest::DigestMode;
use towline_wire::id::{AgentName, EngineId};
use towline_wire::kv_params::RemoteKv;
use towline_wire::receipt::TransportKind;
use towline_worker::engine::{Engine, EngineConfig, Event, Finished, Forward, Job, Start};
use towline_worker::handoff::{Handoff, HandoffConfig, PullError, Pulled};
use towline_worker::model::{KvCache, LoadOptions, Model};
use towline_worker::pool::{BlockOrder, KvPool, PoolConfig, PrefixCache};
use towline_worker::sample::SamplingParams;
use towline_worker::testing::TinyModel;

use crate::support::write;

pub(crate) const BLOCK_TOKENS: usize = 16;
pub(crate) const BOTH: [TransportKind; 2] = [TransportKind::Shm, TransportKind::Tcp];

/// How a side differs from the usual one.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) tiny: TinyModel,
    pub(crate) name: &'static str,
    pub(crate) key: [u8; 32],
    pub(crate) threads: usize,
    pub(crate) order: BlockOrder,
    pub(crate) prefix_cache: PrefixCache,
    pub(crate) transport: TransportChoice,
    pub(crate) digest: DigestMode,
    pub(crate) lease_ttl: Duration,
    pub(crate) pull_deadline: Duration,
    pub(crate) blocks: u32,
    pub(crate) listen: &'static str,
}

impl Setup {
    pub(crate) fn new(name: &'static str, transport: TransportKind) -> Self {
        Self {
            tiny: TinyModel::default(),
            name,
            key: [7; 32],
            threads: 1,
            order: BlockOrder::Sequential,
            prefix_cache: PrefixCache::On,
            transport: TransportChoice::Only(transport),
            digest: DigestMode::Full,
            lease_ttl: Duration::from_secs(30),
            pull_deadline: Duration::from_secs(10),
            blocks: 512,
            listen: "127.0.0.1:0",
        }
    }
}

/// A worker without its HTTP.
pub(crate) struct Side {
    pub(crate) engine: Engine,
    pub(crate) pool: KvPool,
    pub(crate) handoff: Handoff,
}

impl Side {
    pub(crate) fn start(setup: &Setup) -> Self {
        Self::start_with(setup, |model| model)
    }

    /// With something around the model.
    pub(crate) fn start_with<F: Forward>(setup: &Setup, around: impl FnOnce(Model) -> F) -> Self {
        let options = LoadOptions { threads: setup.threads, ..LoadOptions::default() };
        let model = Model::load(&write(&setup.tiny).path, &options).unwrap();
        let layout = model.layout(u32::try_from(BLOCK_TOKENS).unwrap());
        let block_bytes = layout.groups[0].block_bytes();
        let memory = Arc::new(Memory::allocate("test-kv", block_bytes * u64::from(setup.blocks)).unwrap());
        let cache = KvCache::new(memory, &layout).unwrap();
        let fingerprint = fingerprint(&model, layout.describe());
        let config = PoolConfig {
            prefix_cache: setup.prefix_cache,
            order: setup.order,
            fingerprint: fingerprint.describe(),
        };
        let pool = KvPool::new(cache, config);
        let handoff = Handoff::start(handoff_config(setup, fingerprint), pool.clone()).unwrap();
        let engine = Engine::start(around(model), pool.clone(), EngineConfig::default()).unwrap();
        Self { engine, pool, handoff }
    }

    /// Computes `prompt` here and lends its KV.
    pub(crate) async fn prefill(&self, prompt: &[u32]) -> RemoteKv {
        let (_, finished) = self.run(Job { keep_kv: true, ..job(prompt, 1, Start::Fresh) }).await;
        self.handoff.grant("request", prompt, finished.cached_prompt_tokens, finished.kv.unwrap()).unwrap()
    }

    pub(crate) async fn pull(&self, remote: &RemoteKv, prompt: &[u32]) -> Result<Pulled, PullError> {
        self.handoff.pull(remote, prompt, "").await
    }

    /// Pulls and goes on from there.
    pub(crate) async fn decode(
        &self,
        remote: &RemoteKv,
        prompt: &[u32],
        tokens: u32,
    ) -> (Vec<u32>, Finished, Pulled) {
        let pulled = self.pull(remote, prompt).await.unwrap();
        let start = Start::Loaded { blocks: pulled.blocks.share(), tokens: pulled.tokens };
        let (answer, finished) = self.run(job(prompt, tokens, start)).await;
        (answer, finished, pulled)
    }

    /// Computes everything here.
    pub(crate) async fn aggregated(&self, prompt: &[u32], tokens: u32) -> Vec<u32> {
        self.run(job(prompt, tokens, Start::Fresh)).await.0
    }

    pub(crate) async fn run(&self, job: Job) -> (Vec<u32>, Finished) {
        let mut handle = self.engine.submit(job).unwrap();
        let mut tokens = Vec::new();
        while let Some(event) = handle.next().await {
            match event {
                Event::Token { id, .. } => tokens.push(id),
                Event::Finished(finished) => return (tokens, finished),
                Event::Failed(error) => panic!("the engine failed: {error}"),
            }
        }
        panic!("the job ended without an end")
    }
}

pub(crate) fn fingerprint(model: &Model, layout: String) -> Fingerprint {
    let model = model.fingerprint();
    Fingerprint {
        weights: model.weights,
        architecture: model.architecture,
        rope: model.rope,
        cache_dtype: model.cache_dtype,
        layout,
        prefix_hash: "blake3-128".into(),
    }
}

fn handoff_config(setup: &Setup, fingerprint: Fingerprint) -> HandoffConfig {
    let mut engine = [0; 16];
    engine[..setup.name.len().min(16)].copy_from_slice(&setup.name.as_bytes()[..setup.name.len().min(16)]);
    HandoffConfig {
        agent: AgentConfig {
            name: AgentName::new(setup.name).unwrap(),
            engine: EngineId::from_bytes(engine),
            key: ClusterKey::from_bytes(setup.key),
            listen: setup.listen.parse().unwrap(),
            advertise: None,
            shm: ShmConfig::Abstract,
            tcp: true,
            fingerprint,
            copy_threads: 1,
            tcp_streams: 2,
            limits: Limits::default(),
            ucx: None,
            telemetry: None,
        },
        transport: setup.transport,
        contract: Contract::default(),
        audience: "test".into(),
        lease_ttl: setup.lease_ttl,
        pull_deadline: setup.pull_deadline,
        digest: setup.digest,
    }
}

pub(crate) fn job(prompt: &[u32], max_tokens: u32, start: Start) -> Job {
    Job {
        id: "request".into(),
        prompt: prompt.to_vec(),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens,
        logprobs: false,
        stop: vec![],
        ignore_eos: true,
        start,
        keep_kv: false,
        progress: None,
        salt: String::new(),
    }
}

pub(crate) fn pair(transport: TransportKind) -> (Side, Side) {
    (Side::start(&Setup::new("prefill", transport)), Side::start(&Setup::new("decode", transport)))
}

/// Tokens that look random and are always the same.
pub(crate) fn prompt(len: usize, seed: u32) -> Vec<u32> {
    let token = |i: usize| u32::try_from((i * i * 31 + i * 17) % 256).unwrap_or(0);
    (0..len).map(|i| 3 + (token(i) + seed * 37) % 256).collect()
}

/// Waits until `pool` has no block in use: what leases or transfers held has come back.
pub(crate) async fn whole(pool: &KvPool) {
    let waited = tokio::time::timeout(Duration::from_secs(10), async {
        while pool.stats().used > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    assert!(waited.await.is_ok(), "blocks are still in use: {:?}", pool.stats());
}
