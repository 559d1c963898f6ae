//! One lease over several ranks: granted, extended and ended together, so that all ranks' blocks come free together.
//!
//! Each rank has a [`LeaseTable`] of its own, with its own fence slots and generations, because a reader checks the
//! fence of every rank that it read. They are kept in step here: whatever happens to a lease happens in every table.
//! As every grant is a grant in all of them, a lease has one number on all ranks. Readers release it at any rank that
//! they read, or at several; each counts once.

use std::collections::BTreeSet;
use std::time::Duration;

use thiserror::Error;

use crate::id::{AgentName, Generation, LeaseId};
use crate::lease::{EndCause, Grant, LeaseError, LeaseTable, Now, READERS_MAX, Readers, Revocation, Terms};
use crate::shard::RANKS_MAX;

/// What one rank lends.
#[derive(Clone, Debug, Default)]
pub struct RankTerms {
    /// Its blocks, by numbers of its own.
    pub blocks: Vec<u32>,
    /// Ordered parts whose KV is complete on it.
    pub parts_ready: u32,
}

/// What an engine lends, to whom and for how long.
#[derive(Clone, Debug)]
pub struct EngineTerms {
    /// One for each rank, by number; empty where a rank has no block.
    pub ranks: Vec<RankTerms>,
    /// To whom.
    pub readers: Readers,
    /// Until when without a heartbeat, from now.
    pub ttl: Duration,
}

/// A lease over all ranks of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineLease {
    /// Names it, on every rank.
    pub lease: LeaseId,
    /// Each rank's generation and fence slot, by the rank's number.
    pub ranks: Vec<Grant>,
}

/// A lease over ranks that has ended: every rank must fence its slot before its blocks are reused.
#[derive(Debug)]
#[must_use = "the blocks of every rank are lost unless their slots are fenced"]
pub struct EngineRevocation {
    /// The lease.
    pub lease: LeaseId,
    /// Why it ended.
    pub cause: EndCause,
    /// Readers that had begun, or were named, and had not released it.
    pub readers: BTreeSet<AgentName>,
    /// For each rank, by number, what to store in its slot before its blocks are reused.
    pub ranks: Vec<Revocation>,
}

/// All leases of an engine of one or more ranks.
#[derive(Debug)]
pub struct EngineLeases {
    /// By rank. Never empty; all hold the same leases.
    tables: Vec<LeaseTable>,
}

impl EngineLeases {
    /// For `ranks` ranks (1 to [`RANKS_MAX`], else the nearer bound) of `slots` fence slots each.
    pub fn new(ranks: u32, slots: u32) -> Self {
        Self { tables: (0..ranks.clamp(1, RANKS_MAX)).map(|_| LeaseTable::new(slots)).collect() }
    }

    /// Leases held now.
    pub fn len(&self) -> usize {
        self.tables[0].len()
    }

    /// Whether no lease is held.
    pub fn is_empty(&self) -> bool {
        self.tables[0].is_empty()
    }

    /// One rank's table, for [`LeaseTable::check`].
    pub fn rank(&self, rank: u32) -> Option<&LeaseTable> {
        self.tables.get(rank as usize)
    }

    /// Grants what `terms` say from `now` on. Every rank stores its grant's generation and parts in its slot before
    /// anyone is told, under the lock that guards this book. On an error nothing is granted on any rank.
    ///
    /// # Errors
    /// [`EngineLeaseError::Ranks`] unless there are terms for each rank; [`EngineLeaseError::Rank`] when a rank has no
    /// slot left, or there are no or too many readers.
    pub fn grant(&mut self, now: Now, terms: EngineTerms) -> Result<EngineLease, EngineLeaseError> {
        let EngineTerms { ranks, readers, ttl } = terms;
        if ranks.len() != self.tables.len() {
            return Err(EngineLeaseError::Ranks { found: ranks.len(), ranks: self.tables.len() });
        }
        let refused = |rank, error| Err(EngineLeaseError::Rank { rank, error });
        if !(1..=READERS_MAX).contains(&readers.count()) {
            return refused(0, LeaseError::Readers { readers: readers.count() });
        }
        if let Some((rank, table)) = (0..).zip(&self.tables).find(|(_, table)| table.free() == 0) {
            return refused(rank, LeaseError::Full { slots: table.slots() });
        }
        // Slots and readers are checked: no table refuses now, with others granted.
        let granted = (0..).zip(self.tables.iter_mut().zip(ranks)).map(|(rank, (table, terms))| {
            let RankTerms { blocks, parts_ready } = terms;
            let terms = Terms { blocks, readers: readers.clone(), parts_ready, ttl };
            table.grant(now, terms).map_err(|error| EngineLeaseError::Rank { rank, error })
        });
        let ranks = granted.collect::<Result<Vec<_>, _>>()?;
        debug_assert!(ranks.iter().all(|grant| grant.lease == ranks[0].lease), "the tables count alike");
        Ok(EngineLease { lease: ranks[0].lease, ranks })
    }

