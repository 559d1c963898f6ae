//! The owner's book of leases: who may read which blocks, until when. Pure; time is an argument.
//!
//! A lease ends once: by release of its last reader, by expiry, or by revocation. Ending yields a [`Revocation`] that
//! hides the blocks: they come out only when the owner has stored the new generation in the fence slot
//! ([`Revocation::fenced`]). The type makes the order of the brief's section 3.4 hard to get wrong. The slot itself comes
//! free by the same call and no earlier: another thread's grant can't show its generation there, only to have it
//! overwritten by the late store of the lease before it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thiserror::Error;

use crate::id::{Generation, LeaseId};

/// Most leases at a time: bounds the fence region (64 bytes a slot) and the expiry sweep.
pub const LEASES_MAX: usize = 65_536;
/// Most readers of one lease: the ranks of the largest decode engine.
pub const READERS_MAX: u32 = 256;

/// A point on the owner's monotonic clock, as time since its start.
pub type Now = Duration;

/// What the owner granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Names the lease.
    pub lease: LeaseId,
    /// What the fence slot must hold for the data to be valid.
    pub generation: Generation,
    /// Which fence slot.
    pub slot: u32,
    /// When it ends without a heartbeat.
    pub expires: Now,
}

#[derive(Debug)]
struct Held {
    generation: Generation,
    slot: u32,
    expires: Now,
    readers_left: u32,
    /// Ascending, so that a request's blocks are found by binary search.
    blocks: Vec<u32>,
}

/// Slots whose last lease is over and fenced, shared between the table and the revocations under way. Held for a push
/// or a pop, never while anything is waited for.
#[derive(Clone, Default)]
struct FreeSlots(Arc<Mutex<Vec<u32>>>);

impl FreeSlots {
    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        // A push or a pop leaves the list whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for FreeSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} free slots", self.lock().len())
    }
}

/// A lease that is over. Its slot must get [`Revocation::generation`] before the blocks may be reused.
#[derive(Debug)]
#[must_use = "the blocks and the slot are lost unless the slot is fenced"]
pub struct Revocation {
    /// The lease.
    pub lease: LeaseId,
    /// Which fence slot to store to.
    pub slot: u32,
    /// What to store: never used before in this boot epoch.
    pub generation: Generation,
    /// Why it ended.
    pub cause: EndCause,
    blocks: Vec<u32>,
    free_slots: FreeSlots,
}

impl Revocation {
    /// The blocks, once `store` has put the new generation into the slot with a full fence after it. From then on the
    /// slot may serve another lease.
    pub fn fenced(self, store: impl FnOnce(u32, Generation)) -> Vec<u32> {
        store(self.slot, self.generation);
        self.free_slots.lock().push(self.slot);
        self.blocks
    }
}

/// Why a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndCause {
    /// Every reader has what it wanted.
    Released,
    /// No reader came, or none kept it alive.
    Expired,
    /// The owner took it back (shutdown, cancel).
    Revoked,
}

/// All leases of one owner.
#[derive(Debug)]
pub struct LeaseTable {
    held: HashMap<LeaseId, Held>,
    by_expiry: BTreeMap<(Now, LeaseId), ()>,
    free_slots: FreeSlots,
    next_slot: u32,
    slots: u32,
    next_lease: u64,
    next_generation: u64,
}

impl LeaseTable {
    /// A table with `slots` fence slots, so at most that many leases at a time ([`LEASES_MAX`] at most).
    pub fn new(slots: u32) -> Self {
        let slots = slots.min(u32::try_from(LEASES_MAX).unwrap_or(u32::MAX));
        Self {
            held: HashMap::new(),
            by_expiry: BTreeMap::new(),
            free_slots: FreeSlots::default(),
            next_slot: 0,
            slots,
            next_lease: 1,
            next_generation: 1,
        }
    }

    /// Leases held now.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Leases that can be granted before another has to end and be fenced.
    pub fn free(&self) -> usize {
        (self.slots - self.next_slot) as usize + self.free_slots.lock().len()
    }

    /// Fence slots there are.
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// Whether no lease is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Grants `blocks` to `readers` until `now + ttl`. Store the grant's generation in its slot before telling anyone,
    /// and before any lease of this table can end: under the lock that guards the table. A store that comes after the
    /// lease's own revocation would make a dead lease look alive.
    ///
    /// # Errors
    /// [`LeaseError::Full`], [`LeaseError::Readers`].
    pub fn grant(
        &mut self,
        now: Now,
        blocks: Vec<u32>,
        readers: u32,
        ttl: Duration,
    ) -> Result<Grant, LeaseError> {
        if !(1..=READERS_MAX).contains(&readers) {
            return Err(LeaseError::Readers { readers });
        }
        let slot = self.take_slot()?;
        let mut blocks = blocks;
        blocks.sort_unstable();
        let (lease, generation) = (LeaseId(self.next_lease), self.take_generation());
        self.next_lease += 1;
        let expires = now.saturating_add(ttl);
        self.by_expiry.insert((expires, lease), ());
        self.held.insert(lease, Held { generation, slot, expires, readers_left: readers, blocks });
        Ok(Grant { lease, generation, slot, expires })
    }

