//! A scripted engine, handoff and tokenizer: what they say is the test's, what they were asked is kept.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use futures_util::stream;
use towline_fabric::Memory;
use towline_wire::auth::ClusterKey;
use towline_wire::digest::{DigestMode, Digests};
use towline_wire::engine_lease::EngineLeaseError;
use towline_wire::id::{AgentName, BootEpoch, EngineId, Generation, LeaseId, RegionId};
use towline_wire::kv_params::{RemoteKv, TransferMode};
use towline_wire::layout::{Gqa, KvLayout};
use towline_wire::lease::LeaseError;
use towline_wire::parts::Parts;
use towline_wire::receipt::{Evidence, EvidenceClass, Op, RECEIPT_SCHEMA, Receipt, Timings, TransportKind};
use towline_wire::reshard::Array;
use towline_wire::ticket::{BlockTable, GroupBlocks, RankTicket, TICKET_SCHEMA, Ticket};
use towline_worker::engine::{EngineStats, Event, FinishReason, Finished, FinishedKv, Job, SubmitError};
use towline_worker::handoff::{GrantError, PullError, Pulled};
use towline_worker::http::{
    Events, FrontParts, Generate, HandoffCounts, HttpLimits, KvHandoff, Message, OnKvFailure, Pull, Role,
    Served, Text,
};
use towline_worker::metrics::Metrics;
use towline_worker::model::KvCache;
use towline_worker::pool::{KvPool, PoolConfig, PoolStats};

pub(crate) const MODEL: &str = "tiny";
pub(crate) const CONTEXT: usize = 64;
pub(crate) const VOCAB: usize = 256;

/// A token a byte; a conversation is its contents joined with newlines.
pub(crate) struct Bytewise;

impl Text for Bytewise {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, String> {
        if messages[0].role == "assistant" {
            return Err("conversations begin with the user".into());
        }
        let contents: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
        self.encode(&contents.join("\n"))
    }

    fn token(&self, id: u32) -> String {
        char::from_u32(id).unwrap_or('?').to_string()
    }

    fn vocab(&self) -> usize {
        VOCAB
    }
}

/// What the engine says to the next job.
pub(crate) type Script = Result<Events, SubmitError>;

/// Says what it was told to, or to every job the same.
#[derive(Default)]
pub(crate) struct ScriptedEngine {
    pub(crate) scripts: Mutex<VecDeque<Script>>,
    pub(crate) jobs: Mutex<Vec<Job>>,
    /// Jobs whose events somebody still holds.
    pub(crate) alive: Arc<AtomicUsize>,
}

