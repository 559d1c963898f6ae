//! One reader: what it knows of its handoff, what arrived, and the bookkeeping that invariants need.

use std::ops::Range;

use towline_wire::digest::{BlockDigest, DigestMismatch, Digests};
use towline_wire::fence::Fence;
use towline_wire::handoff::{Handoff, HandoffError};
use towline_wire::id::{AgentName, BootEpoch};
use towline_wire::lease::Grant;

use super::scenario::{BLOCK_BYTES, SLICE_BYTES, SLICES, content};

/// What a reader is told about the KV that it should fetch; a sealed ticket's content, as far as it matters here.
#[derive(Clone, Debug)]
pub(super) struct Ticket {
    pub(super) epoch: BootEpoch,
    pub(super) grant: Grant,
    pub(super) blocks: Vec<u32>,
    pub(super) digests: Digests,
    pub(super) parts: u32,
    pub(super) parts_ready: u32,
}

/// What is read: a slice of the data, or the fence slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Slice(usize),
    Fence,
}

/// A fence read, as the owner's side saw it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FenceSeen {
    pub(super) bytes: [u8; 24],
    pub(super) at_us: u64,
    /// Whether the owner still held the lease at that moment.
    pub(super) lease_held: bool,
}

pub(super) struct Reader {
    pub(super) name: AgentName,
    pub(super) request: usize,
    pub(super) ticket: Option<Ticket>,
    pub(super) handoff: Option<Handoff>,
    /// The owner's incarnation that it is connected to.
    pub(super) session: Option<usize>,
    pub(super) buffer: Vec<u8>,
    pub(super) slices_left: usize,
    /// When the last slice was read from the owner's memory.
    pub(super) data_us: u64,
    pub(super) fence: Option<FenceSeen>,
    /// The mutant's: parts to be read once its early fence has landed, and whether that fence is still to be used.
    pub(super) postponed: Option<Range<u32>>,
    pub(super) fenced_early: bool,
    /// When it means to look at its slot again.
    pub(super) tick_at: u64,
    /// Parts that it was told are complete.
    pub(super) parts_told: u32,
    /// Whether the machine was told, in time, that it is connected: from then on it owes a release.
    pub(super) connected: bool,
    pub(super) release_asked: bool,
    pub(super) crashed: bool,
    pub(super) paused_until: u64,
    pub(super) cut_until: u64,
    pub(super) recorded: bool,
}

impl Reader {
    pub(super) fn new(request: usize, number: usize) -> Self {
        Self {
            name: AgentName::new(format!("d/{request}/{number}")).unwrap(),
            request,
            ticket: None,
            handoff: None,
            session: None,
            buffer: Vec::new(),
            slices_left: 0,
            data_us: 0,
            fence: None,
            postponed: None,
            fenced_early: false,
            tick_at: 0,
            parts_told: 0,
            connected: false,
            release_asked: false,
            crashed: false,
            paused_until: 0,
            cut_until: 0,
            recorded: false,
        }
    }

    /// The slices of these parts.
    pub(super) fn slices(&self, parts: &Range<u32>) -> Vec<usize> {
        let of_whole = self.ticket.as_ref().is_none_or(|ticket| ticket.parts == 1);
        let wanted = |slice: &usize| of_whole || parts.contains(&u32::try_from(slice % SLICES).unwrap());
        (0..self.buffer.len() / SLICE_BYTES).filter(wanted).collect()
    }

    /// Whether it holds exactly the bytes of part `part` of its request.
    pub(super) fn has(&self, part: u32) -> bool {
        self.slices(&(part..part + 1)).into_iter().all(|slice| {
            let expected = content(self.request as u64, slice / SLICES);
            let (at, within) = (slice * SLICE_BYTES, slice % SLICES * SLICE_BYTES);
            self.buffer[at..at + SLICE_BYTES] == expected[within..within + SLICE_BYTES]
        })
    }

    pub(super) fn land(&mut self, slice: usize, bytes: &[u8]) {
        self.buffer[slice * SLICE_BYTES..(slice + 1) * SLICE_BYTES].copy_from_slice(bytes);
    }

    pub(super) fn digest(&self, ticket: &Ticket) -> Result<(), DigestMismatch> {
        let blocks: Vec<_> = self.buffer.chunks(BLOCK_BYTES).collect();
        ticket.digests.check(0, blocks.len(), |position| {
            let mut digest = BlockDigest::default();
            blocks[position].chunks(SLICE_BYTES).for_each(|slice| digest.update(slice));
            digest.finish()
        })
    }

    pub(super) fn outcome(&self) -> Option<&Result<(), HandoffError>> {
        self.handoff.as_ref()?.outcome()
    }

    /// Whether the buffer holds exactly the bytes of the request.
    pub(super) fn is_right(&self) -> bool {
        self.buffer
            .chunks(BLOCK_BYTES)
            .enumerate()
            .all(|(position, block)| block == content(self.request as u64, position))
    }

    /// Whether the last fence came after the data and showed the ticket's generation.
    pub(super) fn is_fenced(&self) -> bool {
        let (Some(fence), Some(ticket)) = (self.fence, &self.ticket) else { return false };
        let shown = Fence::decode(&fence.bytes).map(|fence| fence.generation);
        fence.at_us >= self.data_us && shown == Ok(ticket.grant.generation)
    }
}