    /// Whether `lease` of `generation` is live and covers every block of `blocks`: asked by the serving side of a
    /// transport for each request.
    ///
    /// # Errors
    /// [`LeaseError::Over`], [`LeaseError::NotCovered`].
    pub fn check(
        &self,
        lease: LeaseId,
        generation: Generation,
        mut blocks: impl Iterator<Item = u32>,
    ) -> Result<(), LeaseError> {
        let held = self.held.get(&lease).filter(|held| held.generation == generation);
        let held = held.ok_or(LeaseError::Over { lease })?;
        match blocks.find(|block| held.blocks.binary_search(block).is_err()) {
            None => Ok(()),
            Some(block) => Err(LeaseError::NotCovered { lease, block }),
        }
    }

    /// Moves the end of `lease` to `now + ttl`, never earlier than it was.
    ///
    /// # Errors
    /// [`LeaseError::Over`].
    pub fn extend(&mut self, now: Now, lease: LeaseId, ttl: Duration) -> Result<(), LeaseError> {
        let held = self.held.get_mut(&lease).ok_or(LeaseError::Over { lease })?;
        let expires = held.expires.max(now.saturating_add(ttl));
        self.by_expiry.remove(&(held.expires, lease));
        self.by_expiry.insert((expires, lease), ());
        held.expires = expires;
        Ok(())
    }

    /// One reader has what it wanted; the last one ends the lease.
    ///
    /// # Errors
    /// [`LeaseError::Over`] when the lease is over or of another generation.
    pub fn release(
        &mut self,
        lease: LeaseId,
        generation: Generation,
    ) -> Result<Option<Revocation>, LeaseError> {
        let held = self.held.get_mut(&lease).filter(|held| held.generation == generation);
        let held = held.ok_or(LeaseError::Over { lease })?;
        held.readers_left -= 1;
        if held.readers_left > 0 {
            return Ok(None);
        }
        Ok(self.end(lease, EndCause::Released))
    }

    /// Takes a lease back. `None` when it is over already.
    pub fn revoke(&mut self, lease: LeaseId) -> Option<Revocation> {
        self.end(lease, EndCause::Revoked)
    }

    /// The next lease that is over at `now`, if one is. Call until `None`.
    pub fn poll_expired(&mut self, now: Now) -> Option<Revocation> {
        let (expires, lease) = *self.by_expiry.first_key_value()?.0;
        if expires > now { None } else { self.end(lease, EndCause::Expired) }
    }

    /// When [`LeaseTable::poll_expired`] has something next.
    pub fn next_expiry(&self) -> Option<Now> {
        self.by_expiry.first_key_value().map(|((expires, _), ())| *expires)
    }

    fn end(&mut self, lease: LeaseId, cause: EndCause) -> Option<Revocation> {
        let held = self.held.remove(&lease)?;
        self.by_expiry.remove(&(held.expires, lease));
        let (generation, free_slots) = (self.take_generation(), self.free_slots.clone());
        Some(Revocation { lease, slot: held.slot, generation, cause, blocks: held.blocks, free_slots })
    }

    fn take_slot(&mut self) -> Result<u32, LeaseError> {
        if let Some(slot) = self.free_slots.lock().pop() {
            return Ok(slot);
        }
        if self.next_slot == self.slots {
            return Err(LeaseError::Full { slots: self.slots });
        }
        self.next_slot += 1;
        Ok(self.next_slot - 1)
    }

    fn take_generation(&mut self) -> Generation {
        self.next_generation += 1;
        Generation(self.next_generation)
    }
}

