//! The owner's half of a handoff: leases on blocks, their fence slots, and what peers may read.
//!
//! The book of leases is pure (`towline_wire::engine_lease`); here are the clock, the fence memory and what keeps the
//! blocks from being reused. It is kept for an engine of one or more ranks, each with an agent, a region and fence
//! slots of its own. A lease that ends goes through one function, [`Keeper::end`], in the one order that is safe: on
//! every rank the new generation into the slot, full fence, then the blocks back to their pool. One thread,
//! `towline-leases`, sleeps until the next expiry.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use towline_fabric::Memory;
use towline_fabric::Owner;
use towline_wire::auth::Identity;
use towline_wire::blocks::Extent;
use towline_wire::engine_card::EngineCard;
use towline_wire::engine_lease::{
    EngineLease, EngineLeaseError, EngineLeases, EngineRevocation, EngineTerms, RankTerms,
};
use towline_wire::fence::{COMPLEMENT_AT, GENERATION_AT, PARTS_AT, SLOT_BYTES};
use towline_wire::frame::Status;
use towline_wire::id::{Generation, LeaseId, RegionId};
use towline_wire::lease::{EndCause, Grant, LeaseError, Now, Readers};

use super::places::{GroupMemory, Places};

/// How leases ended, and how many are held: for metrics.
#[derive(Debug, Default)]
pub struct LeaseStats {
    /// Leases granted.
    pub granted: AtomicU64,
    /// Ended because every reader had what it wanted.
    pub released: AtomicU64,
    /// Ended because no reader came, or none kept it alive.
    pub expired: AtomicU64,
    /// Taken back: at shutdown, or because the KV never was complete.
    pub revoked: AtomicU64,
}

/// Whatever keeps lent blocks from being reused; dropped when every slot of its lease is fenced.
pub type Hold = Box<dyn Any + Send>;

/// One rank's memory, as far as leases are concerned.
#[derive(Clone, Debug)]
pub struct RankMemory {
    /// The fence slots.
    pub fences: Arc<Memory>,
    /// Where its blocks lie, for each group of its engine's layout, in order.
    pub groups: Vec<GroupMemory>,
}

/// What one rank lends.
#[derive(Debug, Default)]
pub(super) struct RankLoan<'a> {
    /// For each group the sequence's blocks.
    pub(super) blocks: Vec<&'a [u32]>,
    pub(super) parts_ready: u32,
}

/// Leases of one engine.
pub struct Keeper {
    book: Mutex<Book>,
    changed: Condvar,
    ranks: Vec<Seat>,
    card: OnceLock<EngineCard>,
    ttl: Duration,
    started: Instant,
    stats: Arc<LeaseStats>,
}

struct Seat {
    fences: Arc<Memory>,
    places: Places,
    kv_region: OnceLock<RegionId>,
}

struct Book {
    leases: EngineLeases,
    held: HashMap<LeaseId, Hold>,
    stopping: bool,
}

/// What the agent of one rank asks its engine's [`Keeper`].
struct RankOwner {
    keeper: Arc<Keeper>,
    rank: u32,
}

impl Keeper {
    /// A keeper for ranks with one fence slot for every [`SLOT_BYTES`] of their `fences`, granting leases of `ttl`.
    pub fn new(ranks: Vec<RankMemory>, ttl: Duration) -> Self {
        let slots = ranks.iter().map(|rank| rank.fences.len() / SLOT_BYTES).min().unwrap_or(0);
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        let count = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let seat = |RankMemory { fences, groups }| Seat {
            fences,
            places: Places::new(&groups),
            kv_region: OnceLock::new(),
        };
        Self {
            book: Mutex::new(Book {
                leases: EngineLeases::new(count, slots),
                held: HashMap::new(),
                stopping: false,
            }),
            changed: Condvar::new(),
            ranks: ranks.into_iter().map(seat).collect(),
            card: OnceLock::new(),
            ttl,
            started: Instant::now(),
            stats: Arc::default(),
        }
    }

    /// What the agent of `rank` is to be started with. Until [`Keeper::serve`] every read of its blocks is refused.
    pub fn owner(self: &Arc<Self>, rank: u32) -> Arc<dyn Owner> {
        Arc::new(RankOwner { keeper: Arc::clone(self), rank })
    }