    /// Raises the count of parts that are ready on `rank`, as [`LeaseTable::mark`] does.
    ///
    /// # Errors
    /// [`LeaseError::Over`]; nothing is stored then.
    pub fn mark(
        &mut self,
        rank: u32,
        grant: &Grant,
        parts_ready: u32,
        store: impl FnOnce(u32, u32),
    ) -> Result<(), LeaseError> {
        let over = LeaseError::Over { lease: grant.lease };
        let table = self.tables.get_mut(rank as usize).ok_or(over)?;
        table.mark(grant.lease, grant.generation, parts_ready, store)
    }

    /// `reader` still wants `lease`: on every rank its end moves to `now + ttl`, never earlier than it was.
    ///
    /// # Errors
    /// [`LeaseError::Over`]; [`LeaseError::Reader`] when `reader` has no part in it, or has released its part.
    pub fn extend(
        &mut self,
        now: Now,
        lease: LeaseId,
        reader: &AgentName,
        ttl: Duration,
    ) -> Result<(), LeaseError> {
        self.tables.iter_mut().try_for_each(|table| table.extend(now, lease, reader, ttl))
    }

    /// The owner itself wants `lease` to last until `now + ttl` on every rank: it still computes what was lent.
    ///
    /// # Errors
    /// [`LeaseError::Over`].
    pub fn keep(&mut self, now: Now, lease: LeaseId, ttl: Duration) -> Result<(), LeaseError> {
        self.tables.iter_mut().try_for_each(|table| table.keep(now, lease, ttl))
    }

    /// `reader` has what it wanted, from every rank that it reads, and says so to one of them, which knows the lease
    /// by `generation`. The last reader ends it on all. Releasing twice is no error while others still read.
    ///
    /// # Errors
    /// [`LeaseError::Over`]; [`LeaseError::Reader`] when `reader` never had a part.
    pub fn release(
        &mut self,
        rank: u32,
        (lease, generation): (LeaseId, Generation),
        reader: &AgentName,
    ) -> Result<Option<EngineRevocation>, LeaseError> {
        let found = self.rank(rank).and_then(|table| table.generation(lease));
        if found != Some(generation) {
            return Err(LeaseError::Over { lease });
        }
        let mut ranks = Vec::new();
        for table in &mut self.tables {
            let Some(generation) = table.generation(lease) else { continue };
            ranks.extend(table.release(lease, generation, reader)?);
        }
        Ok(together(ranks))
    }

    /// Takes a lease back on every rank. `None` when it is over already.
    pub fn revoke(&mut self, lease: LeaseId) -> Option<EngineRevocation> {
        together(self.tables.iter_mut().filter_map(|table| table.revoke(lease)).collect())
    }

    /// The next lease that is over at `now`, if one is, on all its ranks. Call until `None`.
    pub fn poll_expired(&mut self, now: Now) -> Option<EngineRevocation> {
        together(self.tables.iter_mut().filter_map(|table| table.poll_expired(now)).collect())
    }

    /// When [`EngineLeases::poll_expired`] has something next.
    pub fn next_expiry(&self) -> Option<Now> {
        self.tables[0].next_expiry()
    }
}

/// What the tables, being in step, ended of one lease.
fn together(ranks: Vec<Revocation>) -> Option<EngineRevocation> {
    let first = ranks.first()?;
    debug_assert!(ranks.iter().all(|over| over.lease == first.lease), "the tables are in step");
    let (lease, cause, readers) = (first.lease, first.cause, first.readers.clone());
    Some(EngineRevocation { lease, cause, readers, ranks })
}

