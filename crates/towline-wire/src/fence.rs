//! The fence slot: where a reader checks that what it read was still promised.
//!
//! One-sided reads can't be refused in time, so the owner leaves a mark instead. Each lease has a slot of 64 bytes in
//! a region of its own:
//!
//! ```text
//!  0           8            16            24     64
//!  | generation | !generation | parts ready | unused |      u64 little-endian
//! ```
//!
//! **Owner, to reclaim:** store a new generation, full fence, only then reuse the blocks. **Reader:** read the slot
//! only after every byte of the data has arrived; if the generation is not the ticket's, the data may be torn and is
//! thrown away. The complement tells a torn slot from a changed one.
//!
//! **Owner, while it computes:** store a part's data, then, with release order, the count of parts. **Reader:** read a
//! part only after the slot counted it, in a read that was begun after the ticket came. The count is stored before the
//! generation when a lease is granted, is set to 0 before the generation changes when it ends, and only grows between:
//! so whoever sees the ticket's generation sees no count of another lease, whatever the order in which a read takes the
//! words, except one that the read after the data exposes.

use thiserror::Error;

use crate::id::Generation;

/// Bytes of a slot: a cache line, so that owners of neighbouring leases don't disturb each other.
pub const SLOT_BYTES: u64 = 64;

/// Offset of the generation in a slot.
pub const GENERATION_AT: u64 = 0;
/// Offset of the generation's complement.
pub const COMPLEMENT_AT: u64 = 8;
/// Offset of the number of parts ready.
pub const PARTS_AT: u64 = 16;

/// A slot's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The lease generation that holds now.
    pub generation: Generation,
    /// Ordered parts of the transfer whose data is complete; all of them when the compute ended before the lease was
    /// granted.
    pub parts_ready: u64,
}

impl Fence {
    /// The first 24 bytes of a slot.
    pub fn encode(&self) -> [u8; 24] {
        let mut slot = [0; 24];
        slot[..8].copy_from_slice(&self.generation.0.to_le_bytes());
        slot[8..16].copy_from_slice(&(!self.generation.0).to_le_bytes());
        slot[16..].copy_from_slice(&self.parts_ready.to_le_bytes());
        slot
    }

    /// Reads a slot.
    ///
    /// # Errors
    /// [`FenceError::Torn`] when generation and complement disagree: the owner was storing; read again or give up.
    pub fn decode(slot: &[u8; 24]) -> Result<Self, FenceError> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&slot[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if word(0) != !word(8) {
            return Err(FenceError::Torn);
        }
        Ok(Self { generation: Generation(word(0)), parts_ready: word(16) })
    }

    /// Whether data read before this slot is what the ticket of `generation` promised, `parts` parts of it.
    ///
    /// # Errors
    /// [`FenceError::Expired`] when the lease is another's by now; [`FenceError::NotReady`] when parts are missing.
    pub fn check(&self, generation: Generation, parts: u64) -> Result<(), FenceError> {
        if self.generation != generation {
            return Err(FenceError::Expired { promised: generation, found: self.generation });
        }
        if self.parts_ready < parts {
            return Err(FenceError::NotReady { ready: self.parts_ready, needed: parts });
        }
        Ok(())
    }
}

/// Why data may not be used.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum FenceError {
    /// Read the slot again; if it stays torn, treat it as expired.
    #[error("the fence slot was being written")]
    Torn,
    /// Throw the data away; compute it, or ask prefill again.
    #[error("the lease of generation {promised} is over, the slot holds {found}")]
    Expired {
        /// The ticket's.
        promised: Generation,
        /// The slot's.
        found: Generation,
    },
    /// Wait and read the slot again.
    #[error("{ready} of {needed} parts are ready")]
    NotReady {
        /// Parts ready.
        ready: u64,
        /// Parts needed.
        needed: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_tells_valid_changed_torn_and_unready_apart() {
        let fence = Fence { generation: Generation(5), parts_ready: 1 };
        let again = Fence::decode(&fence.encode()).unwrap();
        assert_eq!(again.check(Generation(5), 1), Ok(()));
        assert!(matches!(again.check(Generation(4), 1), Err(FenceError::Expired { .. })));
        assert!(matches!(again.check(Generation(5), 2), Err(FenceError::NotReady { .. })));
        let mut torn = fence.encode();
        torn[0] ^= 1;
        assert_eq!(Fence::decode(&torn), Err(FenceError::Torn));
    }

    #[test]
    fn a_zeroed_slot_is_never_valid() {
        assert_eq!(Fence::decode(&[0; 24]), Err(FenceError::Torn));
    }
}
