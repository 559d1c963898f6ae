//! Leases that callers hold, and the heartbeats that tell their owners.
//!
//! **Cost.** One timer an agent, running only while some lease is held: at each beat one wake-up, and for each peer one
//! message with all leases held of it (8 bytes a lease).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use towline_wire::id::LeaseId;

use super::handle::Handle;
use crate::io::{Io, Timed};

/// Shortest time between heartbeats, and before a peer counts as idle: below, an agent would do nothing else.
pub(super) const PERIOD_MIN: Duration = Duration::from_millis(10);

/// A lease that its owner is told about in each heartbeat until this is dropped. It keeps the peer connected.
#[must_use = "the lease is not kept alive once this is dropped"]
pub struct HeldLease {
    peer: Arc<Handle>,
    lease: LeaseId,
}

impl HeldLease {
    pub(super) fn new(peer: &Arc<Handle>, lease: LeaseId) -> Self {
        peer.leases.add(lease);
        Self { peer: Arc::clone(peer), lease }
    }

    /// Which.
    pub fn lease(&self) -> LeaseId {
        self.lease
    }
}

impl std::fmt::Debug for HeldLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HeldLease({})", self.lease)
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.peer.leases.remove(self.lease);
    }
}

/// The leases held of one peer, each with how often.
#[derive(Default)]
pub(super) struct HeldLeases(Mutex<BTreeMap<LeaseId, usize>>);

impl HeldLeases {
    fn add(&self, lease: LeaseId) {
        *self.lock().entry(lease).or_default() += 1;
    }

    fn remove(&self, lease: LeaseId) {
        let mut leases = self.lock();
        if let Some(count) = leases.get_mut(&lease) {
            *count -= 1;
            if *count == 0 {
                leases.remove(&lease);
            }
        }
    }

    /// All of them, each once.
    pub(super) fn all(&self) -> Vec<LeaseId> {
        self.lock().keys().copied().collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LeaseId, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An agent's heartbeats: one timer for all peers.
pub(crate) struct Heart {
    me: Weak<Self>,
    io: Arc<Io>,
    every: Duration,
    beating: Mutex<Beating>,
}

#[derive(Default)]
struct Beating {
    /// Those of which leases are held.
    peers: Vec<Weak<Handle>>,
    armed: bool,
}

impl Heart {
    pub(super) fn new(io: &Arc<Io>, every: Duration) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            io: Arc::clone(io),
            every: every.max(PERIOD_MIN),
            beating: Mutex::default(),
        })
    }

    /// Has `peer` beat as long as leases are held of it.
    pub(super) fn keep(&self, peer: &Arc<Handle>) {
        let mut beating = self.lock();
        let weak = Arc::downgrade(peer);
        if !beating.peers.iter().any(|known| known.ptr_eq(&weak)) {
            beating.peers.push(weak);
        }
        self.arm(&mut beating);
    }

    fn arm(&self, beating: &mut Beating) {
        // A period past the end of the clock is none.
        if let Some(when) = Instant::now().checked_add(self.every).filter(|_| !beating.armed) {
            let timed: Weak<dyn Timed> = self.me.clone();
            self.io.timers().insert(when, timed);
            beating.armed = true;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Beating> {
        self.beating.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timed for Heart {
    fn handle_deadline(&self) {
        let known = {
            let mut beating = self.lock();
            beating.armed = false;
            std::mem::take(&mut beating.peers)
        };
        // Outside the lock: a beat may connect, and the last handle to a peer, which closes its session, may be this one.
        let peers = known.iter().filter_map(Weak::upgrade);
        let alive: Vec<_> = peers.filter(|peer| peer.beat()).collect();
        alive.iter().for_each(|peer| self.keep(peer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_held_twice_counts_once_and_stays_until_both_let_go() {
        let held = HeldLeases::default();
        held.add(LeaseId(1));
        held.add(LeaseId(1));
        held.add(LeaseId(2));
        assert_eq!(held.all(), [LeaseId(1), LeaseId(2)]);
        held.remove(LeaseId(1));
        held.remove(LeaseId(2));
        assert_eq!(held.all(), [LeaseId(1)]);
        held.remove(LeaseId(1));
        assert!(held.is_empty());
    }
}
