//! The book of an agent's regions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use towline_wire::card::{REGIONS_MAX, RegionCard};
use towline_wire::id::RegionId;
use towline_wire::receipt::TransportKind;

use super::config::{RegionOptions, RegionRole};
use super::environment::Environment;
use crate::control::Subscribers;
use crate::region::{Access, Memory, RegisterError};
use crate::transport::Transport;
use crate::transport::shm::Lent;

/// Memory that peers may address, from the moment of its registration: connected peers are told at once. Dropping it
/// deregisters: requests that the owner serves (tcp) are refused from then on with `UnknownRegion`, and peers no longer
/// see it once they were told. A peer that mapped it (shm) can still read the bytes until it has unmapped them: the fence,
/// whose generation the owner changes before it reuses blocks, is the guard there. The memory itself lives until the last
/// transfer and the last served request let go of it; foreign memory also until the last peer of this host has: each is
/// asked to now, and answers within a slice's copy, or when its process ends.
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
            keys.extend(transport.register(id, &memory, access)?.map(|key| (transport.kind(), key)));
        }
        let keys = Mutex::new(keys);
        let entry = Arc::new(RegionEntry { id, memory, options, keys, lent: Lent::default() });
        let region = Self {
            entry: Arc::clone(&entry),
            environment: Arc::clone(environment),
            transports: transports.to_vec(),
        };
        environment.regions.insert(entry)?;
        Subscribers::announce(environment);
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
        Subscribers::announce(&self.environment);
    }
}

/// A region in the book.
pub(crate) struct RegionEntry {
    pub(crate) id: RegionId,
    pub(crate) memory: Arc<Memory>,
    pub(crate) options: RegionOptions,
    /// Which peers have the address of foreign memory.
    pub(crate) lent: Lent,
    keys: Mutex<Vec<(TransportKind, Vec<u8>)>>,
}

impl RegionEntry {
    fn keys(&self) -> MutexGuard<'_, Vec<(TransportKind, Vec<u8>)>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn card(&self) -> RegionCard {
        RegionCard {
            id: self.id,
            len_bytes: self.memory.len(),
            // All memory that can be registered is the host's; device memory will say which device.
            place: "host".into(),
            keys: self.keys().clone(),
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
    book: RwLock<Book>,
    last: AtomicU32,
}

#[derive(Default)]
struct Book {
    entries: BTreeMap<RegionId, Arc<RegionEntry>>,
    /// Keys of regions that are being registered. At most one for each of them and each transport.
    early: Vec<(RegionId, TransportKind, Vec<u8>)>,
    /// Of the card: how often regions came or went.
    revision: u64,
}

impl Regions {
    fn next_id(&self) -> RegionId {
        RegionId(self.last.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn insert(&self, entry: Arc<RegionEntry>) -> Result<(), RegisterError> {
        let mut book = self.book.write().unwrap_or_else(PoisonError::into_inner);
        if book.entries.len() >= REGIONS_MAX {
            return Err(RegisterError::TooMany { limit: REGIONS_MAX });
        }
        for (_, transport, key) in book.early.extract_if(.., |(id, ..)| *id == entry.id) {
            entry.keys().push((transport, key));
        }
        book.entries.insert(entry.id, entry);
        book.revision += 1;
        Ok(())
    }

    /// Adds a transport's keys for regions, which may be on their way here.
    pub(super) fn offer(&self, transport: TransportKind, keys: Vec<(RegionId, Vec<u8>)>) {
        let mut book = self.book.write().unwrap_or_else(PoisonError::into_inner);
        for (id, key) in keys {
            match book.entries.get(&id) {
                Some(entry) => entry.keys().push((transport, key)),
                None => book.early.push((id, transport, key)),
            }
        }
        book.revision += 1;
    }

    fn remove(&self, id: RegionId) {
        let mut book = self.book.write().unwrap_or_else(PoisonError::into_inner);
        let entry = book.entries.remove(&id);
        book.early.retain(|(early, ..)| *early != id);
        book.revision += u64::from(entry.is_some());
        drop(book);
        // Dropped after the lock: unmapping takes time.
        drop(entry);
    }

    /// The region of that id.
    pub(crate) fn find(&self, id: RegionId) -> Option<Arc<RegionEntry>> {
        self.book.read().unwrap_or_else(PoisonError::into_inner).entries.get(&id).cloned()
    }

    /// All regions, by id.
    pub(crate) fn all(&self) -> Vec<Arc<RegionEntry>> {
        self.book.read().unwrap_or_else(PoisonError::into_inner).entries.values().cloned().collect()
    }

    /// How often regions came or went.
    pub(crate) fn revision(&self) -> u64 {
        self.book.read().unwrap_or_else(PoisonError::into_inner).revision
    }

    /// As they stand in a card, with its revision.
    pub(crate) fn cards(&self) -> (Vec<RegionCard>, Roles, u64) {
        let book = self.book.read().unwrap_or_else(PoisonError::into_inner);
        let (all, revision): (Vec<_>, _) = (book.entries.values().cloned().collect(), book.revision);
        drop(book);
        let with = |role| all.iter().rev().find(|entry| entry.options.role == role).map(|entry| entry.id);
        let roles = Roles { kv: with(RegionRole::Kv), fence: with(RegionRole::Fence) };
        (all.iter().map(|entry| entry.card()).collect(), roles, revision)
    }
}
