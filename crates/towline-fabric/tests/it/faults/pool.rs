//! The destination of the reads: a pool of blocks that are lent to a transfer and must come back, and that nothing may
//! touch once they have.

use std::any::Any;
use std::sync::{Arc, Mutex};

use towline_fabric::Memory;
use towline_wire::blocks::BlockList;
use towline_wire::digest::block_digest;

use crate::support::{blocks, contents, memory};

/// Bytes of a block: those of a slice, so that a read of the pool is one slice a block.
pub(super) const BLOCK: u64 = 2 << 20;
/// Blocks: more than the window of slices (8), so that a read can stand half-way with some slices done, some under way
/// and some not posted.
pub(super) const BLOCKS: u32 = 12;
/// Bytes of them all.
pub(super) const BYTES: u64 = BLOCK * BLOCKS as u64;

const POISON: u8 = 0x5a;
/// One word in each page tells where it belongs; the rest is zero, so that filling takes no time.
const PAGE: u64 = 4096;

/// The seed of what a reader writes to its owner.
pub(super) const SENT: u64 = 3;

/// See the head of this file.
pub(super) struct Pool {
    memory: Arc<Memory>,
    free: Arc<Mutex<Vec<u32>>>,
}

/// Blocks that are lent. They return when the last clone of the `Arc` around this goes.
pub(super) struct Lent {
    indices: Vec<u32>,
    free: Arc<Mutex<Vec<u32>>>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.free.lock().unwrap().append(&mut self.indices);
    }
}

impl Pool {
    pub(super) fn new() -> Self {
        Self { memory: memory(BYTES), free: Arc::new(Mutex::new((0..BLOCKS).collect())) }
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Lends every block.
    pub(super) fn lend(&self) -> Arc<Lent> {
        let indices = std::mem::take(&mut *self.free.lock().unwrap());
        assert_eq!(indices.len(), BLOCKS as usize, "blocks are out that should be here");
        Arc::new(Lent { indices, free: Arc::clone(&self.free) })
    }

    /// Whether every block is back.
    pub(super) fn is_whole(&self) -> bool {
        self.free.lock().unwrap().len() == BLOCKS as usize
    }

    /// Whether the lent blocks hold what an owner of `seed` lends, by the digest of each.
    pub(super) fn holds(&self, lent: &Lent, seed: u64) -> bool {
        (0u32..).zip(&lent.indices).all(|(position, index)| {
            block_digest(&self.block(*index)) == block_digest(&content(seed, position))
        })
    }

    /// Writes over everything, as the next user of the blocks would.
    pub(super) fn poison(&self) {
        self.memory.write_from(0, &poison(BYTES)).unwrap();
    }

    /// Whether nobody wrote since.
    pub(super) fn is_poisoned(&self) -> bool {
        (0..BLOCKS).all(|index| self.is_block_poisoned(index))
    }

    pub(super) fn is_block_poisoned(&self, index: u32) -> bool {
        self.block(index) == poison(BLOCK)
    }

    fn block(&self, index: u32) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(BLOCK).unwrap()];
        self.memory.read_into(u64::from(index) * BLOCK, &mut bytes).unwrap();
        bytes
    }
}

impl Lent {
    pub(super) fn list(&self) -> BlockList {
        blocks(BLOCK, self.indices.iter().copied())
    }

    /// As a transfer's hold.
    pub(super) fn hold(self: &Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        Arc::<Self>::clone(self)
    }
}

/// What the next user of memory writes into it.
pub(super) fn poison(bytes: u64) -> Vec<u8> {
    vec![POISON; usize::try_from(bytes).unwrap()]
}

/// The word at the start of a page of what an owner of `seed` lends.
fn word(seed: u64, position: u32, page: u64) -> u64 {
    seed << 48 | u64::from(position) << 32 | (page + 1)
}

/// What an owner of `seed` lends in its block `position`.
fn content(seed: u64, position: u32) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(BLOCK).unwrap()];
    for (page, chunk) in (0..).zip(bytes.chunks_exact_mut(usize::try_from(PAGE).unwrap())) {
        chunk[..8].copy_from_slice(&word(seed, position, page).to_le_bytes());
    }
    bytes
}

/// Writes what an owner of `seed` lends into memory that is zero, or holds what another seed's does.
pub(super) fn fill(memory: &Memory, seed: u64) {
    for position in 0..BLOCKS {
        for page in 0..BLOCK / PAGE {
            let at = u64::from(position) * BLOCK + page * PAGE;
            memory.store_u64(at, word(seed, position, page)).unwrap();
        }
    }
}

/// Whether it holds that.
pub(super) fn is_filled(memory: &Memory, seed: u64) -> bool {
    let expected: Vec<_> = (0..BLOCKS).map(|position| content(seed, position)).collect();
    contents(memory) == expected.concat()
}

/// Whether nothing was written behind the first `bytes` of memory that was zero.
pub(super) fn is_untouched(memory: &Memory, bytes: u64) -> bool {
    contents(memory)[usize::try_from(bytes).unwrap()..].iter().all(|byte| *byte == 0)
}
