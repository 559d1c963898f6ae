//! One lease over several ranks: the readers of a request are named, and all ranks' blocks come free together.
//!
//! Each rank has a [`LeaseTable`] of its own, with its own fence slots and generations, because a reader checks the
//! fence of every rank that it read. Here they are kept in step: granted, extended and ended together, with one
//! reader each, which is the engine's lease. Who of the named readers is still to release is known only here.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use thiserror::Error;

use crate::id::{AgentName, LeaseId};
use crate::lease::{EndCause, Grant, LeaseError, LeaseTable, Now, READERS_MAX, Revocation};
use crate::shard::RANKS_MAX;

/// One rank's part of an engine's lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankLease {
    /// The rank's number.
    pub rank: u32,
    /// Its lease, generation and fence slot.
    pub grant: Grant,
}

/// A lease over all ranks of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineLease {
    /// Names it: the lease of rank 0.
    pub lease: LeaseId,
    /// One for each rank, by number.
    pub ranks: Vec<RankLease>,
    /// Who may read, and must release.
    pub readers: BTreeSet<AgentName>,
}

/// A lease over ranks that has ended: every rank must fence its slot before its blocks are reused.
#[derive(Debug)]
#[must_use = "the blocks of every rank are lost unless their slots are fenced"]
pub struct EngineRevocation {
    /// The lease.
    pub lease: LeaseId,
    /// Why it ended.
    pub cause: EndCause,
    /// For each rank, by number, what to store in its slot before its blocks are reused.
    pub ranks: Vec<Revocation>,
}

#[derive(Debug)]
struct Span {
    granted: Vec<Grant>,
    readers: BTreeSet<AgentName>,
    waiting: BTreeSet<AgentName>,
}

/// All leases of an engine of several ranks.
#[derive(Debug)]
pub struct EngineLeases {
    /// By rank. Never empty; all hold the same leases.
    tables: Vec<LeaseTable>,
    held: HashMap<LeaseId, Span>,
}

impl EngineLeases {
    /// For `ranks` ranks (1 to [`RANKS_MAX`], else the nearer bound) of `slots` fence slots each.
    pub fn new(ranks: u32, slots: u32) -> Self {
        let tables = (0..ranks.clamp(1, RANKS_MAX)).map(|_| LeaseTable::new(slots)).collect();
        Self { tables, held: HashMap::new() }
    }

    /// Leases held now.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether no lease is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// One rank's table, for [`LeaseTable::check`].
    pub fn rank(&self, rank: u32) -> Option<&LeaseTable> {
        self.tables.get(rank as usize)
    }

    /// Grants `blocks`, by rank, to the `readers` until `now + ttl`. Every rank stores its grant's generation in its
    /// slot before anyone is told. On an error nothing is granted on any rank.
    ///
    /// # Errors
    /// [`EngineLeaseError::Ranks`] unless there is one list of blocks a rank; [`EngineLeaseError::Rank`] when a rank
    /// has no slot left or there are no or too many readers.
    pub fn grant(
        &mut self,
        now: Now,
        blocks: Vec<Vec<u32>>,
        readers: BTreeSet<AgentName>,
        ttl: Duration,
    ) -> Result<EngineLease, EngineLeaseError> {
        if blocks.len() != self.tables.len() {
            return Err(EngineLeaseError::Ranks { found: blocks.len(), ranks: self.tables.len() });
        }
        let count = u32::try_from(readers.len()).unwrap_or(u32::MAX);
        if !(1..=READERS_MAX).contains(&count) {
            return Err(EngineLeaseError::Rank { rank: 0, error: LeaseError::Readers { readers: count } });
        }
        if let Some((rank, table)) = (0..).zip(&self.tables).find(|(_, table)| table.free() == 0) {
            let error = LeaseError::Full { slots: table.slots() };
            return Err(EngineLeaseError::Rank { rank, error });
        }
        // Slots and readers are checked: no table refuses now, with others granted.
        let granted = (0..).zip(self.tables.iter_mut().zip(blocks)).map(|(rank, (table, blocks))| {
            table.grant(now, blocks, 1, ttl).map_err(|error| EngineLeaseError::Rank { rank, error })
        });
        let granted = granted.collect::<Result<Vec<_>, _>>()?;
        let ranks: Vec<_> =
            (0..).zip(&granted).map(|(rank, grant)| RankLease { rank, grant: *grant }).collect();
        let lease = granted[0].lease;
        let span = Span { granted, readers: readers.clone(), waiting: readers.clone() };
        self.held.insert(lease, span);
        Ok(EngineLease { lease, ranks, readers })
    }

