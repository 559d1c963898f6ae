//! The blocks of the KV region, shared by the engine, which computes into them, and the handoff, which pulls into
//! them and lends them out.
//!
//! A [`KvPool`] hands out [`Blocks`], each with references that end when the value is dropped, so a block can't leak
//! with an error path. Blocks that are full and verified are [published](KvPool::publish) under their
//! [`PrefixKey`]; later prompts that begin with the same tokens find them instead of computing them again, until
//! their memory is needed (least recently used first).
//!
//! Two promises that the unsafe code of the kernels and the transports rests on:
//! - a block that anybody holds is neither evicted nor handed out a second time, except to read a published prefix;
//! - a published block is full, and what is full is never written again.
//!
//! Cost: one short lock an operation, O(1) a block, no copy. A digest is computed when it is first asked for, from
//! one pass over the block, outside the lock.

mod blocks;
mod table;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towline_fabric::Memory;
use towline_wire::digest::BlockDigest;
use towline_wire::prefix::{PrefixHasher, PrefixKey};

pub use blocks::{Blocks, Reservation};
pub use table::{BlockOrder, PoolFull, PoolStats, PrefixCache};

use table::BlockTable;

use crate::model::KvCache;

/// Bytes copied out of the memory at a time to be digested: they stay in the first-level cache.
const DIGEST_PIECE_BYTES: usize = 16 * 1024;

/// How a pool behaves.
#[derive(Clone, Debug, Default)]
pub struct PoolConfig {
    /// Whether prefixes are remembered.
    pub prefix_cache: PrefixCache,
    /// In which order free blocks are handed out.
    pub order: BlockOrder,
    /// Names the KV that this engine computes; part of every prefix key, so equal on engines that share KV.
    pub fingerprint: String,
}

/// The size of a pool's blocks and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks.
    pub blocks: u32,
    /// Tokens in a block.
    pub block_tokens: usize,
    /// Bytes of a block, all layers together, and the distance from one block to the next.
    pub block_bytes: u64,
}

/// The blocks of one KV region. Cheap to clone; every clone is the same pool.
#[derive(Clone, Debug)]
pub struct KvPool {
    shared: Arc<Shared>,
}

struct Shared {
    cache: KvCache,
    fingerprint: String,
    state: Mutex<State>,
}

struct State {
    table: BlockTable,
    /// Called, without the lock, after blocks became available.
    watcher: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvPool").field("stats", &self.state().table.stats()).finish_non_exhaustive()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // The table is consistent between its operations, and none of them panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvPool {
    /// A pool of all blocks of `cache`, free.
    pub fn new(cache: KvCache, config: PoolConfig) -> Self {
        let table = BlockTable::new(cache.blocks(), config.prefix_cache, config.order);
        let state = Mutex::new(State { table, watcher: None });
        Self { shared: Arc::new(Shared { cache, fingerprint: config.fingerprint, state }) }
    }

    /// The blocks' memory and layout.
    pub fn cache(&self) -> &KvCache {
        &self.shared.cache
    }

    /// The memory that the blocks lie in, from its start on.
    pub fn memory(&self) -> &Arc<Memory> {
        self.shared.cache.memory()
    }

    /// Size and number of the blocks.
    pub fn geometry(&self) -> Geometry {
        let cache = &self.shared.cache;
        let (blocks, block_tokens, block_bytes) = (cache.blocks(), cache.block_tokens(), cache.block_bytes());
        Geometry { blocks, block_tokens, block_bytes }
    }

    /// Whether both are the same pool.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Tokens in a block.
    pub fn block_tokens(&self) -> usize {
        self.shared.cache.block_tokens()
    }

