//! One incarnation of the owner: its book of leases, its pool's memory, its fence slots.
//!
//! The order in which it stores and frees is what `towline-worker`'s keeper does: parts, complement, generation, then
//! the blocks; and while it computes, a part's data, then its count. Every store is an event of its own, so that a
//! reader, another thread of the owner, or a pause can come between any two.

use towline_wire::fence::Fence;
use towline_wire::id::{BootEpoch, Generation};
use towline_wire::lease::{Grant, LeaseTable, Revocation};

use super::scenario::{BLOCK_BYTES, SLICE_BYTES, SLICES, Scenario, content};

/// How often a waiter looks at the book's lock, in µs.
const LOCK_POLL_US: u64 = 100;
/// The word that counts parts.
const PARTS: usize = 2;
/// Words are stored in this order: parts, complement, generation.
const STORE_ORDER: [usize; 3] = [PARTS, 1, 0];

/// Stores that one thread of the owner has under way.
#[derive(Debug)]
pub(super) enum Store {
    /// A new lease is shown in its slot, with as many parts; then its ticket goes out.
    Show { lent: Lent, parts_ready: u32 },
    /// A lease that is over is fenced; then its blocks are free.
    Fence(Revocation),
    /// The mutant's: its blocks are free already.
    Late { slot: u32, generation: Generation },
}

/// A request's blocks and the lease on them.
#[derive(Clone, Debug)]
pub(super) struct Lent {
    pub(super) grant: Grant,
    pub(super) request: usize,
    pub(super) blocks: Vec<u32>,
}

impl Store {
    fn target(&self) -> (u32, Generation, u64) {
        match self {
            Self::Show { lent, parts_ready } => {
                (lent.grant.slot, lent.grant.generation, u64::from(*parts_ready))
            }
            Self::Fence(over) => (over.slot, over.generation, 0),
            Self::Late { slot, generation } => (*slot, *generation, 0),
        }
    }
}

/// What a finished store lets happen.
pub(super) enum Stored {
    More(Store),
    Shown(Lent),
    Fenced(Vec<u32>),
    Nothing,
}

pub(super) struct Owner {
    pub(super) epoch: BootEpoch,
    pub(super) table: LeaseTable,
    pub(super) alive: bool,
    /// Stopped until then; also when it last went on.
    pub(super) paused_until: u64,
    pub(super) sweep_due: bool,
    /// A thread shows a new lease and holds the book's lock for it; who wants the book waits.
    pub(super) locked: bool,
    /// When that lock was last let go.
    pub(super) unlocked_us: u64,
    memory: Vec<[u8; BLOCK_BYTES]>,
    used: Vec<bool>,
    free: Vec<u32>,
    slots: Vec<[u64; 3]>,
}

impl Owner {
    pub(super) fn new(scenario: &Scenario, epoch: BootEpoch) -> Self {
        Self {
            epoch,
            table: LeaseTable::new(scenario.slots),
            alive: true,
            paused_until: 0,
            sweep_due: false,
            locked: false,
            unlocked_us: 0,
            memory: vec![[0; BLOCK_BYTES]; scenario.blocks],
            used: vec![false; scenario.blocks],
            free: (0..u32::try_from(scenario.blocks).unwrap()).collect(),
            slots: vec![[0; 3]; scenario.slots as usize],
        }
    }

    /// When a message or a thread that wants the book can have it, if not now.
    pub(super) fn busy_until(&self, now: u64) -> Option<u64> {
        let wait = self.locked.then_some(now + LOCK_POLL_US);
        (self.paused_until > now).then_some(self.paused_until).or(wait)
    }

    pub(super) fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// Takes `count` blocks, the last freed first, and writes what `of` has there. `None` if there are too few.
    pub(super) fn take(&mut self, count: usize, of: u64) -> Option<Vec<u32>> {
        let rest = self.free.len().checked_sub(count)?;
        let blocks = self.free.split_off(rest);
        for (position, block) in blocks.iter().enumerate() {
            let was_used = std::mem::replace(&mut self.used[*block as usize], true);
            assert!(!was_used, "block {block} was handed out twice");
            self.memory[*block as usize] = content(of, position);
        }
        Some(blocks)
    }

