//! Memory for weights: few large pieces, on huge pages.
//!
//! **Why it exists.** A decode step reads every weight once, in order. On 4 KiB pages that stream stops at every page
//! for a page walk, which under virtualisation is two-dimensional: on the 2-core VM here one core reads 3 GB/s from 4
//! KiB pages and 14 GB/s from 2 MiB ones, and decode is that much slower. The kernel gives huge pages where it is
//! asked to (`madvise`), to pieces that cover whole ones: so matrices, often smaller than 2 MiB, share chunks.
#![expect(unsafe_code, reason = "allocates aligned, advised memory and hands out disjoint parts of it")]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

/// A huge page on x86-64, and on aarch64 with 4 KiB base pages.
const HUGE_PAGE: usize = 2 << 20;
/// Bytes of a chunk, unless one matrix needs more: at most this is left unused.
const CHUNK: usize = 16 << 20;
/// Every piece starts on a cache line.
const LINE: usize = 64;

/// Hands out zeroed pieces of shared chunks.
#[derive(Debug, Default)]
pub struct Arena {
    chunk: Option<Arc<Chunk>>,
    used: usize,
}

#[derive(Debug)]
struct Chunk {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: owns its allocation; access goes through the disjoint pieces alone.
unsafe impl Send for Chunk {}
// SAFETY: as above; the chunk itself gives no access to its bytes.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(bytes: usize) -> Self {
        let bytes = bytes.max(LINE).next_multiple_of(HUGE_PAGE);
        let Ok(layout) = Layout::from_size_align(bytes, HUGE_PAGE) else {
            handle_alloc_error(Layout::new::<[u8; HUGE_PAGE]>()) // beyond isize: no machine has it
        };
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        // Advice before the first touch. Refused or unknown, the memory works all the same, slower.
        #[cfg(target_os = "linux")]
        // SAFETY: the range is this allocation, page-aligned, and huge pages change nothing a program can see.
        let _ =
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxHugepage) };
        // SAFETY: the allocation has this many bytes.
        unsafe { base.write_bytes(0, bytes) };
        Self { base, layout }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; every piece holds the chunk, so none is left.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// An owned piece of a chunk.
#[derive(Debug)]
pub(crate) struct Piece<const N: usize> {
    start: NonNull<[u8; N]>,
    len: usize,
    /// Keeps the memory.
    _chunk: Arc<Chunk>,
}

// SAFETY: owns its range of the chunk alone, like a boxed slice of bytes.
unsafe impl<const N: usize> Send for Piece<N> {}
// SAFETY: as above; shared access is read-only.
unsafe impl<const N: usize> Sync for Piece<N> {}

impl Arena {
    /// `len` zeroed groups of `N` bytes, on a cache line's start.
    pub(crate) fn zeroed<const N: usize>(&mut self, len: usize) -> Piece<N> {
        let bytes = (len * N).next_multiple_of(LINE);
        let (chunk, at) = match self.chunk.take() {
            Some(chunk) if self.used + bytes <= chunk.layout.size() => (chunk, self.used),
            _ => (Arc::new(Chunk::new(bytes.max(CHUNK))), 0),
        };
        self.used = at + bytes;
        // SAFETY: `at + bytes` is within the chunk: by the condition above, or because a new chunk has as many.
        let start = unsafe { chunk.base.add(at) }.cast();
        self.chunk = Some(Arc::clone(&chunk));
        Piece { start, len, _chunk: chunk }
    }
}

impl<const N: usize> std::ops::Deref for Piece<N> {
    type Target = [[u8; N]];

    fn deref(&self) -> &[[u8; N]] {
        // SAFETY: the range is initialised bytes, belongs to this piece alone and lives as long as its chunk.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<const N: usize> std::ops::DerefMut for Piece<N> {
    fn deref_mut(&mut self) -> &mut [[u8; N]] {
        // SAFETY: as `deref`; the piece is borrowed exclusively, and no other covers the range.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zeroed_aligned_and_apart() {
        let mut arena = Arena::default();
        let mut pieces: Vec<Piece<32>> = [1, 3, 1000, CHUNK / 32 + 5, 7].map(|len| arena.zeroed(len)).into();
        for (index, piece) in (1..).zip(&mut pieces) {
            assert!(piece.iter().flatten().all(|byte| *byte == 0) && piece.as_ptr().addr() % LINE == 0);
            piece.fill([index; 32]);
        }
        drop(arena);
        assert!((1..).zip(&pieces).all(|(index, piece)| piece.iter().flatten().all(|byte| *byte == index)));
    }
}
