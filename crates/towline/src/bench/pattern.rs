//! What memories are filled with, and how a byte that is not where it belongs is found.
//!
//! The word at an offset is a function of a seed and that offset, so a page says whence and from which repetition it
//! comes: one that is missing, stale, swapped with another or shifted differs from what is expected. Everything that no
//! block of the transfer should have touched must still hold the poison.
//!
//! **Cost.** One multiplication chain a word and one copy through a buffer of 64 KiB, which stays in the L2 cache: some
//! GB/s in a release build, and outside every timer.

use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use towline_fabric::Memory;
use towline_wire::blocks::BlockList;

use super::shape::mix;

/// Offsets and sizes of everything that is filled are multiples of this.
pub(crate) const WORD_BYTES: u64 = 8;
/// Bytes handled at a time.
const CHUNK_BYTES: u64 = 64 << 10;

/// What one memory or one lane of it is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seed(pub(crate) u64);

impl Seed {
    /// The seed of part `index` of this one's repetition.
    pub(crate) fn part(self, index: usize) -> Self {
        Self(mix(self.0 ^ mix(index as u64)))
    }

    /// What the destination of data of this seed holds before it arrives.
    pub(crate) fn poison(self) -> Self {
        Self(mix(!self.0))
    }

    /// The word at `offset` of a memory that is filled with this.
    pub(crate) fn word(self, offset: u64) -> u64 {
        mix(self.0 ^ (offset / WORD_BYTES).wrapping_mul(0x9fb2_1c65_1e98_df25))
    }
}

/// The first byte that is not what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct WrongByte {
    /// Offset of its word in the destination.
    pub(crate) offset: u64,
    /// The word that belongs there.
    pub(crate) expected: u64,
    /// The word found.
    pub(crate) found: u64,
    /// Whether the poison is still there: the data never came.
    pub(crate) missing: bool,
}

impl fmt::Display for WrongByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, expected, found, missing } = self;
        let why = if *missing { ", which was there before: the data never came" } else { "" };
        write!(
            f,
            "at offset {offset} of the destination stands {found:#018x}{why}; {expected:#018x} belongs there"
        )
    }
}

/// Fills all of `memory`.
pub(crate) fn fill(memory: &Memory, seed: Seed) -> Result<()> {
    fill_range(memory, (0, memory.len()), seed)
}

/// Fills `len` bytes from `start`; the words depend on their offset in the memory.
pub(crate) fn fill_range(memory: &Memory, (start, len): (u64, u64), seed: Seed) -> Result<()> {
    let mut buffer = Vec::new();
    for (offset, size) in chunks(start, len) {
        expect(&mut buffer, seed, (offset, size));
        memory.write_from(offset, &buffer)?;
    }
    Ok(())
}

/// One lane of a destination after a transfer.
pub(crate) struct Arrival<'a> {
    /// The blocks as they lay in the source.
    pub(crate) source: &'a BlockList,
    /// Where they belong.
    pub(crate) destination: &'a BlockList,
    /// Blocks that the lane has room for.
    pub(crate) slots: u32,
    /// What the source was filled with.
    pub(crate) seed: Seed,
    /// What the destination was filled with before.
    pub(crate) poison: Seed,
}

/// Checks every byte of a lane: what was to arrive, and that nothing else was touched. Both lists have one base and
/// blocks of one size.
///
/// # Errors
/// Only for a range outside the memory; what is wrong with the bytes is the inner value.
pub(crate) fn check(memory: &Memory, arrival: &Arrival<'_>) -> Result<Option<WrongByte>> {
    let Arrival { source, destination, slots, seed, poison } = arrival;
    let base = *destination.bases.first().unwrap_or(&0);
    let block = destination.block_bytes;
    ensure!(
        source.block_bytes == block && source.indices.len() == destination.indices.len(),
        "unequal lists"
    );
    let mut origin = vec![None; *slots as usize];
    for (from, to) in source.extents().zip(&destination.indices) {
        origin[*to as usize] = Some(from.offset);
    }
    for (slot, origin) in (0_u64..).zip(origin) {
        let at = base + slot * block;
        let (seed, from) = origin.map_or((*poison, at), |from| (*seed, from));
        if let Some((offset, expected, found)) = differs(memory, (at, block), (seed, from))? {
            let missing = origin.is_some() && found == poison.word(offset);
            return Ok(Some(WrongByte { offset, expected, found, missing }));
        }
    }
    Ok(None)
}

