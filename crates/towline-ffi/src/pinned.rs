//! Memory that a library may read or write until it has called back.

use std::ptr::NonNull;

/// Bytes at one address for as long as the value lives.
///
/// # Safety
/// Until it is dropped: `base` and `len_bytes` answer the same, the bytes are mapped and may be read, and written if `is_writable`, by
/// this process and by devices; and no reference to any of them is used meanwhile: who looks at them copies, by address or atomically.
pub unsafe trait Pinned: Send + Sync {
    /// Of the first byte.
    fn base(&self) -> NonNull<u8>;

    /// How many bytes.
    fn len_bytes(&self) -> usize;

    /// Whether they may be written.
    fn is_writable(&self) -> bool;
}