    /// Moves the end of `lease` on every rank to `now + ttl`, never earlier than it was.
    ///
    /// # Errors
    /// [`EngineLeaseError::Rank`] with [`LeaseError::Over`]; [`EngineLeaseError::Reader`] when `reader` has no part
    /// in it, or has released its part.
    pub fn extend(
        &mut self,
        now: Now,
        lease: LeaseId,
        reader: &AgentName,
        ttl: Duration,
    ) -> Result<(), EngineLeaseError> {
        let span = self.held.get(&lease).ok_or_else(|| over(lease))?;
        if !span.waiting.contains(reader) {
            return Err(EngineLeaseError::Reader { lease, reader: reader.clone() });
        }
        for (rank, (table, grant)) in (0..).zip(self.tables.iter_mut().zip(&span.granted)) {
            table.extend(now, grant.lease, ttl).map_err(|error| EngineLeaseError::Rank { rank, error })?;
        }
        Ok(())
    }

    /// `reader` has what it wanted, from every rank it reads; the last reader ends the lease. Releasing twice is no
    /// error while others still read: a retried message changes nothing.
    ///
    /// # Errors
    /// [`EngineLeaseError::Rank`] with [`LeaseError::Over`]; [`EngineLeaseError::Reader`] when it never had a part.
    pub fn release(
        &mut self,
        lease: LeaseId,
        reader: &AgentName,
    ) -> Result<Option<EngineRevocation>, EngineLeaseError> {
        let span = self.held.get_mut(&lease).ok_or_else(|| over(lease))?;
        if !span.readers.contains(reader) {
            return Err(EngineLeaseError::Reader { lease, reader: reader.clone() });
        }
        span.waiting.remove(reader);
        if span.waiting.is_empty() { Ok(self.end(lease, EndCause::Released, None)) } else { Ok(None) }
    }

    /// Takes a lease back on every rank. `None` when it is over already.
    pub fn revoke(&mut self, lease: LeaseId) -> Option<EngineRevocation> {
        self.end(lease, EndCause::Revoked, None)
    }

    /// The next lease that is over at `now`, if one is, on all its ranks. Call until `None`.
    pub fn poll_expired(&mut self, now: Now) -> Option<EngineRevocation> {
        let first = self.tables[0].poll_expired(now)?;
        self.end(first.lease, EndCause::Expired, Some(first))
    }

    /// When [`EngineLeases::poll_expired`] has something next.
    pub fn next_expiry(&self) -> Option<Now> {
        self.tables[0].next_expiry()
    }

    /// Ends a lease on every rank; `ended` is rank 0's, where that has ended already.
    fn end(
        &mut self,
        lease: LeaseId,
        cause: EndCause,
        mut ended: Option<Revocation>,
    ) -> Option<EngineRevocation> {
        let span = self.held.remove(&lease)?;
        let ranks = self.tables.iter_mut().zip(&span.granted).filter_map(|(table, grant)| {
            let mut over = ended.take().or_else(|| table.revoke(grant.lease))?;
            over.cause = cause;
            Some(over)
        });
        Some(EngineRevocation { lease, cause, ranks: ranks.collect() })
    }
}

fn over(lease: LeaseId) -> EngineLeaseError {
    EngineLeaseError::Rank { rank: 0, error: LeaseError::Over { lease } }
}

