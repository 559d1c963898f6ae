//! Which blocks of a region, compactly, and which runs of bytes two lists have in common.
//!
//! A [`BlockList`] is bases × indices: for every base, every index names `block_bytes` at `base + index * stride`.
//! [`Cutter`] walks two lists side by side and merges what is contiguous on both, also when the block sizes differ.

mod cutter;
pub use cutter::{Bounds, Cutter, Run, runs};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most bases: 1,024 layers of 4 parts each.
pub const BASES_MAX: usize = 4096;
/// Most indices: 16 M tokens in blocks of 16.
pub const INDICES_MAX: usize = 1 << 20;

/// A contiguous piece of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte, from the region's start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Blocks of one cache group in one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockList {
    /// The group of the layout.
    pub group: u16,
    /// Where each array of blocks starts in the region, in bytes: one when layers lie together, else one for each
    /// layer and part.
    pub bases: Vec<u64>,
    /// Bytes of a block in one array.
    pub block_bytes: u64,
    /// Bytes from one block to the next in one array; at least `block_bytes`.
    pub stride: u64,
    /// Which blocks, in the sequence's order.
    pub indices: Vec<u32>,
}

impl BlockList {
    /// Blocks × bytes over all bases; `u64::MAX` where that is more than 64 bits can count.
    pub fn bytes(&self) -> u64 {
        self.counted_bytes().unwrap_or(u64::MAX)
    }

    fn counted_bytes(&self) -> Option<u64> {
        self.block_bytes.checked_mul(self.indices.len() as u64)?.checked_mul(self.bases.len() as u64)
    }

    /// Checks that every block lies in a region of `region_bytes`, and that nothing overflows: no offset, and not
    /// the bytes of all blocks together (a list may name a block twice).
    ///
    /// # Errors
    /// [`BlockListError`] naming the block.
    pub fn validate(&self, region_bytes: u64) -> Result<(), BlockListError> {
        if self.bases.is_empty() || self.bases.len() > BASES_MAX {
            return Err(BlockListError::Bases { count: self.bases.len() });
        }
        if self.indices.len() > INDICES_MAX {
            return Err(BlockListError::Indices { count: self.indices.len() });
        }
        if self.block_bytes == 0 || self.block_bytes > self.stride || self.block_bytes > region_bytes {
            return Err(BlockListError::BlockBytes { block_bytes: self.block_bytes, stride: self.stride });
        }
        if self.counted_bytes().is_none() {
            return Err(BlockListError::Bytes { blocks: self.indices.len(), block_bytes: self.block_bytes });
        }
        let Some(highest) = self.indices.iter().max() else { return Ok(()) };
        let reach =
            u64::from(*highest).checked_mul(self.stride).and_then(|at| at.checked_add(self.block_bytes));
        for base in &self.bases {
            let end = reach.and_then(|reach| reach.checked_add(*base));
            if end.is_none_or(|end| end > region_bytes) {
                return Err(BlockListError::Outside { index: *highest, base: *base, region_bytes });
            }
        }
        Ok(())
    }

    /// Every block as an extent: bases outside, indices inside. Call [`BlockList::validate`] first.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + '_ {
        self.bases.iter().flat_map(move |base| {
            self.indices.iter().map(move |index| Extent {
                offset: base + u64::from(*index) * self.stride,
                len: self.block_bytes,
            })
        })
    }
}

/// Why a block list cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BlockListError {
    /// Name at least one array and at most [`BASES_MAX`].
    #[error("a block list has 1 to {BASES_MAX} bases, not {count}")]
    Bases {
        /// Bases found.
        count: usize,
    },
    /// Split the list.
    #[error("a block list has at most {INDICES_MAX} indices, not {count}")]
    Indices {
        /// Indices found.
        count: usize,
    },
    /// Correct the sizes.
    #[error("blocks of {block_bytes} bytes with a stride of {stride} do not fit")]
    BlockBytes {
        /// Bytes of a block.
        block_bytes: u64,
        /// Bytes from one to the next.
        stride: u64,
    },
    /// The list is corrupt: no region holds so much.
    #[error("{blocks} blocks of {block_bytes} bytes are more than 64 bits can count")]
    Bytes {
        /// Blocks of each base.
        blocks: usize,
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// The list belongs to another region, or its card is old.
    #[error("block {index} from base {base} leaves the region of {region_bytes} bytes")]
    Outside {
        /// The highest index.
        index: u32,
        /// The base it was counted from.
        base: u64,
        /// Bytes of the region.
        region_bytes: u64,
    },
    /// Local and remote lists must name the same number of bytes.
    #[error("the local list names {local} bytes, the remote list {remote}")]
    Totals {
        /// Bytes of the local list.
        local: u64,
        /// Bytes of the remote list.
        remote: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(bases: Vec<u64>, block_bytes: u64, stride: u64, indices: Vec<u32>) -> BlockList {
        BlockList { group: 0, bases, block_bytes, stride, indices }
    }

    #[test]
    fn lists_that_leave_the_region_or_overflow_are_refused() {
        assert!(list(vec![0], 10, 10, vec![9]).validate(100).is_ok());
        for bad in [
            list(vec![0], 10, 10, vec![10]),
            list(vec![1], 10, 10, vec![9]),
            list(vec![u64::MAX], 10, 10, vec![0]),
            list(vec![0], 10, u64::MAX, vec![2]),
            list(vec![0], 0, 10, vec![0]),
            list(vec![0], 11, 10, vec![0]),
            list(vec![], 10, 10, vec![0]),
        ] {
            assert!(bad.validate(100).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn bytes_that_cannot_be_counted_are_refused() {
        let twice = list(vec![0], 1 << 63, 1 << 63, vec![0, 0]);
        assert!(matches!(twice.validate(u64::MAX), Err(BlockListError::Bytes { .. })));
        assert_eq!(twice.bytes(), u64::MAX);
    }
}
