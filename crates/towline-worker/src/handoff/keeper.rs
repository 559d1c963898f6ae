//! The owner's half of a handoff: leases on this worker's blocks, their fence slots, and what peers may read.
//!
//! The book of leases is pure (`towline_wire::lease`); here are the clock, the fence memory and the blocks themselves.
//! A lease that ends goes through one function, [`Keeper::end`], in the one order that is safe: new generation into
//! the slot, full fence, then the blocks back to the pool. One thread, `towline-leases`, sleeps until the next expiry.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use towline_fabric::Memory;
use towline_fabric::Owner;
use towline_wire::auth::Identity;
use towline_wire::blocks::Extent;
use towline_wire::fence::{COMPLEMENT_AT, GENERATION_AT, PARTS_AT, SLOT_BYTES};
use towline_wire::frame::Status;
use towline_wire::id::{Generation, LeaseId, RegionId};
use towline_wire::lease::{EndCause, Grant, LeaseError, LeaseTable, Now, Revocation};

use crate::pool::Blocks;

/// How leases ended, and how many are held: for metrics.
#[derive(Debug, Default)]
pub struct LeaseStats {
    /// Leases granted.
    pub granted: AtomicU64,
    /// Ended because every reader had what it wanted.
    pub released: AtomicU64,
    /// Ended because no reader came, or none kept it alive.
    pub expired: AtomicU64,
    /// Taken back at shutdown.
    pub revoked: AtomicU64,
}

/// Leases of one worker.
pub(super) struct Keeper {
    book: Mutex<Book>,
    changed: Condvar,
    fences: Arc<Memory>,
    kv_region: OnceLock<RegionId>,
    block_bytes: u64,
    ttl: Duration,
    started: Instant,
    stats: Arc<LeaseStats>,
}

struct Book {
    table: LeaseTable,
    held: HashMap<LeaseId, Blocks>,
    stopping: bool,
}

impl Keeper {
    /// A keeper with one fence slot for every [`SLOT_BYTES`] of `fences`, granting leases of `ttl`.
    pub(super) fn new(fences: Arc<Memory>, block_bytes: u64, ttl: Duration) -> Self {
        let slots = u32::try_from(fences.len() / SLOT_BYTES).unwrap_or(u32::MAX);
        Self {
            book: Mutex::new(Book { table: LeaseTable::new(slots), held: HashMap::new(), stopping: false }),
            changed: Condvar::new(),
            fences,
            kv_region: OnceLock::new(),
            block_bytes,
            ttl,
            started: Instant::now(),
            stats: Arc::default(),
        }
    }

    /// Tells which region holds the blocks; until then every read is refused.
    pub(super) fn serve(&self, kv_region: RegionId) {
        _ = self.kv_region.set(kv_region);
    }

    pub(super) fn stats(&self) -> &Arc<LeaseStats> {
        &self.stats
    }

    /// Leases held now.
    pub(super) fn held(&self) -> usize {
        self.book().table.len()
    }

    /// How long a lease lasts without a heartbeat.
    pub(super) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Lends `blocks` to one reader. The slot shows the generation before the grant is known to anyone.
    pub(super) fn grant(&self, blocks: Blocks) -> Result<Grant, LeaseError> {
        let now = self.now();
        let mut book = self.book();
        let earliest = book.table.next_expiry();
        let grant = book.table.grant(now, blocks.ids().to_vec(), 1, self.ttl)?;
        self.store(grant.slot, grant.generation, 1);
        book.held.insert(grant.lease, blocks);
        drop(book);
        self.stats.granted.fetch_add(1, Ordering::Relaxed);
        if earliest.is_none_or(|earliest| grant.expires < earliest) {
            self.changed.notify_all();
        }
        Ok(grant)
    }