    /// Gives blocks back; names the first that was free already.
    pub(super) fn give_back(&mut self, blocks: &[u32]) -> Result<(), String> {
        for block in blocks {
            if !std::mem::replace(&mut self.used[*block as usize], false) {
                return Err(format!("block {block} was freed twice"));
            }
            self.free.push(*block);
        }
        Ok(())
    }

    /// Stores word `step` of a slot.
    pub(super) fn store(&mut self, store: Store, step: usize) -> Stored {
        let (slot, generation, parts) = store.target();
        let word = STORE_ORDER[step];
        let value = [generation.0, !generation.0, parts][word];
        let last = step + 1 == STORE_ORDER.len();
        let slots = &mut self.slots;
        let mut write = |slot: u32| slots[slot as usize][word] = value;
        match store {
            Store::Fence(over) if last => return Stored::Fenced(over.fenced(|slot, _| write(slot))),
            Store::Show { lent, .. } if last => {
                write(slot);
                return Stored::Shown(lent);
            }
            Store::Late { .. } if last => {
                write(slot);
                return Stored::Nothing;
            }
            _ => write(slot),
        }
        Stored::More(store)
    }

    /// Part `part` of a request that was lent early is computed into its blocks, unless they were taken back.
    pub(super) fn compute(&mut self, lent: &Lent, part: u32) {
        if self.table.check(lent.grant.lease, lent.grant.generation, [].into_iter()).is_err() {
            return;
        }
        let half = part as usize % SLICES;
        let range = half * SLICE_BYTES..(half + 1) * SLICE_BYTES;
        for (position, block) in lent.blocks.iter().enumerate() {
            let bytes = content(lent.request as u64, position);
            self.memory[*block as usize][range.clone()].copy_from_slice(&bytes[range.clone()]);
        }
    }

    /// Counts `ready` parts, if the lease still holds.
    pub(super) fn count(&mut self, grant: &Grant, ready: u32) {
        let slots = &mut self.slots;
        let store = |slot: u32, ready: u32| slots[slot as usize][PARTS] = u64::from(ready);
        // Nothing to count for a lease that is over.
        _ = self.table.mark(grant.lease, grant.generation, ready, store);
    }

    /// The mutant's: counts without asking whether the lease holds.
    pub(super) fn count_blindly(&mut self, grant: &Grant, ready: u32) {
        self.slots[grant.slot as usize][PARTS] = u64::from(ready);
    }

    /// A slice of a block as it is now.
    pub(super) fn slice(&self, block: u32, half: usize) -> &[u8] {
        &self.memory[block as usize][half * SLICE_BYTES..(half + 1) * SLICE_BYTES]
    }

    /// A slot's 24 bytes as they are now.
    pub(super) fn slot(&self, slot: u32) -> [u8; 24] {
        let words = self.slots[slot as usize];
        let mut bytes = Fence { generation: Generation(words[0]), parts_ready: words[2] }.encode();
        bytes[8..16].copy_from_slice(&words[1].to_le_bytes());
        bytes
    }

    /// What is missing when all is over: blocks that never came back, or leases that never ended.
    pub(super) fn unsettled(&self) -> Option<String> {
        let leaked = self.used.iter().filter(|used| **used).count();
        if !self.table.is_empty() {
            return Some(format!("{} leases outlive their end", self.table.len()));
        }
        if leaked > 0 || self.free.len() != self.used.len() {
            return Some(format!("{leaked} of {} blocks leaked, {} free", self.used.len(), self.free.len()));
        }
        (self.table.free() != self.slots.len())
            .then(|| format!("{} of {} slots leaked", self.slots.len() - self.table.free(), self.slots.len()))
    }
}
