//! Lending the KV of a request, from an engine of one or more ranks: a lease on all of them, and the sealed ticket that
//! says where their readers find what.
//!
//! KV may be lent before it is computed. [`Lender::computed`] then raises the count of parts that are ready, rank by
//! rank, as layers come to be; readers follow.

use std::sync::Arc;

use thiserror::Error;
use towline_fabric::{Agent, Region};
use towline_wire::auth::ClusterKey;
use towline_wire::digest::Digests;
use towline_wire::engine_lease::{EngineLease, EngineLeaseError};
use towline_wire::id::{AgentName, BootEpoch, EngineId, RegionId};
use towline_wire::layout::KvLayout;
use towline_wire::lease::{LeaseError, Readers};
use towline_wire::parts::Parts;
use towline_wire::reshard::Array;
use towline_wire::shard::Sharding;
use towline_wire::ticket::{BlockTable, GroupBlocks, RankTicket, SealedTicket, TICKET_SCHEMA, Ticket};

use super::keeper::{Hold, Keeper, RankLoan};
use super::unix_now;

/// What lends: an engine's leases, its ranks, and how they share the KV.
pub struct Lender {
    /// The leases of all ranks.
    pub keeper: Arc<Keeper>,
    /// The ranks, by number.
    pub ranks: Vec<LendingRank>,
    /// The engine.
    pub engine: EngineId,
    /// The whole engine's KV, for readers whose layout may differ; `None`: only equal ones read.
    pub layout: Option<KvLayout>,
    /// How the ranks share it.
    pub sharding: Sharding,
    /// What seals tickets.
    pub key: ClusterKey,
    /// The deployment.
    pub audience: String,
}

/// One rank that lends, as its tickets name it.
#[derive(Clone, Debug)]
pub struct LendingRank {
    /// Its agent.
    pub agent: AgentName,
    /// The agent's incarnation.
    pub boot_epoch: BootEpoch,
    /// Where the agent is dialled.
    pub address: String,
    /// The region of its blocks.
    pub kv: RegionId,
    /// The region of its fence slots.
    pub fences: RegionId,
    /// Its arrays of blocks, for each group of the engine's layout.
    pub arrays: Vec<Vec<Array>>,
}

/// What to lend.
pub struct Loan {
    /// Names the prompt's tokens.
    pub prompt_hash: String,
    /// Tokens whose KV is lent.
    pub tokens: u32,
    /// The sequence's blocks.
    pub tables: Vec<BlockTable>,
    /// For each rank, which table is that of which group, how far it has computed, and its blocks' digests.
    pub ranks: Vec<RankShare>,
    /// The parts in which the layers move.
    pub parts: Parts,
    /// To whom.
    pub readers: Readers,
    /// What keeps the blocks; it comes free when the lease is over on all ranks.
    pub hold: Hold,
}

/// One rank's part of a [`Loan`].
#[derive(Clone, Debug)]
pub struct RankShare {
    /// For each group of the layout, which of the tables has its blocks.
    pub tables: Vec<u32>,
    /// How many of the rank's layers, in order, hold the KV of all the tokens.
    pub computed: u32,
    /// Digests of its blocks.
    pub digests: Digests,
}

/// What was lent.
#[derive(Clone, Debug)]
pub struct Lent {
    /// The lease.
    pub lease: EngineLease,
    /// For its readers.
    pub ticket: SealedTicket,
}

impl LendingRank {
    /// A rank whose agent serves the regions `kv` and `fences`, with `arrays` of blocks for each group of the layout.
    pub fn new(agent: &Agent, (kv, fences): (&Region, &Region), arrays: Vec<Vec<Array>>) -> Self {
        Self {
            agent: agent.name().clone(),
            boot_epoch: agent.boot_epoch(),
            address: agent.address().to_owned(),
            kv: kv.id(),
            fences: fences.id(),
            arrays,
        }
    }
}

