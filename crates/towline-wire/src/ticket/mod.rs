//! The ticket: an owner's sealed permission to read the KV of one request, from all the ranks that have it.
//!
//! It travels as the `towline` object inside `kv_transfer_params`, through routers that may be curious or broken.
//! Decode dials only addresses that the seal covers and refuses a ticket that is unsealed, altered, for another
//! audience, or past its end. The seal is a MAC under the cluster's key over the canonical JSON of the fields.
//!
//! A ticket has all that [`plan`](crate::reshard::plan) needs of the source: how its ranks share heads and layers, where
//! each rank's arrays of blocks lie, and which blocks the sequence has. Ranks that were given the same blocks, as those
//! of a tensor-parallel engine mostly are, share one table, so a rank costs some 400 bytes, and a block of the sequence
//! 6, whatever the ranks (and 16 a rank where blocks are digested).

mod check;
mod error;
mod text;

use serde::{Deserialize, Serialize};

pub use check::TABLES_MAX;
pub use error::TicketError;

use crate::auth::{ClusterKey, Mac};
use crate::digest::Digests;
use crate::id::{AgentName, BootEpoch, EngineId, Generation, LeaseId, RegionId};
use crate::layout::KvLayout;
use crate::parts::Parts;
use crate::reshard::{Array, GroupPool, RankPool};
use crate::shard::Sharding;

/// Schema number of a ticket.
pub const TICKET_SCHEMA: u32 = 2;
/// How far two hosts' wall clocks may differ, in seconds.
pub const CLOCK_SKEW_S: u64 = 60;

/// Which KV may be read, where, until when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ticket {
    /// [`TICKET_SCHEMA`].
    pub schema: u32,
    /// The owner's engine.
    pub engine: EngineId,
    /// The KV of the whole engine. Absent: it is that of the reader's, whose fingerprint must then be wholly equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<KvLayout>,
    /// Tensor-parallel ranks of each of its pipeline stages.
    pub tp_size: u32,
    /// Layers of each pipeline stage, in order.
    pub stage_layers: Vec<u32>,
    /// Every rank, by its number.
    pub ranks: Vec<RankTicket>,
    /// The sequence's blocks, as ranks name them.
    pub tables: Vec<BlockTable>,
    /// How many layers each ordered part completes.
    pub part_layers: Parts,
    /// Tokens whose KV is lent. Zero for a prompt shorter than a block, where only full blocks are handed over.
    pub tokens: u32,
    /// Hash of all the prompt's tokens, so that decode never joins this KV to another prompt.
    pub prompt_hash: String,
    /// Who may use it: a deployment's name. A ticket of one deployment is refused by another that shares the key.
    pub audience: String,
    /// End by the owner's wall clock, seconds since 1970: a coarse guard. The fence decides.
    pub expires_unix_s: u64,
}

/// One rank's part of a ticket: whom to ask, under which lease, and where in its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankTicket {
    /// Its agent.
    pub agent: AgentName,
    /// The agent's incarnation, as text: 64-bit numbers do not survive every JSON reader.
    #[serde(with = "text")]
    pub boot_epoch: BootEpoch,
    /// Where the agent listens: `host:port`.
    pub address: String,
    /// The lease; the same number on every rank of an engine whose ranks lend together.
    #[serde(with = "text")]
    pub lease: LeaseId,
    /// What the fence slot must hold after the data was read.
    #[serde(with = "text")]
    pub generation: Generation,
    /// Which slot.
    pub slot: u32,
    /// The region that holds the blocks.
    pub region: RegionId,
    /// The region that holds the fence slots.
    pub fence_region: RegionId,
    /// How many of the ordered parts were ready when this was sealed. The slot tells how many are now.
    pub parts_ready: u32,
    /// For each group of the engine's layout, in its order, where this rank's blocks lie.
    pub groups: Vec<GroupBlocks>,
    /// Digests of its blocks: those of its first group's table in order, then those of the next. Of a block in several
    /// arrays, over its bytes in the order of the arrays. None where the KV was lent before it was computed.
    pub digests: Digests,
}

/// Where a rank's blocks of one group lie.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupBlocks {
    /// As [`GroupPool::arrays`]; none where the rank has no layer of the group.
    pub arrays: Vec<Array>,
    /// Which of [`Ticket::tables`] says what the sequence's blocks are.
    pub table: u32,
}

/// The sequence's blocks of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTable {
    /// Which block of the sequence `blocks` begins with; not 0 where a sliding window has moved on.
    pub first_block: u32,
    /// The blocks, in the sequence's order.
    pub blocks: Vec<u32>,
}

/// A ticket with its seal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SealedTicket {
    /// The fields.
    #[serde(flatten)]
    pub ticket: Ticket,
    /// 64 hexadecimal digits.
    pub seal: String,
}

impl Ticket {
    /// Seals the ticket under the cluster's key.
    pub fn seal(self, key: &ClusterKey) -> SealedTicket {
        let seal = self.mac(key).to_hex();
        SealedTicket { ticket: self, seal }
    }

    /// How the owner's ranks share its KV.
    pub fn sharding(&self) -> Sharding {
        Sharding { tp_size: self.tp_size, stage_layers: self.stage_layers.clone() }
    }

    /// The table that a rank's group names; an empty one where there is none.
    pub fn table(&self, group: &GroupBlocks) -> &BlockTable {
        const EMPTY: &BlockTable = &BlockTable { first_block: 0, blocks: Vec::new() };
        self.tables.get(group.table as usize).unwrap_or(EMPTY)
    }

    /// The ranks' memory as the planner takes it. How long a region is stands on its agent's card, so it does not bound
    /// anything here; the transfer engine checks each list against the card.
    pub fn pools(&self) -> Vec<RankPool<'_>> {
        let ranks = (0..).zip(&self.ranks);
        ranks
            .map(|(rank, ticket)| {
                let groups = ticket.groups.iter().map(|group| self.pool(group)).collect();
                RankPool { rank, region_bytes: u64::MAX, groups }
            })
            .collect()
    }

    fn pool<'a>(&'a self, group: &'a GroupBlocks) -> GroupPool<'a> {
        let BlockTable { first_block, blocks } = self.table(group);
        GroupPool { arrays: &group.arrays, first_block: *first_block, blocks }
    }

    fn mac(&self, key: &ClusterKey) -> Mac {
        // serde writes the fields in the order of the struct, so both sides see the same bytes.
        let canonical = serde_json::to_vec(self).unwrap_or_default();
        key.mac("towline 2026 ticket", &[&canonical])
    }
}

impl SealedTicket {
    /// The ticket, if the seal, the audience, the time and the arithmetic hold. `now_unix_s` is the reader's clock; clocks may
    /// differ by [`CLOCK_SKEW_S`].
    ///
    /// # Errors
    /// [`TicketError`]: refuse the request.
    pub fn open(self, key: &ClusterKey, audience: &str, now_unix_s: u64) -> Result<Ticket, TicketError> {
        let claimed = Mac::from_hex(&self.seal).ok_or(TicketError::Seal)?;
        if self.ticket.mac(key) != claimed {
            return Err(TicketError::Seal);
        }
        let ticket = self.ticket;
        if ticket.schema != TICKET_SCHEMA {
            return Err(TicketError::Schema { found: ticket.schema });
        }
        if ticket.audience != audience {
            return Err(TicketError::Audience { found: ticket.audience });
        }
        if now_unix_s > ticket.expires_unix_s.saturating_add(CLOCK_SKEW_S) {
            return Err(TicketError::Expired);
        }
        ticket.check().map(|()| ticket)
    }
}

#[cfg(test)]
mod tests;
