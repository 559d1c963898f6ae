//! The handoff: how the KV of a prompt gets from the worker that computed it to the worker that decodes.
//!
//! ```text
//!  prefill worker                                   decode worker
//!  engine finishes the prompt
//!  grant: lease, fence slot, digests, sealed ticket
//!        └── kv_transfer_params, through the router ──→ pull: open the ticket, connect (once a pair),
//!                                                             read the blocks it lacks, read the fence,
//!                                                             check digests, release the lease
//! ```
//!
//! The owner's side, for engines of one or more ranks:
//! - `keeper`: leases, fence slots, what peers may read (`places`: which block a byte belongs to), the engine's card;
//! - `lender`: a lease on all ranks and its ticket, before or after the KV is computed.
//!
//! The reader's side, for a rank of any engine:
//! - `links`: connections to other engines' ranks (`peers`: one a pair, made when first needed; `landing`: where their
//!   fences are read into);
//! - `pulling`: drives the pure state machine `towline_wire::handoff` over them (`receipts`: one a source);
//! - `routes`: what is read from which rank, part by part.
//!
//! And both for this worker, an engine of one rank with a pool:
//! - `grant`: from a finished prompt to `kv_transfer_params`; `early`: from a prompt whose layers are still computed;
//! - `pull`: from `kv_transfer_params` to verified blocks.
//!
//! Only full blocks travel, and never the last token's: decode computes at most one block of the prompt itself, which
//! gives it the logits of the first token without trusting a sampled token from elsewhere.

mod early;
mod grant;
mod keeper;
mod landing;
mod lender;
mod links;
mod peers;
mod places;
mod pull;
mod pulling;
mod receipts;
mod routes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use thiserror::Error;
use towline_fabric::{Agent, AgentConfig, Region, RegionOptions, RegionRole, StartError, TransportChoice};
use towline_fabric::{Memory, RegisterError};
use towline_wire::auth::ClusterKey;
use towline_wire::contract::Contract;
use towline_wire::digest::DigestMode;
use towline_wire::engine_card::{EngineCard, RankAgent};
use towline_wire::fence::SLOT_BYTES;
use towline_wire::layout::Group;
use towline_wire::prefix::PrefixHasher;
use towline_wire::reshard::Array;
use towline_wire::shard::Sharding;

pub use early::EarlyTicket;
pub use keeper::{Hold, Keeper, LeaseStats, RankMemory};
pub use lender::{GrantError, Lender, LendingRank, Lent, Loan, RankShare};
pub use links::{Links, PullWatch, RankPull};
pub use places::GroupMemory;
pub use pull::{PullError, Pulled};

use grant::Granter;
use links::HEARTBEAT;

use crate::pool::KvPool;

/// Fence slots of a worker, so its most leases at a time: a prompt in flight each, far more than an engine batches.
pub const FENCE_SLOTS: u64 = 4096;

/// How many blocks of a prompt travel: the full ones, without the last token's.
fn transferable_blocks(prompt_tokens: usize, block_tokens: usize) -> usize {
    prompt_tokens.saturating_sub(1) / block_tokens.max(1)
}

/// Layers of the model whose KV the pool keeps.
fn depth(pool: &KvPool) -> u32 {
    let last = |group: &Group| group.layers.last().map_or(0, |layer| layer.saturating_add(1));
    pool.cache().layout().groups.iter().map(last).max().unwrap_or(0)
}

/// Names a prompt's tokens in a ticket.
fn prompt_hash(prompt: &[u32]) -> String {
    // One key for every prompt: the ticket's seal is what protects it.
    let key = PrefixHasher::new("prompt", "").next(None, prompt);
    key.to_hex()
}

/// Wall-clock time since 1970; zero on a clock set before it.
fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// What a worker's handoff needs to know.
#[derive(Debug)]
pub struct HandoffConfig {
    /// The agent to start: name, engine, key, addresses, transports, fingerprint. Its heartbeats come often enough for the
    /// shortest lease of a worker, whatever its limits say.
    pub agent: AgentConfig,
    /// Which transport pulls use.
    pub transport: TransportChoice,
    /// What the path must be.
    pub contract: Contract,
    /// The deployment; tickets of another are refused.
    pub audience: String,
    /// How long a lease lasts without a heartbeat.
    pub lease_ttl: Duration,
    /// How long a pull may take, connecting included.
    pub pull_deadline: Duration,
    /// Which blocks are digested when granted, and so checked when pulled.
    pub digest: DigestMode,
}

/// Counters of one worker's handoffs, for metrics.
#[derive(Debug, Default)]
pub struct HandoffStats {
    /// Pulls that ended in verified blocks.
    pub pulls: AtomicU64,
    /// Pulls that failed.
    pub pull_failures: AtomicU64,
    /// KV bytes pulled and verified.
    pub pulled_bytes: AtomicU64,
}

/// Both sides of a worker's handoff. Dropping it takes every lease back and closes every connection.
pub struct Handoff {
    agent: Agent,
    key: ClusterKey,
    audience: String,
    pull_deadline: Duration,
    pool: KvPool,
    keeper: Arc<Keeper>,
    granter: Arc<Granter>,
    links: Links,
    stats: HandoffStats,
    /// Peers read them as long as they are registered.
    _regions: [Region; 2],
    expiry: Option<JoinHandle<()>>,
}

