//! The owner's book of leases: who may read which blocks, until when. Pure; time is an argument.
//!
//! A lease ends once: by release of its last reader, by expiry, or by revocation. Ending yields a [`Revocation`] that
//! hides the blocks: they come out only when the owner has stored the new generation in the fence slot
//! ([`Revocation::fenced`]). The type makes the order of the brief's section 3.4 hard to get wrong. The slot itself comes
//! free by the same call and no earlier: another thread's grant can't show its generation there, only to have it
//! overwritten by the late store of the lease before it.
//!
//! A lease may be granted before its KV is computed. The count of parts that are ready is then raised step by step
//! ([`LeaseTable::mark`]), which stores it while the table is borrowed: a count that came late could otherwise land in
//! a slot that shows another lease by then, and make blocks look computed that are not.

mod readers;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thiserror::Error;

pub use readers::Readers;
use readers::{Left, Places};

use crate::id::{AgentName, Generation, LeaseId};

/// Most leases at a time: bounds the fence region (64 bytes a slot) and the expiry sweep.
pub const LEASES_MAX: usize = 65_536;
/// Most readers of one lease: the ranks of the largest decode engine.
pub const READERS_MAX: u32 = 256;

/// A point on the owner's monotonic clock, as time since its start.
pub type Now = Duration;

/// What the owner lends, to whom and for how long.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Which blocks, by numbers of the owner's.
    pub blocks: Vec<u32>,
    /// To whom.
    pub readers: Readers,
    /// Ordered parts whose KV is complete already.
    pub parts_ready: u32,
    /// Until when without a heartbeat, from now.
    pub ttl: Duration,
}

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
    places: Places,
    parts_ready: u32,
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
    /// Readers that had begun, or were named, and had not released it.
    pub readers: BTreeSet<AgentName>,
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

    /// Grants what `terms` say from `now` on. Store the grant's generation and its parts in its slot before telling
    /// anyone, and before any lease of this table can end: under the lock that guards the table. A store that comes
    /// after the lease's own revocation would make a dead lease look alive.
    ///
    /// # Errors
    /// [`LeaseError::Full`], [`LeaseError::Readers`].
    pub fn grant(&mut self, now: Now, terms: Terms) -> Result<Grant, LeaseError> {
        let Terms { mut blocks, readers, parts_ready, ttl } = terms;
        if !(1..=READERS_MAX).contains(&readers.count()) {
            return Err(LeaseError::Readers { readers: readers.count() });
        }
        let slot = self.take_slot()?;
        blocks.sort_unstable();
        let (lease, generation) = (LeaseId(self.next_lease), self.take_generation());
        self.next_lease += 1;
        let expires = now.saturating_add(ttl);
        self.by_expiry.insert((expires, lease), ());
        let places = Places::new(readers);
        self.held.insert(lease, Held { generation, slot, expires, places, parts_ready, blocks });
        Ok(Grant { lease, generation, slot, expires })
    }

    /// Raises the count of parts that are ready, once their data is in memory: `store` puts it into the slot, with
    /// release order, and must do so before it returns. A count that is no higher changes nothing.
    ///
    /// # Errors
    /// [`LeaseError::Over`]: nothing is stored, the slot may show another lease.
    pub fn mark(
        &mut self,
        lease: LeaseId,
        generation: Generation,
        parts_ready: u32,
        store: impl FnOnce(u32, u32),
    ) -> Result<(), LeaseError> {
        let held = self.find(lease, generation)?;
        if parts_ready > held.parts_ready {
            held.parts_ready = parts_ready;
            store(held.slot, parts_ready);
        }
        Ok(())
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

    /// `reader` still wants `lease`: its end moves to `now + ttl`, never earlier than it was.
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
        let held = self.held.get_mut(&lease).ok_or(LeaseError::Over { lease })?;
        if !held.places.admits(reader) {
            return Err(LeaseError::Reader { lease });
        }
        self.keep(now, lease, ttl)
    }

    /// The owner itself wants `lease` to last until `now + ttl`: it still computes what was lent.
    ///
    /// # Errors
    /// [`LeaseError::Over`].
    pub fn keep(&mut self, now: Now, lease: LeaseId, ttl: Duration) -> Result<(), LeaseError> {
        let held = self.held.get_mut(&lease).ok_or(LeaseError::Over { lease })?;
        let expires = held.expires.max(now.saturating_add(ttl));
        self.by_expiry.remove(&(held.expires, lease));
        self.by_expiry.insert((expires, lease), ());
        held.expires = expires;
        Ok(())
    }

    /// `reader` has what it wanted; the last one ends the lease. Releasing twice is no error while others still read:
    /// a repeated message changes nothing.
    ///
    /// # Errors
    /// [`LeaseError::Over`] when the lease is over or of another generation; [`LeaseError::Reader`] when `reader` has
    /// no part in it.
    pub fn release(
        &mut self,
        lease: LeaseId,
        generation: Generation,
        reader: &AgentName,
    ) -> Result<Option<Revocation>, LeaseError> {
        match self.find(lease, generation)?.places.leave(reader) {
            None => Err(LeaseError::Reader { lease }),
            Some(Left::OthersRead) => Ok(None),
            Some(Left::Last) => Ok(self.end(lease, EndCause::Released)),
        }
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

    /// The generation of a lease that is held.
    pub(crate) fn generation(&self, lease: LeaseId) -> Option<Generation> {
        self.held.get(&lease).map(|held| held.generation)
    }

    fn find(&mut self, lease: LeaseId, generation: Generation) -> Result<&mut Held, LeaseError> {
        let held = self.held.get_mut(&lease).filter(|held| held.generation == generation);
        held.ok_or(LeaseError::Over { lease })
    }

    fn end(&mut self, lease: LeaseId, cause: EndCause) -> Option<Revocation> {
        let Held { slot, expires, places, blocks, .. } = self.held.remove(&lease)?;
        self.by_expiry.remove(&(expires, lease));
        let (generation, free_slots) = (self.take_generation(), self.free_slots.clone());
        Some(Revocation {
            lease,
            slot,
            generation,
            cause,
            readers: places.into_reading(),
            blocks,
            free_slots,
        })
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
    /// The reader is another engine's, came when all places were taken, or has released already.
    #[error("this agent has no part in lease {lease}")]
    Reader {
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
mod tests;
