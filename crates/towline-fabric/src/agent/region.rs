//! The book of an agent's regions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use towline_wire::card::{REGIONS_MAX, RegionCard};
use towline_wire::id::RegionId;
use towline_wire::receipt::TransportKind;

use super::config::{RegionOptions, RegionRole};
use super::environment::Environment;
use crate::region::{Access, Memory, RegisterError};
use crate::transport::Transport;
use crate::transport::shm::Lent;

/// Memory that peers may address. Dropping it deregisters: requests that the owner serves (tcp) are refused from
/// then on with `UnknownRegion`, and new peers no longer see it. A peer that mapped it (shm) can still read the
/// bytes: the fence, whose generation the owner changes before it reuses blocks, is the guard there. The memory itself
/// lives until the last transfer and the last served request let go of it; foreign memory also until the last peer of
/// this host has: each is asked to now, and answers within a slice's copy, or when its process ends.
pub struct Region {
    entry: Arc<RegionEntry>,
    environment: Arc<Environment>,
    transports: Vec<Arc<dyn Transport>>,
}

impl Region {
    pub(super) fn register(
        environment: &Arc<Environment>,
        transports: &[Arc<dyn Transport>],
        memory: Arc<Memory>,
        options: RegionOptions,
    ) -> Result<Self, RegisterError> {
        let access = if options.peer_writable { Access::PeersWrite } else { Access::PeersRead };
        if memory.is_peers() {
            return Err(RegisterError::Peers);
        }
        if access == Access::PeersWrite && memory.access() != access {
            return Err(RegisterError::Sealed);
        }
        let id = environment.regions.next_id();
        let mut keys = Vec::new();
        for transport in transports {
            keys.push((transport.kind(), transport.register(id, &memory, access)?));
        }
        let entry = Arc::new(RegionEntry { id, memory, options, keys, lent: Lent::default() });
        let region = Self {
            entry: Arc::clone(&entry),
            environment: Arc::clone(environment),
            transports: transports.to_vec(),
        };
        environment.regions.insert(entry)?;
        Ok(region)
    }

    /// Its id, by which peers name it.
    pub fn id(&self) -> RegionId {
        self.entry.id
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.entry.memory
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({}, {} bytes)", self.entry.id, self.entry.memory.len())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.environment.regions.remove(self.entry.id);
        for transport in &self.transports {
            transport.deregister(self.entry.id);
        }
        self.entry.lent.recall();
    }
}

/// A region in the book.
pub(crate) struct RegionEntry {
    pub(crate) id: RegionId,
    pub(crate) memory: Arc<Memory>,
    pub(crate) options: RegionOptions,
    /// Which peers have the address of foreign memory.
    pub(crate) lent: Lent,
    keys: Vec<(TransportKind, Vec<u8>)>,
}

impl RegionEntry {
    fn card(&self) -> RegionCard {
        RegionCard {
            id: self.id,
            len_bytes: self.memory.len(),
            place: "host".into(),
            keys: self.keys.clone(),
            peer_writable: self.options.peer_writable,
        }
    }
}

/// Which regions have a role.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Roles {
    pub(crate) kv: Option<RegionId>,
    pub(crate) fence: Option<RegionId>,
}

/// Every region of an agent. Ids are never reused.
#[derive(Default)]
pub(crate) struct Regions {
    book: RwLock<BTreeMap<RegionId, Arc<RegionEntry>>>,
    last: AtomicU32,
}

impl Regions {
    fn next_id(&self) -> RegionId {
        RegionId(self.last.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn insert(&self, entry: Arc<RegionEntry>) -> Result<(), RegisterError> {
        let mut book = self.book.write().unwrap_or_else(PoisonError::into_inner);
        if book.len() >= REGIONS_MAX {
            return Err(RegisterError::TooMany { limit: REGIONS_MAX });
        }
        book.insert(entry.id, entry);
        Ok(())
    }

    fn remove(&self, id: RegionId) {
        // Dropped after the lock: unmapping takes time.
        let _entry = self.book.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// The region of that id.
    pub(crate) fn find(&self, id: RegionId) -> Option<Arc<RegionEntry>> {
        self.book.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// All regions, by id.
    pub(crate) fn all(&self) -> Vec<Arc<RegionEntry>> {
        self.book.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// As they stand in a card.
    pub(crate) fn cards(&self) -> (Vec<RegionCard>, Roles) {
        let all = self.all();
        let with = |role| all.iter().rev().find(|entry| entry.options.role == role).map(|entry| entry.id);
        let roles = Roles { kv: with(RegionRole::Kv), fence: with(RegionRole::Fence) };
        (all.iter().map(|entry| entry.card()).collect(), roles)
    }
}
