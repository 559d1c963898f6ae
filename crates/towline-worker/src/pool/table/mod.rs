//! Who holds which block: the pool's bookkeeping, pure, without lock or memory.
//!
//! A block is in exactly one of three states, told by its references and its key:
//!
//! | state  | references | key         | where it is listed            |
//! |--------|------------|-------------|-------------------------------|
//! | free   | 0          | none        | `free`                        |
//! | used   | 1 or more  | none or one | nowhere (`found` if it has a key) |
//! | cached | 0          | one         | `found` and the idle list     |
//!
//! Only free blocks and the longest idle cached ones are handed out, so a block that someone holds is never reused.
//! Every operation on one block is O(1): the idle list is doubly linked through the entries themselves.

use std::collections::HashMap;

use thiserror::Error;
use towline_wire::prefix::PrefixKey;

/// In which order free blocks are handed out. Answers must not depend on it; tests shuffle to prove so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockOrder {
    /// Lowest first while fresh, then last freed first: neighbours make long runs on the wire.
    #[default]
    Sequential,
    /// Drawn at random from the free blocks, the same for equal seeds.
    Shuffled(u64),
}

/// Whether full blocks are remembered for later prompts with the same beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixCache {
    /// They are, until their memory is needed.
    #[default]
    On,
    /// Every prompt is computed whole.
    Off,
}

/// How the pool's blocks are used now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// All blocks.
    pub total: usize,
    /// Blocks that hold nothing.
    pub free: usize,
    /// Blocks that nobody holds and the prefix cache remembers.
    pub cached: usize,
    /// Blocks that someone holds.
    pub used: usize,
    /// Blocks found in the prefix cache since the start.
    pub hits: u64,
    /// Cached blocks whose memory was taken for others since the start.
    pub evictions: u64,
}

impl PoolStats {
    /// Blocks that could be handed out now: free ones and cached ones.
    pub fn available(&self) -> usize {
        self.free + self.cached
    }
}

/// Too few blocks are free or evictable: wait until some are given back, or ask for fewer.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{needed} KV blocks are needed, {available} of {total} are available")]
pub struct PoolFull {
    /// Blocks asked for beyond those found in the prefix cache.
    pub needed: usize,
    /// Blocks that are free or could be evicted.
    pub available: usize,
    /// Blocks of the pool.
    pub total: usize,
}

/// No neighbour in the idle list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    references: u32,
    key: Option<PrefixKey>,
    digest: Option<u64>,
    verified: bool,
    older: u32,
    newer: u32,
}

const EMPTY: Entry =
    Entry { references: 0, key: None, digest: None, verified: false, older: NONE, newer: NONE };

/// The state of every block of a pool.
#[derive(Debug)]
pub(super) struct BlockTable {
    entries: Vec<Entry>,
    free: Vec<u32>,
    found: HashMap<PrefixKey, u32>,
    cache: PrefixCache,
    shuffle: Option<u64>,
    oldest: u32,
    newest: u32,
    idle: usize,
    hits: u64,
    evictions: u64,
}

impl BlockTable {
    /// A table of `blocks` free blocks, numbered from 0.
    pub(super) fn new(blocks: u32, cache: PrefixCache, order: BlockOrder) -> Self {
        let shuffle = match order {
            BlockOrder::Sequential => None,
            BlockOrder::Shuffled(seed) => Some(seed),
        };
        Self {
            entries: vec![EMPTY; blocks as usize],
            free: (0..blocks).rev().collect(),
            found: HashMap::new(),
            cache,
            shuffle,
            oldest: NONE,
            newest: NONE,
            idle: 0,
            hits: 0,
            evictions: 0,
        }
    }

    /// Blocks in each state.
    pub(super) fn stats(&self) -> PoolStats {
        let (total, free, cached) = (self.entries.len(), self.free.len(), self.idle);
        let used = total - free - cached;
        PoolStats { total, free, cached, used, hits: self.hits, evictions: self.evictions }
    }

    /// How many would still be available after [`BlockTable::reserve`] with the same arguments.
    ///
    /// # Errors
    /// [`PoolFull`] when the reservation would fail.
    pub(super) fn headroom(&self, keys: &[PrefixKey], blocks: usize) -> Result<usize, PoolFull> {
        let hits = self.leading(keys, blocks);
        // Idle blocks that are found leave the idle list, so they can't be evicted for the others.
        let revived = hits.iter().filter(|id| self.entry(**id).references == 0).count();
        let (needed, available) = (blocks - hits.len(), self.stats().available() - revived);
        available.checked_sub(needed).ok_or(PoolFull { needed, available, total: self.entries.len() })
    }

    /// Takes references on `blocks` blocks: first those that the cache finds for the leading `keys`, then others.
    /// Returns the blocks in order and how many were found. All or nothing.
    ///
    /// # Errors
    /// [`PoolFull`] when too few blocks are available; nothing has changed then.
    pub(super) fn reserve(
        &mut self,
        keys: &[PrefixKey],
        blocks: usize,
    ) -> Result<(Vec<u32>, usize), PoolFull> {
        self.headroom(keys, blocks)?;
        let mut ids = self.leading(keys, blocks);
        let cached = ids.len();
        for id in &ids {
            self.retain(*id);
        }
        self.hits += cached as u64;
        while ids.len() < blocks {
            // `headroom` counted them, and nothing came between.
            let Some(id) = self.take() else { break };
            ids.push(id);
        }
        debug_assert_eq!(ids.len(), blocks);
        Ok((ids, cached))
    }

