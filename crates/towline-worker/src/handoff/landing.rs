//! Where fence slots of other engines are read into: memory that pulls use in turns.
//!
//! **Why in turns.** What a transfer writes into is a sealed file, mapped and populated: nine system calls and two pages
//! of zeros, for 64 bytes. Taking a kept one is a lock and a pop. Each kept one costs a file and two pages.
//!
//! **The rule.** A fence read that was cancelled or ran out of time may still land. So its request holds the landing, the
//! transport lets go of it when nothing can write there any more, and only then it is given to another pull.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use towline_fabric::{Memory, RangeError, RegisterError, TransferRequest};
use towline_wire::blocks::BlockList;
use towline_wire::fence::SLOT_BYTES;
use towline_wire::receipt::Op;
use towline_wire::ticket::RankTicket;

/// Bytes of a landing that is kept: room for 64 sources. A pull from more has one of its own.
const KEPT_BYTES: u64 = 64 * SLOT_BYTES;

/// Most landings that are kept: more pulls at a time than an engine batches. Those beyond make their own.
const KEPT_MAX: usize = 64;

type Kept = Arc<Mutex<Vec<Arc<Memory>>>>;

/// The landings of one rank.
#[derive(Default)]
pub(super) struct Landings(Kept);

impl Landings {
    /// One for a pull from so many sources.
    ///
    /// # Errors
    /// [`RegisterError`] when a new one is needed and memory is short.
    pub(super) fn take(&self, sources: usize) -> Result<Arc<Landing>, RegisterError> {
        let bytes = KEPT_BYTES.max(SLOT_BYTES * sources as u64);
        let kept = if bytes == KEPT_BYTES { lock(&self.0).pop() } else { None };
        let memory = match kept {
            Some(memory) => memory,
            None => Arc::new(Memory::allocate("towline-fence-landing", bytes)?),
        };
        Ok(Arc::new(Landing { memory, home: Arc::clone(&self.0) }))
    }
}

/// A slot for each source of a pull. Goes back with the last that refers to it: the pull, or a transfer.
pub(super) struct Landing {
    memory: Arc<Memory>,
    home: Kept,
}

impl Landing {
    /// The request that reads the fence of `ticket`, as the pull's source number `source`.
    pub(super) fn read(
        self: &Arc<Self>,
        source: usize,
        ticket: &RankTicket,
        deadline: Duration,
    ) -> TransferRequest {
        let slot = |index| BlockList {
            group: 0,
            bases: vec![0],
            block_bytes: SLOT_BYTES,
            stride: SLOT_BYTES,
            indices: vec![index],
        };
        TransferRequest {
            op: Op::Read,
            local: Arc::clone(&self.memory),
            // A source past the end is refused with the request.
            local_blocks: slot(u32::try_from(source).unwrap_or(u32::MAX)),
            remote_region: ticket.fence_region,
            remote_blocks: slot(ticket.slot),
            lease: None,
            deadline,
            hold: Some(Arc::clone(self) as Arc<_>),
            notify: None,
        }
    }

    /// The fence that the last read of `source` brought.
    ///
    /// # Errors
    /// [`RangeError`] for a source past the end.
    pub(super) fn fence(&self, source: usize) -> Result<[u8; 24], RangeError> {
        let mut bytes = [0; 24];
        self.memory.read_into((source as u64).saturating_mul(SLOT_BYTES), &mut bytes)?;
        Ok(bytes)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if self.memory.len() == KEPT_BYTES {
            let mut kept = lock(&self.home);
            if kept.len() < KEPT_MAX {
                kept.push(Arc::clone(&self.memory));
            }
        }
    }
}

fn lock(kept: &Kept) -> MutexGuard<'_, Vec<Arc<Memory>>> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use towline_wire::digest::{DigestMode, Digests};
    use towline_wire::id::{AgentName, BootEpoch, Generation, LeaseId, RegionId};

    use super::*;

    fn ticket() -> RankTicket {
        RankTicket {
            agent: AgentName::new("p").unwrap(),
            boot_epoch: BootEpoch(1),
            address: "127.0.0.1:1".into(),
            lease: LeaseId(1),
            generation: Generation(1),
            slot: 3,
            region: RegionId(1),
            fence_region: RegionId(2),
            parts_ready: 1,
            groups: vec![],
            digests: Digests { mode: DigestMode::Off, values: vec![] },
        }
    }

    #[test]
    fn a_landing_is_used_again_only_when_no_read_can_write_it_any_more() {
        let landings = Landings::default();
        let landing = landings.take(1).unwrap();
        let first = Arc::clone(&landing.memory);
        // What the transport keeps of a read that was cancelled and has not drained.
        let TransferRequest { hold, .. } = landing.read(0, &ticket(), Duration::ZERO);
        drop(landing);
        let other = landings.take(1).unwrap();
        assert!(!Arc::ptr_eq(&other.memory, &first), "the read may still land in the first");
        drop(hold);
        assert!(Arc::ptr_eq(&landings.take(1).unwrap().memory, &first));
    }

    #[test]
    fn each_source_has_a_slot_of_its_own() {
        let landing = Landings::default().take(100).unwrap();
        for (source, byte) in [(0, 7), (1, 8), (99, 9)] {
            let request = landing.read(source, &ticket(), Duration::ZERO);
            let [slot] = request.local_blocks.indices[..] else { panic!("one slot") };
            request.local.write_from(u64::from(slot) * SLOT_BYTES, &[byte; 24]).unwrap();
            assert_eq!(request.remote_blocks.indices, [3]);
        }
        assert_eq!([0, 1, 99].map(|source| landing.fence(source).unwrap()[0]), [7, 8, 9]);
        assert!(landing.fence(100).is_err());
    }

    #[test]
    fn landings_that_are_kept_are_bounded_in_size_and_number() {
        let landings = Landings::default();
        drop(landings.take(100).unwrap());
        assert_eq!(lock(&landings.0).len(), 0, "a large one is not kept");
        let many: Vec<_> = (0..KEPT_MAX + 1).map(|_| landings.take(1).unwrap()).collect();
        drop(many);
        assert_eq!(lock(&landings.0).len(), KEPT_MAX);
    }
}