/// Why the engine's book did not grant.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum EngineLeaseError {
    /// Give terms for each rank, without blocks where a rank has none.
    #[error("terms of {found} ranks, the engine has {ranks}")]
    Ranks {
        /// Terms given.
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

    /// These blocks by rank, to so many named readers.
    fn terms(blocks: Vec<Vec<u32>>, readers: usize) -> EngineTerms {
        let ranks = blocks.into_iter().map(|blocks| RankTerms { blocks, parts_ready: 1 }).collect();
        EngineTerms { ranks, readers: Readers::Named((0..readers).map(name).collect()), ttl: TTL }
    }

    /// Releases at the rank that `reader` reads.
    fn release(
        leases: &mut EngineLeases,
        lease: &EngineLease,
        reader: usize,
    ) -> Result<Option<EngineRevocation>, LeaseError> {
        let rank = reader % lease.ranks.len();
        let key = (lease.lease, lease.ranks[rank].generation);
        leases.release(u32::try_from(rank).unwrap(), key, &name(reader))
    }

    /// Stores nothing, and counts what comes free.
    fn blocks(over: EngineRevocation) -> Vec<Vec<u32>> {
        over.ranks.into_iter().map(|rank| rank.fenced(|_, _| ())).collect()
    }

    #[test]
    fn the_last_named_reader_frees_every_rank() {
        let mut leases = EngineLeases::new(2, 4);
        let lease = leases.grant(at(0), terms(vec![vec![1, 2], vec![7]], 2)).unwrap();
        assert!(release(&mut leases, &lease, 0).unwrap().is_none());
        assert!(release(&mut leases, &lease, 0).unwrap().is_none(), "a retry is not a second reader");
        let over = release(&mut leases, &lease, 1).unwrap().unwrap();
        let fenced = |(over, grant): (&Revocation, &Grant)| {
            over.slot == grant.slot && over.generation > grant.generation && over.cause == EndCause::Released
        };
        assert!(over.ranks.iter().zip(&lease.ranks).all(fenced));
        assert_eq!(blocks(over), [vec![1, 2], vec![7]]);
        let again = release(&mut leases, &lease, 1).unwrap_err();
        assert_eq!(again, LeaseError::Over { lease: lease.lease });
        assert!(leases.is_empty() && leases.rank(1).unwrap().is_empty());
    }

    #[test]
    fn a_heartbeat_of_a_waiting_reader_keeps_all_ranks() {
        let mut leases = EngineLeases::new(3, 4);
        let lease = leases.grant(at(0), terms(vec![vec![], vec![1], vec![2]], 2)).unwrap();
        leases.extend(at(20), lease.lease, &name(1), TTL).unwrap();
        assert!(leases.poll_expired(at(49)).is_none());
        assert!(release(&mut leases, &lease, 1).unwrap().is_none());
        let late = leases.extend(at(49), lease.lease, &name(1), TTL);
        assert!(matches!(late, Err(LeaseError::Reader { .. })), "who released no longer keeps it alive");
        assert_eq!(leases.next_expiry(), Some(at(50)));
        let over = leases.poll_expired(at(50)).unwrap();
        assert_eq!((over.cause, over.ranks[2].cause), (EndCause::Expired, EndCause::Expired));
        assert_eq!(over.readers, [name(0)].into());
        assert_eq!(blocks(over), [vec![], vec![1], vec![2]]);
    }

    #[test]
    fn each_rank_counts_its_own_parts() {
        let mut leases = EngineLeases::new(2, 1);
        let lease = leases.grant(at(0), terms(vec![vec![1], vec![1]], 1)).unwrap();
        let mut stored = None;
        leases.mark(1, &lease.ranks[1], 3, |slot, ready| stored = Some((slot, ready))).unwrap();
        assert_eq!(stored, Some((lease.ranks[1].slot, 3)));
        leases.mark(0, &lease.ranks[0], 1, |_, _| panic!("it was ready when granted")).unwrap();
        assert!(leases.mark(2, &lease.ranks[1], 4, |_, _| ()).is_err(), "there is no such rank");
        _ = blocks(leases.revoke(lease.lease).unwrap());
        assert!(leases.mark(1, &lease.ranks[1], 4, |_, _| panic!("it is over")).is_err());
    }

    #[test]
    fn strangers_and_misfits_are_refused_and_nothing_is_granted() {
        let mut leases = EngineLeases::new(2, 1);
        let one = || vec![vec![1], vec![1]];
        assert_eq!(
            leases.grant(at(0), terms(vec![vec![1]], 1)),
            Err(EngineLeaseError::Ranks { found: 1, ranks: 2 })
        );
        assert!(leases.grant(at(0), terms(one(), 0)).is_err());
        assert!(leases.is_empty() && leases.rank(0).unwrap().is_empty());
        let lease = leases.grant(at(0), terms(one(), 1)).unwrap();
        assert!(matches!(release(&mut leases, &lease, 5), Err(LeaseError::Reader { .. })));
        let elsewhere = (lease.lease, Generation(99));
        assert!(leases.release(0, elsewhere, &name(0)).is_err(), "another generation");
        assert!(matches!(
            leases.grant(at(0), terms(one(), 1)),
            Err(EngineLeaseError::Rank { error: LeaseError::Full { slots: 1 }, .. })
        ));
        assert_eq!(blocks(leases.revoke(lease.lease).unwrap()), one());
        assert!(leases.revoke(lease.lease).is_none());
    }

    proptest! {
        /// Whatever happens, every rank gets every block back exactly once, and all ranks end together.
        #[test]
        fn every_rank_gets_its_blocks_back_once(steps in prop::collection::vec((0u8..5, 0usize..40), 1..60)) {
            let mut leases = EngineLeases::new(2, 6);
            let (mut next, mut now) = (0u32, at(0));
            let (mut live, mut returned): (Vec<EngineLease>, Vec<Vec<u32>>) = (vec![], vec![vec![], vec![]]);
            let mut take = |over: EngineRevocation| {
                for (rank, freed) in blocks(over).into_iter().enumerate() {
                    returned[rank].extend(freed);
                }
            };
            for (kind, amount) in steps {
                let picked = live.get(amount % live.len().max(1)).cloned();
                match (kind, picked) {
                    (0, _) => if let Ok(lease) = leases.grant(now, terms(vec![vec![next], vec![next]], 2)) {
                        next += 1;
                        live.push(lease);
                    },
                    (1, Some(lease)) => if let Ok(Some(over)) = release(&mut leases, &lease, amount % 2) { take(over); },
                    (2, Some(lease)) => { let _ = leases.extend(now, lease.lease, &name(amount % 2), TTL); }
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
