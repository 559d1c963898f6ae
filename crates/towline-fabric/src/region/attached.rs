//! What a transport made of a memory, such as a mapping in its devices: kept with the memory, and gone before its bytes.
//!
//! **Cost.** A lock and a look through a list of at most a few entries for each slice; making is the transport's.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towline_ffi::pinned::Pinned;

use super::{Backing, Memory};

/// Who attaches: one opened transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attacher(u64);

impl Attacher {
    /// One that there wasn't before.
    pub(crate) fn new() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::Relaxed))
    }
}

/// A memory's attachments.
#[derive(Default)]
pub(super) struct Attached(Mutex<Vec<(Attacher, Arc<dyn Any + Send + Sync>)>>);

impl Attached {
    fn lock(&self) -> MutexGuard<'_, Vec<(Attacher, Arc<dyn Any + Send + Sync>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attached({})", self.lock().len())
    }
}

/// A memory's bytes, which stay in their place as long as this does.
pub(crate) struct Held {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    _backing: Arc<Backing>,
}

// SAFETY: as `Memory`, of which it is a part: it only tells where the bytes are.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

// SAFETY: the backing keeps the bytes mapped where they are; `Memory` never lends a reference to them without its caller's argument
// that nothing else touches them. A file's pages, which may go, are not handed out ([`Memory::held`]).
unsafe impl Pinned for Held {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn len_bytes(&self) -> usize {
        self.len
    }

    fn is_writable(&self) -> bool {
        self.writable
    }
}

impl Memory {
    /// Its bytes for a library that reaches them by address; none of a file's, whose pages may go at any time.
    pub(crate) fn held(&self) -> Option<Held> {
        let _backing = Arc::clone(&self.backing);
        (!self.is_file()).then_some(Held {
            base: self.base,
            len: self.len,
            writable: self.writable,
            _backing,
        })
    }

    /// What `by` attached before, or what `make` makes now. The lock is held meanwhile: nothing is made twice.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn attached<T: Any + Send + Sync, E>(
        &self,
        by: Attacher,
        make: impl FnOnce() -> Result<Arc<T>, E>,
    ) -> Result<Arc<T>, E> {
        let mut attached = self.attached.lock();
        let found = attached.iter().find(|(attacher, _)| *attacher == by).map(|(_, value)| Arc::clone(value));
        if let Some(Ok(value)) = found.map(Arc::downcast) {
            return Ok(value);
        }
        let value = make()?;
        attached.push((by, Arc::<T>::clone(&value)));
        Ok(value)
    }

    /// Gives up what `by` attached.
    pub(crate) fn detach(&self, by: Attacher) {
        let gone: Vec<_> = self.attached.lock().extract_if(.., |(attacher, _)| *attacher == by).collect();
        // The lock is free again: letting go may take its time.
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_is_attached_once_for_each_and_goes_before_the_bytes() {
        let memory = Memory::allocate("attached", 4096).unwrap();
        let [one, other] = [Attacher::new(), Attacher::new()];
        let held = Arc::new(memory.held().unwrap());
        let weak = Arc::downgrade(&held);
        let first = memory.attached(one, || Ok::<_, ()>(held)).unwrap();
        assert_eq!((first.base(), first.len_bytes()), (memory.base, 4096));
        drop(first);
        let again = memory.attached::<Held, _>(one, || Err("made twice"));
        assert!(again.is_ok_and(|again| Arc::ptr_eq(&again, &weak.upgrade().unwrap())));
        assert_eq!(memory.attached::<Held, _>(other, || Err("not made")).err(), Some("not made"));
        memory.attached(other, || Ok::<_, ()>(Arc::new(5_u32))).unwrap();
        memory.detach(one);
        assert!(weak.upgrade().is_none());
        assert_eq!(memory.attached::<u32, ()>(other, || Err(())).as_deref(), Ok(&5));
    }

    #[test]
    fn what_is_held_outlives_the_memory() {
        let memory = Memory::allocate("held", 4096).unwrap();
        memory.write_from(0, b"kv").unwrap();
        let held = memory.held().unwrap();
        drop(memory);
        // SAFETY: still mapped, and nobody else knows of it.
        assert_eq!(unsafe { held.base().as_ptr().read_volatile() }, b'k');
    }
}