struct Alive(Arc<AtomicUsize>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ScriptedEngine {
    pub(crate) fn script(&self, script: Script) {
        self.scripts.lock().unwrap().push_back(script);
    }

    pub(crate) fn alive(&self) -> usize {
        self.alive.load(Ordering::SeqCst)
    }

    pub(crate) fn job<T>(&self, look: impl FnOnce(&Job) -> T) -> T {
        look(self.jobs.lock().unwrap().last().expect("a job"))
    }
}

impl Generate for ScriptedEngine {
    fn submit(&self, job: Job) -> Result<Events, SubmitError> {
        let script = self.scripts.lock().unwrap().pop_front();
        let events = script.unwrap_or_else(|| Ok(said(["Hel", "lo"], FinishReason::Stop)))?;
        self.jobs.lock().unwrap().push(job);
        self.alive.fetch_add(1, Ordering::SeqCst);
        let alive = Alive(Arc::clone(&self.alive));
        Ok(events
            .map(move |event| {
                let _held = &alive;
                event
            })
            .boxed())
    }

    fn is_running(&self) -> bool {
        true
    }

    fn stats(&self) -> EngineStats {
        EngineStats::default()
    }

    fn blocks(&self) -> PoolStats {
        PoolStats::default()
    }
}

pub(crate) fn token(id: u32, text: &str) -> Event {
    Event::Token { id, text: text.into(), logprob: Some(-0.5) }
}

pub(crate) fn finished(reason: FinishReason, completion_tokens: usize, kv: Option<FinishedKv>) -> Event {
    Event::Finished(Finished {
        reason,
        prompt_tokens: 5,
        completion_tokens,
        computed_prompt_tokens: 3,
        cached_prompt_tokens: 2,
        kv,
    })
}

/// Tokens 65, 66, … with these texts, and the end.
pub(crate) fn said<const N: usize>(texts: [&str; N], reason: FinishReason) -> Events {
    let tokens = (65..).zip(texts).map(|(id, text)| token(id, text));
    let events: Vec<Event> = tokens.chain([finished(reason, N, None)]).collect();
    stream::iter(events).boxed()
}

/// These events, and then nothing for ever.
pub(crate) fn hanging(events: Vec<Event>) -> Events {
    stream::iter(events).chain(stream::pending()).boxed()
}

/// Eight blocks of four tokens.
pub(crate) fn pool() -> KvPool {
    let layout =
        KvLayout::gqa(Gqa { layers: 1, kv_heads: 1, head_dim: 16, element_bytes: 1, block_tokens: 4 });
    let memory = Memory::allocate("http-test", 8 * 128).unwrap();
    KvPool::new(KvCache::new(Arc::new(memory), &layout).unwrap(), PoolConfig::default())
}

pub(crate) fn kept(pool: &KvPool) -> FinishedKv {
    FinishedKv { blocks: pool.reserve(&[], 2).unwrap().blocks, tokens: 5 }
}

/// What the next pull does.
pub(crate) enum Wire {
    Delivers,
    Fails(PullError),
    Hangs,
}

/// Grants and pulls as told.
pub(crate) struct ScriptedHandoff {
    pub(crate) pool: KvPool,
    pub(crate) wire: Mutex<VecDeque<Wire>>,
    pub(crate) pulls: Mutex<Vec<(Vec<u32>, String)>>,
    pub(crate) pulling: Arc<AtomicUsize>,
    pub(crate) grants: Mutex<Vec<(String, Vec<u32>, usize)>>,
    pub(crate) refuse_grants: bool,
}

impl ScriptedHandoff {
    pub(crate) fn new() -> Self {
        Self {
            pool: pool(),
            wire: Mutex::default(),
            pulls: Mutex::default(),
            pulling: Arc::default(),
            grants: Mutex::default(),
            refuse_grants: false,
        }
    }

    pub(crate) fn next(&self, wire: Wire) {
        self.wire.lock().unwrap().push_back(wire);
    }
}

impl KvHandoff for ScriptedHandoff {
    fn grant(
        &self,
        request_id: &str,
        prompt: &[u32],
        cached: usize,
        kv: FinishedKv,
    ) -> Result<RemoteKv, GrantError> {
        if self.refuse_grants {
            let error = LeaseError::Full { slots: 1 };
            return Err(EngineLeaseError::Rank { rank: 0, error }.into());
        }
        assert_eq!(kv.tokens, 5);
        self.grants.lock().unwrap().push((request_id.into(), prompt.to_vec(), cached));
        Ok(RemoteKv { remote_request_id: request_id.into(), ..remote_kv() })
    }

    fn pull<'a>(&'a self, _remote: &'a RemoteKv, prompt: &'a [u32], salt: &'a str) -> Pull<'a> {
        self.pulls.lock().unwrap().push((prompt.to_vec(), salt.into()));
        let wire = self.wire.lock().unwrap().pop_front().unwrap_or(Wire::Delivers);
        self.pulling.fetch_add(1, Ordering::SeqCst);
        let pulling = Alive(Arc::clone(&self.pulling));
        Box::pin(async move {
            let _held = pulling;
            match wire {
                Wire::Fails(error) => Err(error),
                Wire::Hangs => std::future::pending().await,
                Wire::Delivers => {
                    let blocks = self.pool.reserve(&[], 1)?.blocks;
                    Ok(Pulled { blocks, tokens: 4, cached_tokens: 0, receipt: receipt() })
                }
            }
        })
    }

    fn counts(&self) -> HandoffCounts {
        HandoffCounts { leases_held: 1, leases_expired: 4, ..HandoffCounts::default() }
    }
}

pub(crate) fn receipt() -> Receipt {
    Receipt {
        schema: RECEIPT_SCHEMA,
        transport: TransportKind::Shm,
        op: Op::Read,
        local_agent: "decode-0".into(),
        remote_agent: "prefill-0".into(),
        bytes: 4096,
        blocks: 2,
        descriptors: 2,
        descriptors_merged: 1,
        staged: false,
        rails: Vec::new(),
        seconds: 0.004,
        gb_per_s: 0.001,
        timings: Timings::default(),
        violation: None,
        lease: Some(LeaseId(7)),
        evidence: Evidence { class: EvidenceClass::LibraryExact, source: "mapping".into() },
        verified_by: "mapping".into(),
    }
}

/// Parameters as a prefill worker answers them.
pub(crate) fn remote_kv() -> RemoteKv {
    let rank = RankTicket {
        agent: AgentName::new("prefill-0").unwrap(),
        boot_epoch: BootEpoch(3),
        address: "127.0.0.1:7000".into(),
        lease: LeaseId(7),
        generation: Generation(9),
        slot: 1,
        region: RegionId(1),
        fence_region: RegionId(2),
        parts_ready: 1,
        groups: vec![GroupBlocks { arrays: vec![Array { base: 0, stride: 128 }], table: 0 }],
        digests: Digests::of(DigestMode::Full, 1, |_| 17),
    };
    let ticket = Ticket {
        schema: TICKET_SCHEMA,
        engine: EngineId::from_bytes([1; 16]),
        layout: None,
        tp_size: 1,
        stage_layers: vec![1],
        ranks: vec![rank],
        tables: vec![BlockTable { first_block: 0, blocks: vec![5] }],
        part_layers: Parts::whole(1),
        tokens: 4,
        prompt_hash: "00".into(),
        audience: "default".into(),
        expires_unix_s: 1000,
    };
    RemoteKv {
        do_remote_prefill: true,
        do_remote_decode: false,
        remote_block_ids: vec![vec![5]],
        remote_engine_id: EngineId::from_bytes([1; 16]),
        remote_request_id: "r".into(),
        remote_host: "127.0.0.1".into(),
        remote_port: 7000,
        tp_size: 1,
        remote_num_tokens: 4,
        transfer_mode: TransferMode::Pull,
        remote_prefill_cached_tokens: 0,
        towline: Some(ticket.seal(&ClusterKey::from_bytes([6; 32]))),
    }
}

/// A front of fakes; change what the test is about.
pub(crate) fn parts(engine: &Arc<ScriptedEngine>) -> FrontParts {
    FrontParts {
        served: Served { name: MODEL.into(), context: CONTEXT, temperature: 1.0, top_p: 1.0 },
        role: Role::Aggregated,
        text: Arc::new(Bytewise),
        engine: Arc::clone(engine) as Arc<dyn Generate>,
        handoff: None,
        on_kv_failure: OnKvFailure::Fail,
        metrics: Arc::new(Metrics::new()),
        limits: HttpLimits::default(),
    }
}

/// A front of that role with that handoff.
pub(crate) fn parts_with(
    engine: &Arc<ScriptedEngine>,
    role: Role,
    handoff: &Arc<ScriptedHandoff>,
) -> FrontParts {
    FrontParts { role, handoff: Some(Arc::clone(handoff) as Arc<dyn KvHandoff>), ..parts(engine) }
}