    /// Takes one more reference on a block that is used or cached.
    pub(super) fn retain(&mut self, id: u32) {
        let Some(entry) = self.entries.get(id as usize) else { return };
        debug_assert!(entry.references > 0 || entry.key.is_some(), "block {id} is free");
        if entry.references == 0 && entry.key.is_some() {
            self.unlink(id);
        }
        self.entry_mut(id).references += 1;
    }

    /// Gives one reference back. The last one makes the block cached or free: true then.
    pub(super) fn release(&mut self, id: u32) -> bool {
        let entry = self.entry_mut(id);
        debug_assert!(entry.references > 0, "block {id} is released too often");
        entry.references = entry.references.saturating_sub(1);
        if entry.references > 0 {
            return false;
        }
        if entry.key.is_some() {
            self.link(id);
        } else {
            *entry = EMPTY;
            self.free.push(id);
        }
        true
    }

    /// Makes a used, full and verified block findable. When another block has the key already, that one stays.
    pub(super) fn publish(&mut self, id: u32, key: PrefixKey, digest: Option<u64>) {
        let held = self.entries.get_mut(id as usize).filter(|entry| entry.references > 0);
        debug_assert!(held.is_some(), "block {id} is published by someone who doesn't hold it");
        let Some(entry) = held else { return };
        entry.verified = true;
        entry.digest = digest.or(entry.digest);
        if self.cache == PrefixCache::On && entry.key.is_none() && !self.found.contains_key(&key) {
            entry.key = Some(key);
            self.found.insert(key, id);
        }
    }

    /// Whether the block was published by whoever computed or verified it.
    pub(super) fn is_verified(&self, id: u32) -> bool {
        self.entries.get(id as usize).is_some_and(|entry| entry.verified)
    }

    /// The digest kept with a full block.
    pub(super) fn digest(&self, id: u32) -> Option<u64> {
        self.entries.get(id as usize)?.digest
    }

    /// Keeps the digest of a used, full block.
    pub(super) fn set_digest(&mut self, id: u32, digest: u64) {
        if let Some(entry) = self.entries.get_mut(id as usize).filter(|entry| entry.references > 0) {
            entry.digest = Some(digest);
        }
    }

    /// The blocks of the longest cached prefix, at most `limit`.
    fn leading(&self, keys: &[PrefixKey], limit: usize) -> Vec<u32> {
        keys.iter().take(limit).map_while(|key| self.found.get(key).copied()).collect()
    }

    /// Hands out a free block, else the longest idle cached one, with one reference.
    fn take(&mut self) -> Option<u32> {
        let id = match self.pop_free() {
            Some(id) => id,
            None => self.evict()?,
        };
        *self.entry_mut(id) = Entry { references: 1, ..EMPTY };
        Some(id)
    }

    fn pop_free(&mut self) -> Option<u32> {
        if let (Some(state), 2..) = (self.shuffle.as_mut(), self.free.len()) {
            *state = split_mix(*state);
            let at = usize::try_from(*state % self.free.len() as u64).unwrap_or(0);
            return Some(self.free.swap_remove(at));
        }
        self.free.pop()
    }

    fn evict(&mut self) -> Option<u32> {
        let id = self.oldest;
        if id == NONE {
            return None;
        }
        self.unlink(id);
        if let Some(key) = self.entry_mut(id).key.take() {
            self.found.remove(&key);
        }
        self.evictions += 1;
        Some(id)
    }

    /// Puts a block at the newest end of the idle list.
    fn link(&mut self, id: u32) {
        let newest = self.newest;
        let entry = self.entry_mut(id);
        (entry.older, entry.newer) = (newest, NONE);
        if newest == NONE {
            self.oldest = id;
        } else {
            self.entry_mut(newest).newer = id;
        }
        self.newest = id;
        self.idle += 1;
    }

    fn unlink(&mut self, id: u32) {
        let Entry { older, newer, .. } = *self.entry(id);
        if older == NONE {
            self.oldest = newer;
        } else {
            self.entry_mut(older).newer = newer;
        }
        if newer == NONE {
            self.newest = older;
        } else {
            self.entry_mut(newer).older = older;
        }
        let entry = self.entry_mut(id);
        (entry.older, entry.newer) = (NONE, NONE);
        self.idle -= 1;
    }

    fn entry(&self, id: u32) -> &Entry {
        &self.entries[id as usize]
    }

    fn entry_mut(&mut self, id: u32) -> &mut Entry {
        &mut self.entries[id as usize]
    }
}

/// One step of SplitMix64 (Steele, Lea, Flood 2014): enough to shuffle blocks in tests, and reproducible.
fn split_mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
