//! The fence slot under a weak memory model: why owner and reader both need a full fence, and where.
//!
//! A restatement, as loom can't look into mapped memory. The owner ends a lease as `towline-worker`'s keeper does: words
//! by `Memory::store_u64`, a full fence, and only then is the block another's. The reader reads as `shm` does: bytes in no
//! order, a full fence at the end of each transfer, and the slot by a transfer of its own. Bytes that are copied while
//! another writes them are relaxed atomics here. Each fence is also left out: then the promise must break, or the model
//! would see nothing.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

use crate::Model;

pub(crate) const MODELS: &[Model] =
    &[("a slot that still shows the lease after the data proves the data", || lease_ends(Fences::Both))];

/// These must fail.
pub(crate) const MUTANTS: &[Model] = &[
    ("an owner without a fence hands out alien bytes", || lease_ends(Fences::ReadersOnly)),
    ("a reader without a fence takes alien bytes", || lease_ends(Fences::OwnersOnly)),
    ("a reader that looks at the slot first takes alien bytes", || lease_ends(Fences::SlotFirst)),
];

#[derive(Clone, Copy, PartialEq)]
enum Fences {
    Both,
    OwnersOnly,
    ReadersOnly,
    /// Both, but the reader reads the slot before the data.
    SlotFirst,
}

/// The generation that the reader's ticket names, and the one after it.
const PROMISED: u64 = 1;
const NEXT: u64 = 2;
/// What the lease's block holds, and what its next holder writes there.
const OWN: u64 = 10;
const ALIEN: u64 = 20;

struct Owned {
    generation: AtomicU64,
    complement: AtomicU64,
    block: AtomicU64,
}

impl Owned {
    fn reclaim(&self, fences: Fences) {
        self.complement.store(!NEXT, Ordering::Release);
        self.generation.store(NEXT, Ordering::Release);
        if fences != Fences::ReadersOnly {
            fence(Ordering::SeqCst);
        }
        self.block.store(ALIEN, Ordering::Relaxed);
    }

    /// Whether the slot shows the promised generation, whole.
    fn shows_the_lease(&self) -> bool {
        let slot = [&self.generation, &self.complement].map(|word| word.load(Ordering::Relaxed));
        slot == [PROMISED, !PROMISED]
    }

    /// The block's bytes, and whether they are to be taken for the lease's.
    fn read(&self, fences: Fences) -> (u64, bool) {
        let before = self.shows_the_lease();
        let bytes = self.block.load(Ordering::Relaxed);
        if fences != Fences::OwnersOnly {
            fence(Ordering::SeqCst);
        }
        let taken = if fences == Fences::SlotFirst { before } else { self.shows_the_lease() };
        (bytes, taken)
    }
}

fn lease_ends(fences: Fences) {
    let owned = Arc::new(Owned {
        generation: AtomicU64::new(PROMISED),
        complement: AtomicU64::new(!PROMISED),
        block: AtomicU64::new(OWN),
    });
    let owner = Arc::clone(&owned);
    let other = thread::spawn(move || owner.reclaim(fences));
    let (bytes, taken) = owned.read(fences);
    assert!(!taken || bytes == OWN, "alien bytes were taken for the lease's");
    other.join().unwrap();
}