/// The first word from `offset` on that differs from `expected`, in a destination that held `poison` before.
///
/// # Errors
/// For a range outside the memory.
pub(crate) fn check_bytes(
    memory: &Memory,
    (offset, expected): (u64, &[u8]),
    poison: Seed,
) -> Result<Option<WrongByte>> {
    let mut found = vec![0; expected.len()];
    memory.read_into(offset, &mut found)?;
    Ok(first_difference(offset, expected, &found).map(|(offset, expected, found)| WrongByte {
        offset,
        expected,
        found,
        missing: found == poison.word(offset),
    }))
}

/// The first word of a range that is not the poison any more, though nothing belongs there.
///
/// # Errors
/// For a range outside the memory.
pub(crate) fn check_untouched(memory: &Memory, range: (u64, u64), poison: Seed) -> Result<Option<WrongByte>> {
    let wrong = differs(memory, range, (poison, range.0))?;
    Ok(wrong.map(|(offset, expected, found)| WrongByte { offset, expected, found, missing: false }))
}

/// The first word of a range that differs from what `seed` gives from offset `from` on: offset, expected, found.
fn differs(
    memory: &Memory,
    (start, len): (u64, u64),
    (seed, from): (Seed, u64),
) -> Result<Option<(u64, u64, u64)>> {
    let (mut expected, mut found) = (Vec::new(), Vec::new());
    for (offset, size) in chunks(start, len) {
        expect(&mut expected, seed, (from + (offset - start), size));
        found.resize(expected.len(), 0);
        memory.read_into(offset, &mut found)?;
        if let Some(wrong) = first_difference(offset, &expected, &found) {
            return Ok(Some(wrong));
        }
    }
    Ok(None)
}

/// Of two runs of words that stand at `offset`: offset, expected, found.
fn first_difference(offset: u64, expected: &[u8], found: &[u8]) -> Option<(u64, u64, u64)> {
    if expected == found {
        return None;
    }
    let pairs = expected.chunks_exact(8).zip(found.chunks_exact(8));
    let (at, (expected, found)) =
        (offset..).step_by(8).zip(pairs).find(|(_, (expected, found))| expected != found)?;
    Some((at, word_of(expected), word_of(found)))
}

/// The bytes of `size` from `offset` on.
fn expect(buffer: &mut Vec<u8>, seed: Seed, (offset, size): (u64, u64)) {
    buffer.resize(usize::try_from(size).unwrap_or(0), 0);
    let mut at = offset;
    for word in buffer.chunks_exact_mut(8) {
        word.copy_from_slice(&seed.word(at).to_le_bytes());
        at += WORD_BYTES;
    }
}

fn chunks(start: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..len.div_ceil(CHUNK_BYTES)).map(move |index| {
        let at = index * CHUNK_BYTES;
        (start + at, CHUNK_BYTES.min(len - at))
    })
}

