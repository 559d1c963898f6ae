//! A matrix that the members of a team write at once, each in its own pieces.
//!
//! Why not `chunks_mut`: a member of a matrix product owns *columns*, so what it writes of a row-major output is no
//! slice. Every piece that is handed out is one contiguous run of a row; the kernels' partition keeps them apart.
#![expect(unsafe_code, reason = "hands out disjoint pieces of one buffer to several threads")]

use std::marker::PhantomData;
use std::ops::Range;

/// A borrowed buffer whose pieces several threads write.
pub(crate) struct Pieces<'a, T> {
    base: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: stands for an exclusive borrow of a `[T]`; what threads do with it goes through `piece`, whose caller keeps
// pieces apart, so it moves between threads as `&mut [T]` would.
unsafe impl<T: Send> Send for Pieces<'_, T> {}
// SAFETY: as above; `piece` hands out disjoint exclusive pieces, which is sending `T`s, never sharing them.
unsafe impl<T: Send> Sync for Pieces<'_, T> {}

impl<'a, T> Pieces<'a, T> {
    /// Takes the whole buffer for as long as pieces are out.
    pub(crate) fn new(whole: &'a mut [T]) -> Self {
        Self { base: whole.as_mut_ptr(), len: whole.len(), borrow: PhantomData }
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// If `range` leaves the buffer.
    ///
    /// # Safety
    /// No element of `range` may be in another piece that is still in use, on any thread.
    #[expect(clippy::mut_from_ref, reason = "exclusion is the caller's argument, piece by piece")]
    pub(crate) unsafe fn piece(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a piece leaves its buffer");
        // SAFETY: inside the buffer by the assertion.
        let start = unsafe { self.base.add(range.start) };
        // SAFETY: valid for the length by the assertion, borrowed exclusively for `'a`; the caller keeps pieces apart.
        unsafe { std::slice::from_raw_parts_mut(start, range.end - range.start) }
    }
}

/// The part of `count` items that member `member` of `members` takes: contiguous, sizes differing by one at most.
pub(crate) fn share(count: usize, member: usize, members: usize) -> Range<usize> {
    let start = |index: usize| count * index / members;
    start(member)..start(member + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_tile_the_items() {
        for count in 0..40 {
            for members in 1..9 {
                let all: Vec<usize> = (0..members).flat_map(|member| share(count, member, members)).collect();
                assert_eq!(all, (0..count).collect::<Vec<_>>());
            }
        }
    }
}
