//! The order of data, fence and notification, held by trying every interleaving of a read and a reclaim.
//!
//! The owner's steps are those of the brief: change the fence slot, then let the next user write over the blocks. The
//! reader's: every slice, in any order, then the fence. What is tried is the agent's own: when it says that a transfer is
//! done decides when the fence is asked for. Twenty interleavings for each order of the slices; whichever happens, bytes
//! that pass the fence are those that were lent. With either side's order swapped, some interleaving passes other bytes:
//! that shows that the trial would notice.

use std::sync::Arc;

use towline_fabric::{Agent, Memory, Peer, Region, RegionOptions, Transfer, TransferRequest};
use towline_wire::fence::{COMPLEMENT_AT, Fence, GENERATION_AT, PARTS_AT, SLOT_BYTES};
use towline_wire::id::Generation;
use towline_wire::receipt::{Op, TransportKind};

use super::stage::Stage;
use crate::support::*;

/// Bytes of a block: a slice.
const BLOCK: u64 = 2 << 20;
/// Blocks lent.
const COUNT: u32 = 2;
/// Steps of the reader: the slices and the fence. As many as the owner's: the slot and the blocks.
const STEPS: usize = COUNT as usize + 1;
const LENT: Generation = Generation(7);
const OURS: u64 = 0x0111;
const ALIEN: u64 = 0x0222;

/// Which side breaks its rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// The fence is asked for together with the data.
    ReaderFencesFirst,
    /// The blocks are another's before the slot changes.
    OwnerFreesFirst,
}

struct Trial {
    stage: Arc<Stage>,
    kv: Region,
    slot: Region,
    peer: Peer,
    landing: Arc<Memory>,
    fence: Arc<Memory>,
    _owner: Agent,
    _reader: Agent,
}

fn staged(name: &str, stage: &Arc<Stage>) -> Agent {
    Agent::start_with(config(name), Arc::new(Book::default()), vec![stage.transport()]).unwrap()
}

impl Trial {
    fn new() -> Self {
        let stage = Arc::new(Stage::default());
        let (owner, reader) = (staged("owner", &stage), staged("reader", &stage));
        let register = |bytes| owner.register(memory(bytes), RegionOptions::default()).unwrap();
        let (kv, slot) = (register(BLOCK * u64::from(COUNT)), register(SLOT_BYTES));
        let peer = wait(reader.connect(owner.address(), only(TransportKind::Ucx))).unwrap();
        let (landing, fence) = (memory(BLOCK * u64::from(COUNT)), memory(SLOT_BYTES));
        Self { stage, kv, slot, peer, landing, fence, _owner: owner, _reader: reader }
    }

    fn lend(&self) {
        (0..COUNT).for_each(|block| self.write(block, OURS));
        self.show(LENT, 1);
    }

    fn write(&self, block: u32, word: u64) {
        for at in [0, BLOCK - 8] {
            self.kv.memory().store_u64(u64::from(block) * BLOCK + at, word).unwrap();
        }
    }

    fn show(&self, generation: Generation, parts: u64) {
        let slot = self.slot.memory();
        slot.store_u64(PARTS_AT, parts).unwrap();
        slot.store_u64(COMPLEMENT_AT, !generation.0).unwrap();
        slot.store_u64(GENERATION_AT, generation.0).unwrap();
    }

    /// The owner's next step of taking the blocks back.
    fn reclaim(&self, step: usize, mutant: Mutant) {
        let fence_at = if mutant == Mutant::OwnerFreesFirst { STEPS - 1 } else { 0 };
        if step == fence_at {
            return self.show(Generation(LENT.0 + 1), 0);
        }
        let block = if fence_at == 0 { step - 1 } else { step };
        self.write(u32::try_from(block).unwrap(), ALIEN);
    }

    fn request(&self, local: &Arc<Memory>, region: &Region, block: u64, count: u32) -> TransferRequest {
        let list = || blocks(block, 0..count);
        request(Op::Read, local, region.id(), (list(), list()))
    }

    fn read_data(&self) -> Transfer {
        self.peer.transfer(self.request(&self.landing, &self.kv, BLOCK, COUNT)).unwrap()
    }

    fn read_fence(&self) -> Transfer {
        self.peer.transfer(self.request(&self.fence, &self.slot, SLOT_BYTES, 1)).unwrap()
    }

