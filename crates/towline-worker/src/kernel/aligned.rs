//! Buffers that start on a cache line.
//!
//! **Why it exists.** The allocator aligns large buffers to 16 bytes, always the same 16: every 64-byte access then
//! touches two lines, and every second 32-byte one.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line on every machine this runs on, or half of one.
const LINE: usize = 64;

/// A growing buffer of `T`, `LINE`-aligned when `T` divides a line.
#[derive(Debug, Default)]
pub(super) struct Aligned<T> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// Makes it `len` elements long; what they hold is unspecified.
    pub(super) fn resize(&mut self, len: usize) {
        let spare = LINE / size_of::<T>().max(1);
        if self.data.len() < len + spare {
            self.data.resize(len + spare, T::default());
        }
        self.start = self.data.as_ptr().align_offset(LINE).min(spare);
        self.len = len;
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data[self.start..self.start + self.len]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_on_a_line_whatever_its_size() {
        let mut buffer = Aligned::<f32>::default();
        for len in [0, 1, 16, 1000, 16, 100_000] {
            buffer.resize(len);
            assert_eq!(buffer.len(), len);
            assert!(buffer.as_ptr().addr().is_multiple_of(LINE), "{len}");
        }
    }
}
