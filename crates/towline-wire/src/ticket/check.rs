//! What of a ticket can be checked without the reader's own layout: counts, references and arithmetic.
//!
//! Whoever holds the cluster's key can seal anything, so nothing is taken on trust: after this, no index of a ticket
//! leads nowhere and no address overflows. That tables and arrays fit the layout is the planner's to check.

use std::collections::HashSet;

use super::{BlockTable, GroupBlocks, RankTicket, Ticket, TicketError};
use crate::blocks::{BASES_MAX, INDICES_MAX};
use crate::layout::{BLOCK_BYTES_MAX, GROUPS_MAX};
use crate::reshard::{Array, TOKENS_MAX};
use crate::shard::RANKS_MAX;

/// Most tables: one for each group on each rank.
pub const TABLES_MAX: usize = RANKS_MAX as usize * GROUPS_MAX;

impl Ticket {
    /// Checks all that [`SealedTicket::open`](super::SealedTicket::open) promises beyond seal, audience and time.
    pub(super) fn check(&self) -> Result<(), TicketError> {
        let sharding = self.sharding();
        sharding.validate()?;
        self.part_layers.validate(sharding.stage_layers.iter().sum())?;
        if let Some(layout) = &self.layout {
            layout.validate()?;
            layout.check_sharding(&sharding)?;
        }
        let ranks = sharding.ranks().count();
        if self.ranks.len() != ranks {
            return Err(TicketError::Ranks { found: self.ranks.len(), ranks });
        }
        self.check_counts()?;
        let mut agents = HashSet::new();
        for (rank, ticket) in (0..).zip(&self.ranks) {
            let wrong = |what| TicketError::Rank { rank, what };
            if !agents.insert(&ticket.agent) {
                return Err(wrong("its agent is also another rank's"));
            }
            self.check_rank(ticket).map_err(wrong)?;
        }
        Ok(())
    }

    fn check_counts(&self) -> Result<(), TicketError> {
        let blocks: u64 = self.tables.iter().map(|table| table.blocks.len() as u64).sum();
        let bounds = [
            ("tokens", u64::from(self.tokens), TOKENS_MAX),
            ("tables", self.tables.len() as u64, TABLES_MAX as u64),
            ("blocks", blocks, INDICES_MAX as u64),
        ];
        match bounds.into_iter().find(|(_, found, max)| found > max) {
            Some((what, _, max)) => Err(TicketError::TooMany { what, max }),
            None => Ok(()),
        }
    }

    fn check_rank(&self, rank: &RankTicket) -> Result<(), &'static str> {
        let groups = self.layout.as_ref().map_or(rank.groups.len(), |layout| layout.groups.len());
        if rank.groups.len() != groups || !(1..=GROUPS_MAX).contains(&groups) {
            return Err("it does not give one pool for each group of the layout");
        }
        if rank.groups.iter().map(|group| group.arrays.len()).sum::<usize>() > BASES_MAX {
            return Err("it has more than 4096 arrays");
        }
        if rank.parts_ready > self.part_layers.count() {
            return Err("more parts are ready than there are");
        }
        let mut blocks = 0;
        for group in &rank.groups {
            let table = self.tables.get(group.table as usize).ok_or("it names a table that is not there")?;
            check_reach(group, table)?;
            blocks += table.blocks.len();
        }
        // Each table is within its bound, and there are few groups: no overflow.
        if rank.digests.is_complete(blocks) { Ok(()) } else { Err("its digests are not those of its blocks") }
    }
}

/// No block's address overflows, whatever its size within the bound.
fn check_reach(group: &GroupBlocks, table: &BlockTable) -> Result<(), &'static str> {
    let highest = u64::from(table.blocks.iter().max().copied().unwrap_or(0));
    let fits = |array: &Array| {
        let start = highest.checked_mul(array.stride).and_then(|at| at.checked_add(array.base));
        array.stride > 0 && start.and_then(|start| start.checked_add(BLOCK_BYTES_MAX)).is_some()
    };
    if group.arrays.iter().all(fits) { Ok(()) } else { Err("a block lies beyond what 64 bits can address") }
}