    /// Whether what arrived passes for good, and whether it is what was lent.
    fn verdict(&self) -> (bool, bool) {
        let mut slot = [0; 24];
        self.fence.read_into(0, &mut slot).unwrap();
        let passes = Fence::decode(&slot).is_ok_and(|fence| fence.check(LENT, 1).is_ok());
        let word = |block: u32, at| self.landing.load_u64(u64::from(block) * BLOCK + at).unwrap();
        let is_ours = (0..COUNT).all(|block| [0, BLOCK - 8].iter().all(|at| word(block, *at) == OURS));
        (passes, is_ours)
    }

    /// One interleaving: bit `n` of `turns` says whether the reader has turn `n`. Whether other bytes passed for good.
    fn is_fooled(&self, turns: u32, reversed: bool, mutant: Mutant) -> bool {
        self.lend();
        let mut data = self.read_data();
        let mut fence = (mutant == Mutant::ReaderFencesFirst).then(|| self.read_fence());
        // The last of them is played first: an early fence.
        let mut slices = self.stage.take(COUNT as usize + usize::from(fence.is_some()));
        if reversed {
            slices[..COUNT as usize].reverse();
        }
        let mut owner_step = 0;
        for turn in 0..2 * STEPS {
            if turns & 1 << turn == 0 {
                self.reclaim(owner_step, mutant);
                owner_step += 1;
                continue;
            }
            self.stage.play(slices.pop().unwrap());
            if data.is_done() && fence.is_none() {
                // The agent says that the data is in place: now, and not before, the fence is asked for.
                fence = Some(self.read_fence());
                slices.append(&mut self.stage.take(1));
            }
        }
        data.wait(PATIENCE).unwrap().unwrap();
        fence.unwrap().wait(PATIENCE).unwrap().unwrap();
        let (passes, is_ours) = self.verdict();
        passes && !is_ours
    }

    /// Interleavings that fool the reader, of all that there are.
    fn fooled(&self, mutant: Mutant) -> (usize, usize) {
        let interleavings = (0u32..1 << (2 * STEPS)).filter(|turns| turns.count_ones() as usize == STEPS);
        let tried: Vec<bool> = interleavings
            .flat_map(|turns| [false, true].map(|reversed| self.is_fooled(turns, reversed, mutant)))
            .collect();
        (tried.iter().filter(|fooled| **fooled).count(), tried.len())
    }
}

#[test]
fn no_interleaving_of_a_read_and_a_reclaim_passes_other_bytes_for_good() {
    assert_eq!(Trial::new().fooled(Mutant::None), (0, 40));
}

#[test]
fn a_reader_that_fences_before_its_data_is_fooled() {
    let (fooled, of) = Trial::new().fooled(Mutant::ReaderFencesFirst);
    assert!(fooled > of / 4, "{fooled} of {of}");
}

#[test]
fn an_owner_that_frees_before_it_fences_fools_its_reader() {
    let (fooled, of) = Trial::new().fooled(Mutant::OwnerFreesFirst);
    assert!(fooled > 0, "{fooled} of {of}");
}

#[test]
fn a_notification_follows_the_last_slice_in_whatever_order_they_end() {
    let stage = Arc::new(Stage::default());
    let book = Arc::new(Book::default());
    let owner =
        Agent::start_with(config("owner"), Arc::<Book>::clone(&book), vec![stage.transport()]).unwrap();
    let reader = staged("reader", &stage);
    let region = owner.register(memory(3 * BLOCK), RegionOptions::default()).unwrap();
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Ucx))).unwrap();
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let list = || blocks(BLOCK, 0..3);
        let mut request = request(Op::Read, &memory(3 * BLOCK), region.id(), (list(), list()));
        request.notify = Some(b"read".to_vec());
        let mut transfer = peer.transfer(request).unwrap();
        let mut slices: Vec<_> = stage.take(3).into_iter().map(Some).collect();
        for index in order {
            assert!(!transfer.is_done());
            // A notification that had been sent would be heard before this is answered.
            assert_eq!(wait(peer.ping()), Ok(()));
            assert_eq!(book.wait_for(|heard| Some(heard.notes.len())), 0, "it came before the data");
            stage.play(slices[index].take().unwrap());
        }
        transfer.wait(PATIENCE).unwrap().unwrap();
        book.wait_for(|heard| heard.notes.pop_front());
        assert_eq!(stage.waiting(), 0);
    }
}
