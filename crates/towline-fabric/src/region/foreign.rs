//! Foreign memory: an engine's own buffer, by pointer and length.
//!
//! It is offered to peers where it lies. Over tcp they see no difference. Peers of the same host can't map it, as it has
//! no file: they are told its address, and have the kernel copy (`process/`).
//!
//! **The mark.** Beside the memory stands its nonce, at an address of its own, for as long as the memory may be touched and
//! no longer: it is wiped *before* the owner's guard is dropped. So whoever read bytes and then, in the same call, the
//! right nonce, has read them while they were there.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::file::MappedFile;
use super::{Access, Backing, Memory, NONCE_BYTES, Nonce, RegisterError, fresh_nonce, size_of};

/// What a foreign memory keeps.
pub(super) struct Foreign {
    // Before the guard: fields are dropped in this order.
    mark: Mark,
    /// Of memory that is a file's.
    pub(super) file: Option<Arc<MappedFile>>,
    _guard: Arc<dyn Any + Send + Sync>,
}

/// Where foreign memory lies in its owner's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Address of the first byte.
    pub(crate) base: u64,
    /// Address of its nonce.
    pub(crate) mark: u64,
}

impl Memory {
    /// Wraps `len` bytes at `base` that somebody else made. `guard` is kept until nobody can touch them any more: the last
    /// handle is gone, the last transfer has drained, the last peer of this host that was told the address has let go of
    /// it or ended. Dropping it may free the bytes.
    ///
    /// # Errors
    /// [`RegisterError::Size`] for zero or more than [`REGION_BYTES_MAX`](super::REGION_BYTES_MAX);
    /// [`RegisterError::Wraps`] when the bytes would pass the end of the address space.
    ///
    /// # Safety
    /// Until `guard` is dropped:
    /// - the bytes are mapped in this process, readable and writable, and stay where they are; so a file that they are
    ///   mapped from isn't cut short ([`Memory::open_file`] does without that promise);
    /// - no reference (`&`, `&mut`) to any of them is used while a transfer or a peer may touch it. Other code that reads
    ///   or writes them meanwhile goes through raw pointers or atomics, or is not Rust, and takes torn bytes for what
    ///   they are: fences and digests tell.
    ///
    /// With [`Access::PeersWrite`] peers write whenever the agent's regions say that they may, with no word to this process.
    pub unsafe fn foreign(
        base: NonNull<u8>,
        len: u64,
        access: Access,
        guard: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, RegisterError> {
        let size = size_of(len)?;
        let end = base.addr().get().checked_add(size);
        if end.is_none_or(|end| isize::try_from(end).is_err()) {
            return Err(RegisterError::Wraps { len });
        }
        let failed = |errno| RegisterError::Allocate { len, step: "getrandom", errno };
        let nonce = fresh_nonce().map_err(failed)?;
        let backing = Backing::Foreign(Foreign { mark: Mark::new(nonce), file: None, _guard: guard });
        Ok(Self::new((base, size), (true, access), nonce, backing))
    }
}

impl Foreign {
    /// The nonce as it stands now.
    pub(super) fn nonce(&self) -> Nonce {
        self.mark.nonce()
    }

    /// What peers of this host are told.
    pub(super) fn place(&self, base: NonNull<u8>) -> Place {
        Place { base: base.as_ptr().expose_provenance() as u64, mark: self.mark.address() }
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Foreign")
    }
}

const WORDS: usize = NONCE_BYTES / 8;

/// A nonce where other processes can read it.
struct Mark(Box<[AtomicU64; WORDS]>);

impl Mark {
    fn new(nonce: Nonce) -> Self {
        let (words, _) = nonce.as_chunks();
        let words: [AtomicU64; WORDS] =
            std::array::from_fn(|index| AtomicU64::new(u64::from_ne_bytes(words[index])));
        Self(Box::new(words))
    }

    fn nonce(&self) -> Nonce {
        let mut nonce = [0; NONCE_BYTES];
        let (words, _) = nonce.as_chunks_mut();
        for (word, at) in words.iter_mut().zip(self.0.iter()) {
            *word = at.load(Ordering::Acquire).to_ne_bytes();
        }
        nonce
    }

    fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        for word in self.0.iter() {
            word.store(0, Ordering::SeqCst);
        }
        // Wiped before anything that follows, the guard's end above all.
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU8;

    use super::*;

    type Bytes = Arc<Vec<AtomicU8>>;

    impl Memory {
        /// Foreign memory of its own, for other files' tests.
        pub(crate) fn foreign_sample(len: u64, access: Access) -> Self {
            let (bytes, base) = bytes(usize::try_from(len).unwrap());
            // SAFETY: atomics, kept by the guard.
            unsafe { Self::foreign(base, len, access, bytes) }.unwrap()
        }
    }

    fn bytes(len: usize) -> (Bytes, NonNull<u8>) {
        let bytes: Bytes = Arc::new((0..len).map(|_| AtomicU8::new(0)).collect());
        let base = NonNull::new(bytes.as_ptr().cast_mut().cast()).unwrap();
        (bytes, base)
    }

    fn wrap(bytes: &Bytes, base: NonNull<u8>, len: u64) -> Result<Memory, RegisterError> {
        let guard: Arc<dyn Any + Send + Sync> = Arc::<Vec<AtomicU8>>::clone(bytes);
        // SAFETY: the guard keeps the bytes, which are atomics; where `len` is another, nothing touches them.
        unsafe { Memory::foreign(base, len, Access::PeersWrite, guard) }
    }

    #[test]
    fn copies_reach_the_bytes_and_the_guard_goes_with_the_memory() {
        let (bytes, base) = bytes(4096);
        let memory = wrap(&bytes, base, 4096).unwrap();
        memory.write_from(17, b"kv").unwrap();
        assert_eq!(bytes[18].load(Ordering::Relaxed), b'v');
        bytes[19].store(b'!', Ordering::Relaxed);
        let mut seen = [0; 3];
        memory.read_into(17, &mut seen).unwrap();
        assert_eq!(&seen, b"kv!");
        assert!(memory.read_into(4095, &mut [0; 2]).is_err());
        assert!(memory.fd().is_none() && !memory.is_peers() && memory.is_writable());
        assert_eq!((memory.mapped_nonce(), Arc::strong_count(&bytes)), (*memory.nonce(), 2));
        drop(memory);
        assert_eq!(Arc::strong_count(&bytes), 1);
    }

    #[test]
    fn fences_in_foreign_memory_want_aligned_addresses() {
        let (bytes, base) = bytes(4096);
        let off = base.as_ptr().align_offset(8) + 1;
        // SAFETY: at most 8 of 4096 bytes in.
        let odd = unsafe { base.add(off) };
        let memory = wrap(&bytes, odd, 1024).unwrap();
        assert!(memory.store_u64(0, 5).is_err() && memory.load_u64(8).is_err(), "the address counts");
        memory.store_u64(7, 5).unwrap();
        assert_eq!(memory.load_u64(7), Ok(5));
    }

    #[test]
    fn what_cannot_be_memory_is_refused() {
        let (bytes, base) = bytes(16);
        for len in [0, super::super::REGION_BYTES_MAX + 1, u64::MAX] {
            assert!(matches!(wrap(&bytes, base, len), Err(RegisterError::Size { .. })), "{len}");
        }
        let high = NonNull::new(std::ptr::without_provenance_mut(usize::MAX - 10)).unwrap();
        assert!(matches!(wrap(&bytes, high, 64), Err(RegisterError::Wraps { len: 64 })));
    }
}