    /// Ends leases as they expire, until [`Keeper::stop`]. Runs on a thread of its own.
    pub(super) fn run_expiry(&self) {
        let mut book = self.book();
        while !book.stopping {
            let now = self.now();
            if let Some(over) = book.table.poll_expired(now) {
                let blocks = book.held.remove(&over.lease);
                drop(book);
                self.end(over, blocks);
                book = self.book();
                continue;
            }
            book = match book.table.next_expiry() {
                None => self.changed.wait(book).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let wait = at.saturating_sub(now);
                    self.changed.wait_timeout(book, wait).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Takes every lease back and ends the expiry thread.
    pub(super) fn stop(&self) {
        let mut book = self.book();
        book.stopping = true;
        let leases: Vec<LeaseId> = book.held.keys().copied().collect();
        let over: Vec<_> = leases
            .into_iter()
            .filter_map(|lease| Some((book.table.revoke(lease)?, book.held.remove(&lease))))
            .collect();
        drop(book);
        self.changed.notify_all();
        over.into_iter().for_each(|(over, blocks)| self.end(over, blocks));
    }

    /// The only way out of a lease. The blocks are still held while the slot changes, and go back after the fence.
    fn end(&self, over: Revocation, blocks: Option<Blocks>) {
        let cause = over.cause;
        let lease = over.lease;
        let ids = over.fenced(|slot, generation| self.store(slot, generation, 0));
        debug_assert_eq!(blocks.as_ref().map_or(0, Blocks::len), ids.len());
        drop(blocks);
        let counter = match cause {
            EndCause::Released => &self.stats.released,
            EndCause::Expired => &self.stats.expired,
            EndCause::Revoked => &self.stats.revoked,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if cause == EndCause::Expired {
            tracing::warn!(target: "kv_lease", %lease, blocks = ids.len(), "lease expired: no decode worker came for it in time");
        }
    }

    fn store(&self, slot: u32, generation: Generation, parts: u64) {
        let at = u64::from(slot) * SLOT_BYTES;
        let words = [(PARTS_AT, parts), (COMPLEMENT_AT, !generation.0), (GENERATION_AT, generation.0)];
        for (offset, word) in words {
            let stored = self.fences.store_u64(at + offset, word);
            debug_assert!(stored.is_ok(), "the table has as many slots as the memory");
        }
        fence(Ordering::SeqCst);
    }

    fn now(&self) -> Now {
        self.started.elapsed()
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Every operation leaves the book whole; none panics half-way.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touched(&self, extent: &Extent) -> impl Iterator<Item = u32> + use<> {
        let first = extent.offset / self.block_bytes;
        let last = (extent.offset + extent.len - 1) / self.block_bytes;
        (first..=last).map(|block| u32::try_from(block).unwrap_or(u32::MAX))
    }
}

impl Owner for Keeper {
    fn admit(
        &self,
        region: RegionId,
        lease: Option<(LeaseId, Generation)>,
        extents: &[Extent],
    ) -> Result<(), Status> {
        if self.kv_region.get() != Some(&region) {
            return Ok(()); // Fence slots and probes: no lease, bounds are the agent's.
        }
        let Some((lease, generation)) = lease else { return Err(Status::LeaseRequired) };
        let blocks = extents.iter().flat_map(|extent| self.touched(extent));
        self.book().table.check(lease, generation, blocks).map_err(|_| Status::LeaseExpired)
    }

    fn handle_release(
        &self,
        _peer: &Identity,
        lease: LeaseId,
        generation: Generation,
    ) -> Result<(), LeaseError> {
        let mut book = self.book();
        let over = book.table.release(lease, generation)?;
        let blocks = over.as_ref().and_then(|over| book.held.remove(&over.lease));
        drop(book);
        if let Some(over) = over {
            self.end(over, blocks);
        }
        Ok(())
    }

    fn handle_heartbeat(&self, _peer: &Identity, leases: &[LeaseId]) {
        let now = self.now();
        let mut book = self.book();
        for lease in leases {
            // A lease that is over is no news: its reader learns it from the fence.
            _ = book.table.extend(now, *lease, self.ttl);
        }
    }

    fn handle_notify(&self, peer: &Identity, payload: Vec<u8>) {
        tracing::debug!(peer = %peer.agent, bytes = payload.len(), "notification ignored: this worker expects none");
    }

    fn handle_peer_gone(&self, peer: &Identity) {
        tracing::debug!(peer = %peer.agent, "peer is gone; its leases end by expiry");
    }
}

#[cfg(test)]
mod tests {
    use towline_wire::fence::Fence;
    use towline_wire::id::{AgentName, BootEpoch};
    use towline_wire::layout::{Gqa, KvLayout};

    use super::*;
    use crate::model::KvCache;
    use crate::pool::{KvPool, PoolConfig};

    /// K and V of one head, 4 tokens of 16 f16 each.
    const BLOCK_BYTES: u64 = 256;

    fn fixture(ttl: Duration) -> (KvPool, Arc<Memory>, Arc<Keeper>) {
        let layout =
            KvLayout::gqa(Gqa { layers: 1, kv_heads: 1, head_dim: 16, element_bytes: 2, block_tokens: 4 });
        let memory = Arc::new(Memory::allocate("keeper-kv", 8 * BLOCK_BYTES).unwrap());
        let pool = KvPool::new(KvCache::new(memory, &layout).unwrap(), PoolConfig::default());
        let fences = Arc::new(Memory::allocate("keeper-fences", 4 * SLOT_BYTES).unwrap());
        let keeper = Arc::new(Keeper::new(Arc::clone(&fences), BLOCK_BYTES, ttl));
        keeper.serve(RegionId(1));
        (pool, fences, keeper)
    }

    fn fence_of(fences: &Memory, slot: u32) -> Fence {
        let mut bytes = [0; 24];
        fences.read_into(u64::from(slot) * SLOT_BYTES, &mut bytes).unwrap();
        Fence::decode(&bytes).unwrap()
    }

    fn peer() -> Identity {
        Identity { agent: AgentName::new("d").unwrap(), boot_epoch: BootEpoch(1) }
    }

    #[test]
    fn a_release_changes_the_slot_and_returns_the_blocks() {
        let (pool, fences, keeper) = fixture(Duration::from_secs(60));
        let grant = keeper.grant(pool.reserve(&[], 3).unwrap().blocks).unwrap();
        assert_eq!(fence_of(&fences, grant.slot), Fence { generation: grant.generation, parts_ready: 1 });
        assert_eq!(pool.stats().used, 3);
        keeper.handle_release(&peer(), grant.lease, grant.generation).unwrap();
        assert_ne!(fence_of(&fences, grant.slot).generation, grant.generation);
        assert_eq!(pool.stats().used, 0);
        assert!(keeper.handle_release(&peer(), grant.lease, grant.generation).is_err(), "a lease ends once");
    }

    #[test]
    fn a_reader_sees_only_the_blocks_of_its_live_lease() {
        let (pool, _, keeper) = fixture(Duration::from_secs(60));
        let blocks = pool.reserve(&[], 1).unwrap().blocks;
        let mine = u64::from(blocks.ids()[0]) * BLOCK_BYTES;
        let grant = keeper.grant(blocks).unwrap();
        let ask = |lease, offset, len| keeper.admit(RegionId(1), lease, &[Extent { offset, len }]);
        let lease = Some((grant.lease, grant.generation));
        assert_eq!(ask(lease, mine, BLOCK_BYTES), Ok(()));
        assert_eq!(
            ask(lease, mine, BLOCK_BYTES + 1),
            Err(Status::LeaseExpired),
            "one byte into the next block"
        );
        assert_eq!(ask(None, mine, 64), Err(Status::LeaseRequired));
        assert_eq!(ask(Some((grant.lease, Generation(99))), mine, 64), Err(Status::LeaseExpired));
        keeper.stop();
        assert_eq!(ask(lease, mine, BLOCK_BYTES), Err(Status::LeaseExpired));
    }

    #[test]
    fn a_lease_that_no_one_comes_for_expires_and_frees_its_blocks() {
        let (pool, fences, keeper) = fixture(Duration::from_millis(30));
        let (freed, wait) = std::sync::mpsc::channel();
        pool.watch(Arc::new(move || _ = freed.send(())));
        let runner = Arc::clone(&keeper);
        let thread = std::thread::spawn(move || runner.run_expiry());
        let grant = keeper.grant(pool.reserve(&[], 2).unwrap().blocks).unwrap();
        wait.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!((pool.stats().used, keeper.held()), (0, 0));
        assert_ne!(fence_of(&fences, grant.slot).generation, grant.generation);
        keeper.stop();
        thread.join().unwrap();
    }
}
