//! Which block of a rank a byte of its region belongs to, so that the serving side can tell what a request touches.
//!
//! Blocks are numbered on through the groups of a layout: a block of the second group has its index plus the number of
//! blocks of the first. So one list of numbers says what a lease covers, whatever the groups, and the arrays of a group
//! (one for each layer and part, or one for all) share the numbers of its blocks.

use towline_wire::blocks::Extent;
use towline_wire::reshard::Array;

/// The number of bytes that belong to no block: never lent.
const NOWHERE: u32 = u32::MAX;

/// The blocks of one group in a rank's region.
#[derive(Clone, Debug)]
pub struct GroupMemory {
    /// One for a block-major group; for a layer-major one, one for each layer and part of the rank. Arrays do not
    /// interleave.
    pub arrays: Vec<Array>,
    /// Blocks of each array.
    pub blocks: u32,
}

/// An array and the number of its first block.
#[derive(Clone, Copy, Debug)]
struct Place {
    array: Array,
    end: u64,
    first: u32,
}

/// Where all blocks of a rank lie.
#[derive(Debug)]
pub(super) struct Places {
    /// Number of the first block of each group.
    firsts: Vec<u32>,
    /// By base.
    places: Vec<Place>,
}

impl Places {
    pub(super) fn new(groups: &[GroupMemory]) -> Self {
        let (mut firsts, mut places, mut first) = (Vec::new(), Vec::new(), 0u32);
        for group in groups {
            firsts.push(first);
            places.extend(group.arrays.iter().map(|array| {
                let bytes = array.stride.saturating_mul(u64::from(group.blocks));
                Place { array: *array, end: array.base.saturating_add(bytes), first }
            }));
            first = first.saturating_add(group.blocks);
        }
        places.sort_unstable_by_key(|place| place.array.base);
        Self { firsts, places }
    }

    /// The numbers of blocks of group `group`.
    pub(super) fn numbers<'a>(&'a self, group: usize, blocks: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        let first = self.firsts.get(group).copied().unwrap_or(NOWHERE);
        blocks.iter().map(move |block| first.saturating_add(*block))
    }

    /// The numbers of all blocks that `extent` touches.
    pub(super) fn touched(&self, extent: &Extent) -> impl Iterator<Item = u32> + '_ {
        let (mut at, end) = (extent.offset, extent.offset.saturating_add(extent.len));
        std::iter::from_fn(move || {
            let next = (at < end).then(|| self.find(at));
            next.map(|(number, block_end)| {
                at = block_end;
                number
            })
        })
    }

    /// The number of the block at `offset`, and where it ends.
    fn find(&self, offset: u64) -> (u32, u64) {
        let after = self.places.partition_point(|place| place.array.base <= offset);
        let place =
            after.checked_sub(1).and_then(|at| self.places.get(at)).filter(|place| offset < place.end);
        // An array without strides has no bytes, so no offset before its end.
        let index = place.and_then(|place| (offset - place.array.base).checked_div(place.array.stride));
        let (Some(place), Some(index)) = (place, index) else { return (NOWHERE, u64::MAX) };
        let number = u32::try_from(index).map_or(NOWHERE, |index| place.first.saturating_add(index));
        (number, place.array.base.saturating_add((index + 1).saturating_mul(place.array.stride)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> Places {
        let array = |base, stride| Array { base, stride };
        Places::new(&[
            GroupMemory { arrays: vec![array(100, 10), array(140, 20)], blocks: 4 },
            GroupMemory { arrays: vec![array(0, 50)], blocks: 2 },
        ])
    }

    fn touched(offset: u64, len: u64) -> Vec<u32> {
        places().touched(&Extent { offset, len }).collect()
    }

    #[test]
    fn bytes_belong_to_the_blocks_of_their_array() {
        assert_eq!(touched(100, 10), [0]);
        assert_eq!(touched(109, 2), [0, 1]);
        assert_eq!(touched(140, 80), [0, 1, 2, 3], "another array of the same blocks");
        assert_eq!(touched(49, 2), [4, 5], "numbers go on in the next group");
        assert_eq!(touched(90, 60), [5, 0, 1, 2, 3, 0], "across arrays that follow each other");
    }

    #[test]
    fn bytes_beside_all_blocks_are_nobodys() {
        assert_eq!(touched(220, 1), [NOWHERE]);
        assert_eq!(touched(219, 9), [3, NOWHERE]);
        assert_eq!(Places::new(&[]).touched(&Extent { offset: 0, len: 4 }).collect::<Vec<_>>(), [NOWHERE]);
    }

    #[test]
    fn groups_number_their_blocks_one_after_the_other() {
        assert_eq!(places().numbers(1, &[1, 0]).collect::<Vec<_>>(), [5, 4]);
        assert_eq!(places().numbers(2, &[0]).collect::<Vec<_>>(), [NOWHERE]);
    }
}