/// Why the engine's book refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EngineLeaseError {
    /// Give one list of blocks for each rank, empty where a rank has none.
    #[error("blocks of {found} ranks, the engine has {ranks}")]
    Ranks {
        /// Lists given.
        found: usize,
        /// Ranks there are.
        ranks: usize,
    },
    /// As the rank's own error says.
    #[error("rank {rank}: {error}")]
    Rank {
        /// The rank's number.
        rank: u32,
        /// What its table said.
        error: LeaseError,
    },
    /// The reader is another engine's, or late.
    #[error("{reader} has no part in lease {lease}")]
    Reader {
        /// The lease.
        lease: LeaseId,
        /// Who asked.
        reader: AgentName,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn at(seconds: u64) -> Now {
        Duration::from_secs(seconds)
    }

    fn name(reader: usize) -> AgentName {
        AgentName::new(format!("d/{reader}")).unwrap()
    }

    fn readers(count: usize) -> BTreeSet<AgentName> {
        (0..count).map(name).collect()
    }

    /// Stores nothing, and counts what comes free.
    fn blocks(over: EngineRevocation) -> Vec<Vec<u32>> {
        over.ranks.into_iter().map(|rank| rank.fenced(|_, _| ())).collect()
    }

    #[test]
    fn the_last_named_reader_frees_every_rank() {
        let mut leases = EngineLeases::new(2, 4);
        let lease = leases.grant(at(0), vec![vec![1, 2], vec![7]], readers(2), TTL).unwrap();
        assert_eq!((lease.ranks.len(), lease.ranks[1].rank), (2, 1));
        assert!(leases.release(lease.lease, &name(0)).unwrap().is_none());
        assert!(leases.release(lease.lease, &name(0)).unwrap().is_none(), "a retry is not a second reader");
        let over = leases.release(lease.lease, &name(1)).unwrap().unwrap();
        assert!(
            over.ranks.iter().zip(&lease.ranks).all(|(over, rank)| {
                over.slot == rank.grant.slot && over.generation > rank.grant.generation
            })
        );
        assert!(over.ranks.iter().all(|rank| rank.cause == EndCause::Released));
        assert_eq!(blocks(over), [vec![1, 2], vec![7]]);
        assert_eq!(leases.release(lease.lease, &name(1)).unwrap_err(), super::over(lease.lease));
        assert!(leases.is_empty() && leases.rank(1).unwrap().is_empty());
    }

    #[test]
    fn a_heartbeat_of_a_waiting_reader_keeps_all_ranks() {
        let mut leases = EngineLeases::new(3, 4);
        let lease = leases.grant(at(0), vec![vec![], vec![1], vec![2]], readers(2), TTL).unwrap().lease;
        leases.extend(at(20), lease, &name(1), TTL).unwrap();
        assert!(leases.poll_expired(at(49)).is_none());
        assert!(leases.release(lease, &name(1)).unwrap().is_none());
        let late = leases.extend(at(49), lease, &name(1), TTL);
        assert!(
            matches!(late, Err(EngineLeaseError::Reader { .. })),
            "who released no longer keeps it alive"
        );
        assert_eq!(leases.next_expiry(), Some(at(50)));
        let over = leases.poll_expired(at(50)).unwrap();
        assert_eq!((over.cause, over.ranks[2].cause), (EndCause::Expired, EndCause::Expired));
        assert_eq!(blocks(over), [vec![], vec![1], vec![2]]);
    }

    #[test]
    fn strangers_and_misfits_are_refused_and_nothing_is_granted() {
        let mut leases = EngineLeases::new(2, 1);
        let one = || vec![vec![1], vec![1]];
        assert!(matches!(
            leases.grant(at(0), vec![vec![1]], readers(1), TTL),
            Err(EngineLeaseError::Ranks { found: 1, ranks: 2 })
        ));
        assert!(leases.grant(at(0), one(), readers(0), TTL).is_err());
        assert!(leases.is_empty() && leases.rank(0).unwrap().is_empty());
        let lease = leases.grant(at(0), one(), readers(1), TTL).unwrap().lease;
        assert!(matches!(leases.release(lease, &name(5)), Err(EngineLeaseError::Reader { .. })));
        assert!(matches!(
            leases.grant(at(0), one(), readers(1), TTL),
            Err(EngineLeaseError::Rank { error: LeaseError::Full { slots: 1 }, .. })
        ));
        assert_eq!(blocks(leases.revoke(lease).unwrap()), one());
        assert!(leases.revoke(lease).is_none());
    }

    proptest! {
        /// Whatever happens, every rank gets every block back exactly once, and all ranks end together.
        #[test]
        fn every_rank_gets_its_blocks_back_once(steps in prop::collection::vec((0u8..5, 0usize..40), 1..60)) {
            let mut leases = EngineLeases::new(2, 6);
            let (mut next, mut now) = (0u32, at(0));
            let (mut live, mut returned): (Vec<LeaseId>, Vec<Vec<u32>>) = (vec![], vec![vec![], vec![]]);
            let mut take = |over: EngineRevocation| {
                for (rank, freed) in blocks(over).into_iter().enumerate() {
                    returned[rank].extend(freed);
                }
            };
            for (kind, amount) in steps {
                let picked = live.get(amount % live.len().max(1)).copied();
                match (kind, picked) {
                    (0, _) => if let Ok(lease) = leases.grant(now, vec![vec![next], vec![next]], readers(2), TTL) {
                        next += 1;
                        live.push(lease.lease);
                    },
                    (1, Some(lease)) => if let Ok(Some(over)) = leases.release(lease, &name(amount % 2)) { take(over); },
                    (2, Some(lease)) => { let _ = leases.extend(now, lease, &name(amount % 2), TTL); }
                    (3, _) => now += at(amount as u64),
                    _ => while let Some(over) = leases.poll_expired(now) { take(over); },
                }
                prop_assert_eq!(leases.rank(0).unwrap().len(), leases.len());
                prop_assert_eq!(leases.rank(1).unwrap().len(), leases.len());
            }
            while let Some(over) = leases.poll_expired(now + at(1000)) { take(over); }
            for mut rank in returned {
                rank.sort_unstable();
                prop_assert_eq!(rank, (0..next).collect::<Vec<_>>());
            }
        }
    }
}
