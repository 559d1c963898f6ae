//! Memory for tests.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Arc;

use towline_ffi::pinned::Pinned;

/// Bytes that are only looked at by copies.
pub(crate) struct Bytes(Box<[UnsafeCell<u8>]>);

// SAFETY: tests look at them when nothing is in flight.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

// SAFETY: a box stays where it is; cells may be written behind references to them.
unsafe impl Pinned for Bytes {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&self.0[0]).cast()
    }

    fn len_bytes(&self) -> usize {
        self.0.len()
    }

    fn is_writable(&self) -> bool {
        true
    }
}

impl Bytes {
    pub(crate) fn new(bytes: impl IntoIterator<Item = u8>) -> Arc<Self> {
        Arc::new(Self(bytes.into_iter().map(UnsafeCell::new).collect()))
    }

    pub(crate) fn copy(&self) -> Vec<u8> {
        // SAFETY: nothing is in flight.
        self.0.iter().map(|cell| unsafe { *cell.get() }).collect()
    }

    /// Where they begin.
    pub(crate) fn address(&self) -> u64 {
        self.base().as_ptr().addr() as u64
    }
}
