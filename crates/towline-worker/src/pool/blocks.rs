//! Held blocks: values whose drop gives the references back, so that no error path can leak a block.

use super::KvPool;

/// Blocks of one pool in a sequence's order, each with one reference of this value.
pub struct Blocks {
    pool: KvPool,
    ids: Vec<u32>,
}

/// What [`KvPool::reserve`] took.
#[derive(Debug)]
pub struct Reservation {
    /// The blocks in order.
    pub blocks: Blocks,
    /// How many leading ones were found in the prefix cache: full, verified, and not to be written.
    pub cached: usize,
}

impl Blocks {
    /// Takes over one reference on each of `ids`.
    pub(super) fn new(pool: KvPool, ids: Vec<u32>) -> Self {
        Self { pool, ids }
    }

    /// Takes over the references of `other`, behind those held already. Both are of one pool.
    pub fn append(&mut self, mut other: Self) {
        debug_assert!(self.pool.is_same(&other.pool));
        self.ids.append(&mut other.ids);
    }

    /// The pool they belong to.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// Block numbers in the sequence's order.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The same blocks once more, with references of their own.
    pub fn share(&self) -> Self {
        self.pool.retain(&self.ids);
        Self { pool: self.pool.clone(), ids: self.ids.clone() }
    }

    /// Gives back all blocks behind the first `len`.
    pub fn truncate(&mut self, len: usize) {
        if len < self.ids.len() {
            let rest = self.ids.split_off(len);
            self.pool.release(&rest);
        }
    }
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Blocks").field(&self.ids).finish()
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.pool.release(&self.ids);
    }
}