impl Handoff {
    /// Starts the agent, registers the pool and the fence slots, and has the agent answer with the engine's card.
    ///
    /// # Errors
    /// [`HandoffStartError`]: the port is taken, memory is short, a thread can't be started.
    pub fn start(mut config: HandoffConfig, pool: KvPool) -> Result<Self, HandoffStartError> {
        let fences = Arc::new(Memory::allocate("towline-fences", FENCE_SLOTS * SLOT_BYTES)?);
        let geometry = pool.geometry();
        let arrays = vec![Array { base: 0, stride: geometry.block_bytes }];
        let groups = vec![GroupMemory { arrays: arrays.clone(), blocks: geometry.blocks }];
        let memory = RankMemory { fences: Arc::clone(&fences), groups };
        let keeper = Arc::new(Keeper::new(vec![memory], config.lease_ttl));
        let (key, engine) = (config.agent.key.clone(), config.agent.engine);
        let heartbeat = &mut config.agent.limits.heartbeat;
        *heartbeat = HEARTBEAT.min(*heartbeat);
        let agent = Agent::start(config.agent, keeper.owner(0))?;
        let options = |role, leased| RegionOptions { role, peer_writable: false, leased };
        let kv = agent.register(Arc::clone(pool.memory()), options(RegionRole::Kv, true))?;
        let fences = agent.register(fences, options(RegionRole::Fence, false))?;
        keeper.serve(0, kv.id());
        let rank = LendingRank::new(&agent, (&kv, &fences), vec![arrays]);
        let depth = depth(&pool);
        let sharding = Sharding { tp_size: 1, stage_layers: vec![depth] };
        let card = agent.card();
        keeper.introduce(EngineCard {
            engine,
            sharding: sharding.clone(),
            layout: pool.cache().layout().clone(),
            fingerprint: card.fingerprint.clone(),
            // It stays as it is: a worker registers its two regions here, and none later.
            ranks: vec![RankAgent::Card(Box::new(card))],
        });
        let lender = Lender {
            keeper: Arc::clone(&keeper),
            ranks: vec![rank],
            engine,
            layout: None,
            sharding,
            key: key.clone(),
            audience: config.audience.clone(),
        };
        let granter = Granter { lender, pool: pool.clone(), digest: config.digest, depth };
        let expiry = keeper.start_expiry().map_err(HandoffStartError::Thread)?;
        Ok(Self {
            links: Links::new(agent.clone(), config.transport, config.contract),
            agent,
            key,
            audience: config.audience,
            pull_deadline: config.pull_deadline,
            pool,
            keeper,
            granter: Arc::new(granter),
            stats: HandoffStats::default(),
            _regions: [kv, fences],
            expiry: Some(expiry),
        })
    }

    /// `host:port` that decode workers dial.
    pub fn address(&self) -> &str {
        self.agent.address()
    }

    /// The agent, for its transports and counters.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Leases held now.
    pub fn leases_held(&self) -> usize {
        self.keeper.held()
    }

    /// How leases ended.
    pub fn lease_stats(&self) -> &LeaseStats {
        self.keeper.stats()
    }

    /// Counters of pulls.
    pub fn stats(&self) -> &HandoffStats {
        &self.stats
    }

    fn count(&self, outcome: &Result<Pulled, PullError>) {
        match outcome {
            Ok(pulled) => {
                self.stats.pulls.fetch_add(1, Ordering::Relaxed);
                self.stats.pulled_bytes.fetch_add(pulled.receipt.bytes, Ordering::Relaxed);
            }
            Err(_) => _ = self.stats.pull_failures.fetch_add(1, Ordering::Relaxed),
        }
    }
}

impl Drop for Handoff {
    fn drop(&mut self) {
        self.keeper.stop();
        if let Some(expiry) = self.expiry.take() {
            // The thread only ends leases; should it have panicked, its leases are gone with it.
            _ = expiry.join();
        }
    }
}

/// Why a worker's handoff did not start.
#[derive(Debug, Error)]
pub enum HandoffStartError {
    /// The agent did not start: a taken port, an unusable address or directory.
    #[error(transparent)]
    Agent(#[from] StartError),
    /// Memory is short, or the region limit is reached.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The system gives no more threads.
    #[error("cannot start the lease thread: {0}")]
    Thread(std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_never_travels() {
        let blocks: Vec<usize> =
            [0, 1, 16, 17, 32, 33].into_iter().map(|tokens| transferable_blocks(tokens, 16)).collect();
        assert_eq!(blocks, [0, 0, 0, 1, 1, 2]);
    }

    #[test]
    fn other_tokens_have_another_hash() {
        assert_eq!(prompt_hash(&[1, 2]), prompt_hash(&[1, 2]));
        assert_ne!(prompt_hash(&[1, 2]), prompt_hash(&[2, 1]));
        assert_ne!(prompt_hash(&[1, 2]), prompt_hash(&[1, 2, 0]));
    }
}