    /// Tells which of the rank's regions holds its blocks.
    pub fn serve(&self, rank: u32, kv_region: RegionId) {
        if let Some(seat) = self.ranks.get(rank as usize) {
            _ = seat.kv_region.set(kv_region);
        }
    }

    /// Tells what the ranks' agents answer to peers that ask for the engine's card; the first one stays. Until then there
    /// is none.
    pub fn introduce(&self, card: EngineCard) {
        _ = self.card.set(card);
    }

    /// Starts the thread that ends leases as they expire; it ends after [`Keeper::stop`].
    ///
    /// # Errors
    /// The system gives no more threads.
    pub fn start_expiry(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        let keeper = Arc::clone(self);
        std::thread::Builder::new().name("towline-leases".into()).spawn(move || keeper.run_expiry())
    }

    /// How leases ended.
    pub fn stats(&self) -> &Arc<LeaseStats> {
        &self.stats
    }

    /// Leases held now.
    pub fn held(&self) -> usize {
        self.book().leases.len()
    }

    /// How long a lease lasts without a heartbeat.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Lends the ranks' blocks to `readers`. Every slot shows its generation before the grant is known to anyone.
    pub(super) fn grant(
        &self,
        ranks: &[RankLoan<'_>],
        readers: Readers,
        hold: Hold,
    ) -> Result<EngineLease, EngineLeaseError> {
        let terms = self.ranks.iter().zip(ranks).map(|(seat, loan)| {
            let groups = loan.blocks.iter().enumerate();
            let blocks = groups.flat_map(|(group, blocks)| seat.places.numbers(group, blocks)).collect();
            RankTerms { blocks, parts_ready: loan.parts_ready }
        });
        let terms = EngineTerms { ranks: terms.collect(), readers, ttl: self.ttl };
        let now = self.now();
        let mut book = self.book();
        let earliest = book.leases.next_expiry();
        let lease = book.leases.grant(now, terms)?;
        for ((seat, grant), loan) in self.ranks.iter().zip(&lease.ranks).zip(ranks) {
            seat.show(grant.slot, grant.generation, loan.parts_ready);
        }
        book.held.insert(lease.lease, hold);
        drop(book);
        self.stats.granted.fetch_add(1, Ordering::Relaxed);
        if earliest.is_none_or(|earliest| now.saturating_add(self.ttl) < earliest) {
            self.changed.notify_all();
        }
        Ok(lease)
    }

    /// Counts `parts_ready` parts as ready on `rank`, whose data was stored before this call, and keeps the lease: its
    /// owner is at work for it. The count is stored under the book's lock, with release order.
    pub(super) fn mark(&self, rank: u32, grant: &Grant, parts_ready: u32) -> Result<(), LeaseError> {
        let now = self.now();
        let over = LeaseError::Over { lease: grant.lease };
        let seat = self.ranks.get(rank as usize).ok_or(over)?;
        let mut book = self.book();
        book.leases.mark(rank, grant, parts_ready, |slot, parts| seat.count(slot, parts))?;
        book.leases.keep(now, grant.lease, self.ttl)
    }

    /// Takes a lease back, if it is not over.
    pub(super) fn revoke(&self, lease: LeaseId) {
        let mut book = self.book();
        let over = book.leases.revoke(lease);
        let hold = book.held.remove(&lease);
        drop(book);
        if let Some(over) = over {
            self.end(over, hold);
        }
    }

    fn run_expiry(&self) {
        let mut book = self.book();
        while !book.stopping {
            let now = self.now();
            if let Some(over) = book.leases.poll_expired(now) {
                let hold = book.held.remove(&over.lease);
                drop(book);
                self.end(over, hold);
                book = self.book();
                continue;
            }
            book = match book.leases.next_expiry() {
                None => self.changed.wait(book).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let wait = at.saturating_sub(now);
                    self.changed.wait_timeout(book, wait).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Takes every lease back and ends the expiry thread.
    pub fn stop(&self) {
        let mut book = self.book();
        book.stopping = true;
        let leases: Vec<LeaseId> = book.held.keys().copied().collect();
        let over: Vec<_> = leases
            .into_iter()
            .filter_map(|lease| Some((book.leases.revoke(lease)?, book.held.remove(&lease))))
            .collect();
        drop(book);
        self.changed.notify_all();
        over.into_iter().for_each(|(over, hold)| self.end(over, hold));
    }

    /// The only way out of a lease. The blocks are still held while the slots change, and go back after the fences.
    fn end(&self, over: EngineRevocation, hold: Option<Hold>) {
        let EngineRevocation { lease, cause, readers, ranks } = over;
        for (seat, over) in self.ranks.iter().zip(ranks) {
            _ = over.fenced(|slot, generation| seat.show(slot, generation, 0));
        }
        drop(hold);
        let counter = match cause {
            EndCause::Released => &self.stats.released,
            EndCause::Expired => &self.stats.expired,
            EndCause::Revoked => &self.stats.revoked,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if cause == EndCause::Expired {
            let readers: Vec<&str> = readers.iter().map(|reader| reader.as_str()).collect();
            tracing::warn!(target: "kv_lease", %lease, ?readers, "lease expired: its readers did not release it, or nobody came for it in time");
        }
    }

    fn now(&self) -> Now {
        self.started.elapsed()
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Every operation leaves the book whole; none panics half-way.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Stores what a slot shows: parts and complement before the generation, so that who sees a generation sees its own.
    fn show(&self, slot: u32, generation: Generation, parts: u32) {
        let words =
            [(PARTS_AT, u64::from(parts)), (COMPLEMENT_AT, !generation.0), (GENERATION_AT, generation.0)];
        for (offset, word) in words {
            self.store(slot, offset, word);
        }
        fence(Ordering::SeqCst);
    }

    /// Stores a slot's count, after all that this thread has stored before.
    fn count(&self, slot: u32, parts: u32) {
        self.store(slot, PARTS_AT, u64::from(parts));
    }

    fn store(&self, slot: u32, offset: u64, word: u64) {
        let stored = self.fences.store_u64(u64::from(slot) * SLOT_BYTES + offset, word);
        debug_assert!(stored.is_ok(), "the table has as many slots as the memory");
    }
}

impl Owner for RankOwner {
    fn admit(
        &self,
        region: RegionId,
        lease: Option<(LeaseId, Generation)>,
        extents: &[Extent],
    ) -> Result<(), Status> {
        let Some(seat) = self.keeper.ranks.get(self.rank as usize) else { return Err(Status::UnknownRegion) };
        if seat.kv_region.get() != Some(&region) {
            return Ok(()); // Fence slots and probes: no lease, bounds are the agent's.
        }
        let Some((lease, generation)) = lease else { return Err(Status::LeaseRequired) };
        let blocks = extents.iter().flat_map(|extent| seat.places.touched(extent));
        let book = self.keeper.book();
        let table = book.leases.rank(self.rank).ok_or(Status::UnknownRegion)?;
        table.check(lease, generation, blocks).map_err(|_| Status::LeaseExpired)
    }

    fn handle_release(
        &self,
        peer: &Identity,
        lease: LeaseId,
        generation: Generation,
    ) -> Result<(), LeaseError> {
        let mut book = self.keeper.book();
        let over = book.leases.release(self.rank, (lease, generation), &peer.agent)?;
        let hold = over.as_ref().and_then(|over| book.held.remove(&over.lease));
        drop(book);
        if let Some(over) = over {
            self.keeper.end(over, hold);
        }
        Ok(())
    }

    fn handle_heartbeat(&self, peer: &Identity, leases: &[LeaseId]) {
        let now = self.keeper.now();
        let mut book = self.keeper.book();
        for lease in leases {
            // A lease that is over is no news: its reader learns it from the fence.
            _ = book.leases.extend(now, *lease, &peer.agent, self.keeper.ttl);
        }
    }

    fn handle_notify(&self, peer: &Identity, payload: Vec<u8>) {
        tracing::debug!(peer = %peer.agent, bytes = payload.len(), "notification ignored: this worker expects none");
    }

    fn engine_card(&self) -> Option<EngineCard> {
        self.keeper.card.get().cloned()
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
    use towline_wire::reshard::Array;

    use super::*;
    use crate::model::KvCache;
    use crate::pool::{Blocks, KvPool, PoolConfig};

    /// K and V of one head, 4 tokens of 16 f16 each.
    const BLOCK_BYTES: u64 = 256;

    fn fixture(ttl: Duration) -> (KvPool, Arc<Memory>, Arc<Keeper>) {
        let layout =
            KvLayout::gqa(Gqa { layers: 1, kv_heads: 1, head_dim: 16, element_bytes: 2, block_tokens: 4 });
        let memory = Arc::new(Memory::allocate("keeper-kv", 8 * BLOCK_BYTES).unwrap());
        let pool = KvPool::new(KvCache::new(memory, &layout).unwrap(), PoolConfig::default());
        let fences = Arc::new(Memory::allocate("keeper-fences", 4 * SLOT_BYTES).unwrap());
        let groups = vec![GroupMemory { arrays: vec![Array { base: 0, stride: BLOCK_BYTES }], blocks: 8 }];
        let keeper = Arc::new(Keeper::new(vec![RankMemory { fences: Arc::clone(&fences), groups }], ttl));
        keeper.serve(0, RegionId(1));
        (pool, fences, keeper)
    }

    /// Lends computed blocks to one reader.
    fn lend(keeper: &Keeper, blocks: Blocks) -> Grant {
        lend_with(keeper, blocks, 1)
    }

    fn lend_with(keeper: &Keeper, blocks: Blocks, parts_ready: u32) -> Grant {
        let ids = blocks.ids().to_vec();
        let loan = RankLoan { blocks: vec![&ids], parts_ready };
        keeper.grant(&[loan], Readers::First(1), Box::new(blocks)).unwrap().ranks[0]
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
        let grant = lend(&keeper, pool.reserve(&[], 3).unwrap().blocks);
        assert_eq!(fence_of(&fences, grant.slot), Fence { generation: grant.generation, parts_ready: 1 });
        assert_eq!(pool.stats().used, 3);
        keeper.owner(0).handle_release(&peer(), grant.lease, grant.generation).unwrap();
        assert_ne!(fence_of(&fences, grant.slot).generation, grant.generation);
        assert_eq!(pool.stats().used, 0);
        assert!(
            keeper.owner(0).handle_release(&peer(), grant.lease, grant.generation).is_err(),
            "a lease ends once"
        );
    }

    #[test]
    fn parts_are_counted_in_the_slot_of_their_own_lease_only() {
        let (pool, fences, keeper) = fixture(Duration::from_secs(60));
        let grant = lend_with(&keeper, pool.reserve(&[], 1).unwrap().blocks, 0);
        keeper.mark(0, &grant, 2).unwrap();
        assert_eq!(fence_of(&fences, grant.slot), Fence { generation: grant.generation, parts_ready: 2 });
        keeper.revoke(grant.lease);
        assert_eq!((fence_of(&fences, grant.slot).parts_ready, pool.stats().used), (0, 0));
        let next = lend_with(&keeper, pool.reserve(&[], 1).unwrap().blocks, 0);
        assert_eq!(next.slot, grant.slot);
        assert!(keeper.mark(0, &grant, 3).is_err());
        assert_eq!(fence_of(&fences, next.slot), Fence { generation: next.generation, parts_ready: 0 });
    }

    #[test]
    fn a_reader_sees_only_the_blocks_of_its_live_lease() {
        let (pool, _, keeper) = fixture(Duration::from_secs(60));
        let blocks = pool.reserve(&[], 1).unwrap().blocks;
        let mine = u64::from(blocks.ids()[0]) * BLOCK_BYTES;
        let grant = lend(&keeper, blocks);
        let ask = |lease, offset, len| keeper.owner(0).admit(RegionId(1), lease, &[Extent { offset, len }]);
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
        let thread = keeper.start_expiry().unwrap();
        let grant = lend(&keeper, pool.reserve(&[], 2).unwrap().blocks);
        wait.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!((pool.stats().used, keeper.held()), (0, 0));
        assert_ne!(fence_of(&fences, grant.slot).generation, grant.generation);
        keeper.stop();
        thread.join().unwrap();
    }
}