impl Lender {
    /// Lends. Every rank's slot shows its lease before this returns.
    ///
    /// # Errors
    /// [`GrantError`]; `loan.hold` is dropped then.
    pub fn lend(&self, loan: Loan) -> Result<Lent, GrantError> {
        let Loan { prompt_hash, tokens, tables, ranks, parts, readers, hold } = loan;
        let blocks = |table: &u32| tables.get(*table as usize).map_or(&[][..], |table| &table.blocks);
        let loans: Vec<RankLoan<'_>> = (0..)
            .zip(&ranks)
            .map(|(rank, share)| RankLoan {
                blocks: share.tables.iter().map(blocks).collect(),
                parts_ready: self.ready(&parts, rank, share.computed),
            })
            .collect();
        let lease = self.keeper.grant(&loans, readers, hold)?;
        let expires = unix_now().saturating_add(self.keeper.ttl());
        let ticket = Ticket {
            schema: TICKET_SCHEMA,
            engine: self.engine,
            layout: self.layout.clone(),
            tp_size: self.sharding.tp_size,
            stage_layers: self.sharding.stage_layers.clone(),
            ranks: self.rank_tickets(&lease, ranks, &parts),
            tables,
            part_layers: parts,
            tokens,
            prompt_hash,
            audience: self.audience.clone(),
            expires_unix_s: expires.as_secs(),
        };
        Ok(Lent { lease, ticket: ticket.seal(&self.key) })
    }

    /// The first `computed` of a rank's layers hold the KV of all the tokens, stored before this call: parts that are
    /// complete with them may be read from now on.
    ///
    /// # Errors
    /// [`LeaseError::Over`]: the lease has ended, nobody reads it any more.
    pub fn computed(&self, lent: &Lent, rank: u32, computed: u32) -> Result<(), LeaseError> {
        let over = LeaseError::Over { lease: lent.lease.lease };
        let grant = lent.lease.ranks.get(rank as usize).ok_or(over)?;
        self.keeper.mark(rank, grant, self.ready(&lent.ticket.ticket.part_layers, rank, computed))
    }

    /// Takes a lease back: what was lent will never be complete.
    pub fn revoke(&self, lent: &Lent) {
        self.keeper.revoke(lent.lease.lease);
    }

    /// Parts that are ready on a rank which has computed `computed` of its layers.
    fn ready(&self, parts: &Parts, rank: u32, computed: u32) -> u32 {
        let stage = self.sharding.rank(rank).map_or(0..0, |rank| self.sharding.layers(rank.pp_index));
        parts.ready(&stage, stage.start.saturating_add(computed))
    }

    fn rank_tickets(&self, lease: &EngineLease, shares: Vec<RankShare>, parts: &Parts) -> Vec<RankTicket> {
        let ranks = self.ranks.iter().zip(&lease.ranks).zip(shares);
        (0..)
            .zip(ranks)
            .map(|(number, ((rank, grant), share))| RankTicket {
                agent: rank.agent.clone(),
                boot_epoch: rank.boot_epoch,
                address: rank.address.clone(),
                lease: grant.lease,
                generation: grant.generation,
                slot: grant.slot,
                region: rank.kv,
                fence_region: rank.fences,
                parts_ready: self.ready(parts, number, share.computed),
                groups: rank
                    .arrays
                    .iter()
                    .zip(share.tables)
                    .map(|(arrays, table)| GroupBlocks { arrays: arrays.clone(), table })
                    .collect(),
                digests: share.digests,
            })
            .collect()
    }
}

/// Why the KV was not lent. It goes back to the pool.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GrantError {
    /// Too many prompts wait for their decode worker.
    #[error(transparent)]
    Lease(#[from] EngineLeaseError),
    /// Give `--kv-advertise HOST:PORT`.
    #[error("the agent's address {address:?} is not host:port")]
    Address {
        /// The address.
        address: String,
    },
    /// The prompt has more tokens than a ticket can say.
    #[error("the prompt has more than 2^32 tokens")]
    Tokens,
    /// The job was refused, cancelled or failed before it had blocks to lend.
    #[error("the job ended before its KV could be lent")]
    NotStarted,
}
