//! Where the pages of a transfer lie, on both sides, from a few numbers that both processes know.
//!
//! A *lane* is one transfer's share of a memory: `slots` blocks side by side, of which `blocks` are moved. In random
//! order there are more slots than blocks, and each side picks and orders its own by its own shuffle, so that next to
//! nothing is contiguous on both and few pages merge; that is what a paged KV cache looks like after an hour of traffic.

use serde::{Deserialize, Serialize};
use towline_wire::blocks::{BlockList, INDICES_MAX};

/// Most bytes by which a lane in random order is larger than what it moves: enough to spread pages well beyond any
/// cache, without needing three times the memory for a large prompt.
const SPREAD_BYTES_MAX: u64 = 512 << 20;

/// One transfer's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// Bytes of a block.
    pub(crate) block_bytes: u64,
    /// Blocks moved.
    pub(crate) blocks: u32,
    /// Blocks that a lane has room for.
    pub(crate) slots: u32,
    /// Lanes in the owner's memory.
    pub(crate) lanes: u32,
    /// Where the shuffles start; `None` for blocks in order.
    pub(crate) shuffle: Option<u64>,
}

/// Whose list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The process that posts transfers.
    Local,
    /// The owner of the remote memory.
    Remote,
}

impl Shape {
    /// `size_bytes` in one piece.
    pub(crate) fn contiguous(size_bytes: u64) -> Self {
        Self { block_bytes: size_bytes, blocks: 1, slots: 1, lanes: 1, shuffle: None }
    }

    /// `size_bytes` in blocks, shuffled by `shuffle` or in order; `None` when they are too many for one list, or don't
    /// divide the size.
    pub(crate) fn blocks(size_bytes: u64, block_bytes: u64, shuffle: Option<u64>) -> Option<Self> {
        let blocks = u32::try_from(size_bytes / block_bytes).ok()?;
        if !size_bytes.is_multiple_of(block_bytes) || blocks as usize > INDICES_MAX {
            return None;
        }
        let spread = blocks.min(u32::try_from(SPREAD_BYTES_MAX / block_bytes).unwrap_or(u32::MAX));
        let slots = if shuffle.is_some() { blocks + spread } else { blocks };
        Some(Self { block_bytes, blocks, slots, lanes: 1, shuffle })
    }

    /// Bytes that a transfer moves.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.block_bytes * u64::from(self.blocks)
    }

    /// Bytes of a lane.
    pub(crate) fn span_bytes(&self) -> u64 {
        self.block_bytes * u64::from(self.slots)
    }

    /// Bytes of the owner's memory; `None` when they overflow, which only a broken message does.
    pub(crate) fn region_bytes(&self) -> Option<u64> {
        self.block_bytes.checked_mul(self.slots.into())?.checked_mul(self.lanes.into())
    }

    /// The blocks of lane `lane`, which starts at `base`, in the order in which they are moved.
    pub(crate) fn list(&self, side: Side, lane: u32, base: u64) -> BlockList {
        let mut indices: Vec<u32> = (0..self.slots).collect();
        if let Some(seed) = self.shuffle {
            let of_side = if side == Side::Local { 0 } else { 1 << 40 };
            shuffle(&mut indices, mix(seed ^ of_side ^ u64::from(lane)));
        }
        indices.truncate(self.blocks as usize);
        BlockList {
            group: 0,
            bases: vec![base],
            block_bytes: self.block_bytes,
            stride: self.block_bytes,
            indices,
        }
    }
}

/// A well-mixed function of 64 bits: every output bit depends on every input bit (the finaliser of SplitMix64: Steele,
/// Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The same order for the same seed (Fisher and Yates).
pub(crate) fn shuffle(indices: &mut [u32], seed: u64) {
    let mut state = seed;
    for at in (1..indices.len()).rev() {
        state = mix(state);
        let other = usize::try_from(state % (at as u64 + 1)).unwrap_or(0);
        indices.swap(at, other);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use towline_wire::blocks::runs;

    use super::*;

    #[test]
    fn pages_in_random_order_are_distinct_spread_and_hardly_merge() {
        let shape = Shape::blocks(4 << 20, 4096, Some(7)).unwrap();
        let [local, remote] = [Side::Local, Side::Remote].map(|side| shape.list(side, 0, 0));
        for list in [&local, &remote] {
            assert_eq!(list.indices.iter().collect::<BTreeSet<_>>().len(), 1024);
            list.validate(shape.span_bytes()).unwrap();
        }
        assert_ne!(local.indices, remote.indices);
        assert_eq!(shape.slots, 2048);
        assert!(runs(&local, &remote, u64::MAX).unwrap().len() > 1000);
        assert_ne!(local.indices, shape.list(Side::Local, 1, 0).indices, "each lane has its own order");
    }

    #[test]
    fn blocks_in_order_merge_into_one() {
        let shape = Shape::blocks(4 << 20, 4096, None).unwrap();
        let [local, remote] = [Side::Local, Side::Remote].map(|side| shape.list(side, 0, 0));
        assert_eq!(runs(&local, &remote, u64::MAX).unwrap().len(), 1);
    }

    #[test]
    fn the_spread_of_large_blocks_is_bounded() {
        let shape = Shape::blocks(4 << 30, 2 << 20, Some(1)).unwrap();
        assert_eq!(shape.span_bytes(), (4 << 30) + SPREAD_BYTES_MAX);
    }

    #[test]
    fn blocks_that_do_not_divide_or_are_too_many_are_refused() {
        assert_eq!(Shape::blocks(10_000, 4096, None), None);
        assert_eq!(Shape::blocks(16, 4096, None), None);
        assert_eq!(Shape::blocks(8 << 30, 4096, None), None);
        let broken = Shape { block_bytes: u64::MAX, blocks: 1, slots: 2, lanes: 1, shuffle: None };
        assert_eq!(broken.region_bytes(), None);
    }
}