/// Why the owner's book refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum LeaseError {
    /// Wait for leases to end, or give the agent more slots.
    #[error("all {slots} fence slots are taken")]
    Full {
        /// Slots there are.
        slots: u32,
    },
    /// Name 1 to [`READERS_MAX`] readers.
    #[error("a lease has 1 to {READERS_MAX} readers, not {readers}")]
    Readers {
        /// Readers asked for.
        readers: u32,
    },
    /// Compute the KV anew, or ask prefill again.
    #[error("lease {lease} is over")]
    Over {
        /// The lease.
        lease: LeaseId,
    },
    /// The reader asks for what it was not given.
    #[error("lease {lease} does not cover block {block}")]
    NotCovered {
        /// The lease.
        lease: LeaseId,
        /// The block asked for.
        block: u32,
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

    #[test]
    fn blocks_come_out_only_with_the_fence_stored() {
        let mut table = LeaseTable::new(4);
        let grant = table.grant(at(0), vec![3, 4], 1, TTL).unwrap();
        let over = table.release(grant.lease, grant.generation).unwrap().unwrap();
        let mut stored = None;
        let blocks = over.fenced(|slot, generation| stored = Some((slot, generation)));
        let (slot, generation) = stored.unwrap();
        assert_eq!((blocks, slot), (vec![3, 4], grant.slot));
        assert!(generation > grant.generation);
    }

    /// Otherwise a grant's generation could be overwritten by the store of the lease that had the slot before it,
    /// and its readers be told that a live lease is over.
    #[test]
    fn a_slot_is_granted_again_only_after_it_was_fenced() {
        let mut table = LeaseTable::new(1);
        let grant = table.grant(at(0), vec![1], 1, TTL).unwrap();
        let over = table.release(grant.lease, grant.generation).unwrap().unwrap();
        assert_eq!((table.len(), table.free()), (0, 0));
        assert_eq!(table.grant(at(0), vec![2], 1, TTL), Err(LeaseError::Full { slots: 1 }));
        _ = over.fenced(|_, _| ());
        assert_eq!(table.free(), 1);
        assert_eq!(table.grant(at(0), vec![2], 1, TTL).unwrap().slot, grant.slot);
    }

    #[test]
    fn the_last_of_several_readers_ends_the_lease() {
        let mut table = LeaseTable::new(4);
        let grant = table.grant(at(0), vec![1], 2, TTL).unwrap();
        assert!(table.release(grant.lease, grant.generation).unwrap().is_none());
        assert!(table.release(grant.lease, grant.generation).unwrap().is_some());
        assert_eq!(
            table.release(grant.lease, grant.generation).unwrap_err(),
            LeaseError::Over { lease: grant.lease }
        );
    }

    #[test]
    fn a_heartbeat_keeps_a_lease_and_its_absence_ends_it() {
        let mut table = LeaseTable::new(4);
        let grant = table.grant(at(0), vec![1], 1, TTL).unwrap();
        table.extend(at(20), grant.lease, TTL).unwrap();
        assert!(table.poll_expired(at(49)).is_none());
        assert_eq!(table.poll_expired(at(50)).unwrap().cause, EndCause::Expired);
        assert!(table.is_empty());
    }

    #[test]
    fn a_full_table_and_uncovered_blocks_are_refused() {
        let mut table = LeaseTable::new(1);
        let grant = table.grant(at(0), vec![1], 1, TTL).unwrap();
        assert_eq!(table.grant(at(0), vec![2], 1, TTL), Err(LeaseError::Full { slots: 1 }));
        assert_eq!(table.check(grant.lease, grant.generation, [1].into_iter()), Ok(()));
        assert!(matches!(
            table.check(grant.lease, grant.generation, [2].into_iter()),
            Err(LeaseError::NotCovered { .. })
        ));
        assert!(matches!(
            table.check(grant.lease, Generation(99), [1].into_iter()),
            Err(LeaseError::Over { .. })
        ));
    }

    proptest! {
        /// Whatever happens, every block granted comes back exactly once, and no generation is used twice.
        #[test]
        fn every_block_returns_exactly_once(steps in prop::collection::vec((0u8..4, 0u64..40), 1..80)) {
            let mut table = LeaseTable::new(8);
            let (mut next_block, mut granted, mut returned) = (0u32, vec![], vec![]);
            let (mut live, mut generations, mut now): (Vec<Grant>, Vec<Generation>, Now) = (vec![], vec![], at(0));
            let take = |over: Revocation, returned: &mut Vec<u32>, generations: &mut Vec<Generation>| {
                returned.extend(over.fenced(|_, generation| generations.push(generation)));
            };
            for (kind, amount) in steps {
                match kind {
                    0 => if let Ok(grant) = table.grant(now, vec![next_block], 1, TTL) {
                        granted.push(next_block);
                        generations.push(grant.generation);
                        next_block += 1;
                        live.push(grant);
                    },
                    1 if !live.is_empty() => {
                        let index = usize::try_from(amount).unwrap() % live.len();
                        let grant = live.swap_remove(index);
                        if let Ok(Some(over)) = table.release(grant.lease, grant.generation) { take(over, &mut returned, &mut generations); }
                    }
                    2 => now += at(amount),
                    _ => while let Some(over) = table.poll_expired(now) { take(over, &mut returned, &mut generations); },
                }
            }
            now += at(1000);
            while let Some(over) = table.poll_expired(now) { take(over, &mut returned, &mut generations); }
            returned.sort_unstable();
            prop_assert_eq!(returned, granted);
            let count = generations.len();
            generations.sort_unstable();
            generations.dedup();
            prop_assert_eq!(generations.len(), count);
        }
    }
}