fn word_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::shape::{Shape, Side};

    const PAGE: u64 = 4096;

    /// A lane that was moved as it should be.
    struct Moved {
        shape: Shape,
        memory: Memory,
        source: BlockList,
        destination: BlockList,
    }

    impl Moved {
        fn new(shape: Shape) -> Self {
            let [from, memory] =
                ["from", "to"].map(|name| Memory::allocate(name, shape.span_bytes()).unwrap());
            let (source, destination) = (shape.list(Side::Remote, 0, 0), shape.list(Side::Local, 0, 0));
            fill(&from, Seed(1)).unwrap();
            fill(&memory, Seed(1).poison()).unwrap();
            for (a, b) in source.extents().zip(destination.extents()) {
                memory.copy_from(b.offset, &from, a.offset, a.len).unwrap();
            }
            Self { shape, memory, source, destination }
        }

        fn check(&self, seed: Seed) -> Option<WrongByte> {
            let (source, destination, slots) = (&self.source, &self.destination, self.shape.slots);
            check(&self.memory, &Arrival { source, destination, slots, seed, poison: Seed(1).poison() })
                .unwrap()
        }

        fn page(&self, index: usize) -> u64 {
            u64::from(self.destination.indices[index]) * PAGE
        }

        fn read(&self, at: u64) -> Vec<u8> {
            let mut page = vec![0; 4096];
            self.memory.read_into(at, &mut page).unwrap();
            page
        }
    }

    fn paged() -> Moved {
        Moved::new(Shape::blocks(64 * PAGE, PAGE, Some(3)).unwrap())
    }

    #[test]
    fn what_arrived_whole_passes() {
        assert_eq!(paged().check(Seed(1)), None);
        assert_eq!(Moved::new(Shape::contiguous(200_000)).check(Seed(1)), None);
    }

    #[test]
    fn one_changed_byte_is_found_with_its_offset() {
        let moved = paged();
        let at = moved.page(5) + 1234;
        let mut byte = [0];
        moved.memory.read_into(at, &mut byte).unwrap();
        moved.memory.write_from(at, &[byte[0] ^ 0x10]).unwrap();
        let wrong = moved.check(Seed(1)).unwrap();
        assert_eq!((wrong.offset, wrong.missing), (at / 8 * 8, false));
        assert_eq!(wrong.expected ^ wrong.found, 0x10 << (8 * (at % 8)));
    }

    #[test]
    fn swapped_pages_are_found() {
        let moved = paged();
        let (a, b) = (moved.page(0), moved.page(1));
        let (first, second) = (moved.read(a), moved.read(b));
        moved.memory.write_from(a, &second).unwrap();
        moved.memory.write_from(b, &first).unwrap();
        assert_eq!(moved.check(Seed(1)).unwrap().offset, a.min(b));
    }

    #[test]
    fn a_page_that_never_came_is_called_missing() {
        let moved = paged();
        fill_range(&moved.memory, (moved.page(9), PAGE), Seed(1).poison()).unwrap();
        let wrong = moved.check(Seed(1)).unwrap();
        assert_eq!((wrong.offset, wrong.missing), (moved.page(9), true));
    }

    #[test]
    fn data_of_another_repetition_is_found() {
        assert!(paged().check(Seed(2)).is_some());
    }

    #[test]
    fn shifted_data_is_found() {
        let moved = paged();
        let page = moved.read(moved.page(2));
        moved.memory.write_from(moved.page(2) + 8, &page[..page.len() - 8]).unwrap();
        assert_eq!(moved.check(Seed(1)).unwrap().offset, moved.page(2) + 8);
    }

    #[test]
    fn bytes_outside_the_list_must_stay_as_they_were() {
        let moved = paged();
        let free = (0..moved.shape.slots).find(|slot| !moved.destination.indices.contains(slot)).unwrap();
        let at = u64::from(free) * PAGE + 4088;
        moved.memory.write_from(at, &[0; 8]).unwrap();
        assert_eq!(moved.check(Seed(1)).unwrap().offset, at);
    }

    #[test]
    fn parts_and_poison_have_seeds_of_their_own() {
        let seeds =
            [Seed(1), Seed(2), Seed(1).part(0), Seed(1).part(1), Seed(1).poison(), Seed(1).part(0).poison()];
        let words: std::collections::BTreeSet<u64> = seeds.iter().map(|seed| seed.word(64)).collect();
        assert_eq!(words.len(), seeds.len());
    }
}