    /// Blocks that `tokens` tokens fill, the last one perhaps partly.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens())
    }

    /// Makes the prefix keys of this engine's KV for one tenant's or adapter's `salt`.
    pub fn hasher(&self, salt: &str) -> PrefixHasher {
        PrefixHasher::new(&self.shared.fingerprint, salt)
    }

    /// An empty list of blocks of this pool.
    pub fn empty(&self) -> Blocks {
        Blocks::new(self.clone(), Vec::new())
    }

    /// Reserves `blocks` blocks: the longest cached prefix that `keys` name comes first, the rest is taken free or
    /// from the least recently used cached blocks. Found blocks may be read, never written; the rest is the caller's
    /// alone.
    ///
    /// # Errors
    /// [`PoolFull`] when too few blocks are available; nothing is taken then.
    pub fn reserve(&self, keys: &[PrefixKey], blocks: usize) -> Result<Reservation, PoolFull> {
        let (ids, cached) = self.shared.state().table.reserve(keys, blocks)?;
        Ok(Reservation { blocks: Blocks::new(self.clone(), ids), cached })
    }

    /// How many blocks would still be available after such a reservation. Changes nothing.
    ///
    /// # Errors
    /// [`PoolFull`] when the reservation would fail.
    pub fn headroom(&self, keys: &[PrefixKey], blocks: usize) -> Result<usize, PoolFull> {
        self.shared.state().table.headroom(keys, blocks)
    }

    /// Appends `more` fresh blocks to `blocks`, all or none.
    ///
    /// # Errors
    /// [`PoolFull`] when too few blocks are available.
    pub fn grow(&self, blocks: &mut Blocks, more: usize) -> Result<(), PoolFull> {
        blocks.append(self.reserve(&[], more)?.blocks);
        Ok(())
    }

    /// Makes a full block findable under `key`. Only whoever computed the block, or verified what was pulled into it,
    /// may call this, and only while holding it. When the key is known already, the earlier block stays the found one.
    pub fn publish(&self, block: u32, key: PrefixKey, digest: Option<u64>) {
        self.shared.state().table.publish(block, key, digest);
    }

    /// Whether the block was published since it was handed out: its bytes are computed here or verified.
    pub fn is_verified(&self, block: u32) -> bool {
        self.shared.state().table.is_verified(block)
    }

    /// The digest of a full block that the caller holds: kept, or computed now and kept. `None` when the block lies
    /// outside the memory.
    pub fn digest(&self, block: u32) -> Option<u64> {
        if let Some(digest) = self.shared.state().table.digest(block) {
            return Some(digest);
        }
        let digest = self.computed_digest(block)?;
        self.shared.state().table.set_digest(block, digest);
        Some(digest)
    }

    /// The digest of what a block that the caller holds contains now. `None` when it lies outside the memory.
    pub fn computed_digest(&self, block: u32) -> Option<u64> {
        let Geometry { block_bytes, .. } = self.geometry();
        let mut at = u64::from(block) * block_bytes;
        let end = at + block_bytes;
        let (mut digest, mut piece) = (BlockDigest::default(), [0; DIGEST_PIECE_BYTES]);
        while at < end {
            let left = usize::try_from(end - at).unwrap_or(DIGEST_PIECE_BYTES).min(DIGEST_PIECE_BYTES);
            self.memory().read_into(at, &mut piece[..left]).ok()?;
            digest.update(&piece[..left]);
            at += left as u64;
        }
        Some(digest.finish())
    }

    /// Blocks in each state.
    pub fn stats(&self) -> PoolStats {
        self.shared.state().table.stats()
    }

    /// Calls `watcher` after blocks became available, on the thread that gave them back and without the pool's lock.
    /// It replaces the one before; the engine sets it to wake up when requests wait for memory.
    pub(crate) fn watch(&self, watcher: Arc<dyn Fn() + Send + Sync>) {
        self.shared.state().watcher = Some(watcher);
    }

    /// Stops calling the watcher.
    pub(crate) fn unwatch(&self) {
        self.shared.state().watcher = None;
    }

    fn retain(&self, ids: &[u32]) {
        let mut state = self.shared.state();
        ids.iter().for_each(|id| state.table.retain(*id));
    }

    /// Gives references back, the last block first: the end of a prefix is then evicted before its beginning.
    fn release(&self, ids: &[u32]) {
        if ids.is_empty() {
            return;
        }
        let mut state = self.shared.state();
        let freed = ids.iter().rev().filter(|id| state.table.release(**id)).count();
        let watcher = state.watcher.clone().filter(|_| freed > 0);
        drop(state);
        if let Some(watcher) = watcher {
            watcher();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use towline_wire::layout::{Gqa, KvLayout};

    use towline_wire::digest::block_digest;

    use super::*;

    /// Blocks of 4 tokens and 128 bytes.
    fn pool(blocks: u32) -> KvPool {
        let layout =
            KvLayout::gqa(Gqa { layers: 1, kv_heads: 1, head_dim: 16, element_bytes: 1, block_tokens: 4 });
        let memory = Arc::new(Memory::allocate("pool-test", u64::from(blocks) * 128).unwrap());
        KvPool::new(KvCache::new(memory, &layout).unwrap(), PoolConfig::default())
    }

    #[test]
    fn dropping_blocks_gives_them_back_and_tells_the_watcher() {
        let pool = pool(4);
        let calls = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&calls);
        pool.watch(Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
        let mut reservation = pool.reserve(&[], 2).unwrap();
        let shared = reservation.blocks.share();
        pool.grow(&mut reservation.blocks, 1).unwrap();
        assert_eq!((pool.stats().used, pool.grow(&mut reservation.blocks, 2).is_err()), (3, true));
        drop(reservation);
        assert_eq!((pool.stats().used, calls.load(Ordering::Relaxed)), (2, 1));
        drop(shared);
        assert_eq!((pool.stats().used, calls.load(Ordering::Relaxed)), (0, 2));
        drop(pool.empty());
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_digest_is_computed_once_and_forgotten_with_its_block() {
        let pool = pool(1);
        let reservation = pool.reserve(&[], 1).unwrap();
        let id = reservation.blocks.ids()[0];
        pool.memory().write_from(0, &[7; 128]).unwrap();
        let digest = pool.digest(id);
        assert_eq!(digest, Some(block_digest(&[7; 128])));
        drop(reservation);
        let _again = pool.reserve(&[], 1).unwrap();
        pool.memory().write_from(0, &[8; 128]).unwrap();
        assert_eq!(pool.digest(id), Some(block_digest(&[8; 128])));
    }

    #[test]
    fn threads_that_reserve_and_drop_leave_no_block_behind() {
        let pool = pool(8);
        let keys = pool.hasher("").keys(&(0..16).collect::<Vec<u32>>(), 4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..500 {
                        let Ok(reservation) = pool.reserve(&keys, 1 + round % 4) else { continue };
                        let ids = reservation.blocks.ids();
                        ids.iter().zip(&keys).for_each(|(id, key)| pool.publish(*id, *key, None));
                    }
                });
            }
        });
        let stats = pool.stats();
        assert_eq!((stats.used, stats.free + stats.cached), (0, 8));
    }
}
