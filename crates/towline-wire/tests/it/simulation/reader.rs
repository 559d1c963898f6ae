//! One reader: what it knows of its handoff, what arrived, and the bookkeeping that invariants need.

use towline_wire::digest::{BlockDigest, DigestMismatch, Digests};
use towline_wire::fence::Fence;
use towline_wire::handoff::{Handoff, HandoffError};
use towline_wire::id::BootEpoch;
use towline_wire::lease::Grant;

use super::scenario::{BLOCK_BYTES, SLICE_BYTES, content};

/// What a reader is told about the KV that it should fetch; a sealed ticket's content, as far as it matters here.
#[derive(Clone, Debug)]
pub(super) struct Ticket {
    pub(super) epoch: BootEpoch,
    pub(super) grant: Grant,
    pub(super) blocks: Vec<u32>,
    pub(super) digests: Digests,
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
    /// Whether the machine was told, in time, that it is connected: from then on it owes a release.
    pub(super) connected: bool,
    pub(super) release_asked: bool,
    pub(super) crashed: bool,
    pub(super) paused_until: u64,
    pub(super) cut_until: u64,
    pub(super) recorded: bool,
}

impl Reader {
    pub(super) fn new(request: usize) -> Self {
        Self {
            request,
            ticket: None,
            handoff: None,
            session: None,
            buffer: Vec::new(),
            slices_left: 0,
            data_us: 0,
            fence: None,
            connected: false,
            release_asked: false,
            crashed: false,
            paused_until: 0,
            cut_until: 0,
            recorded: false,
        }
    }

    pub(super) fn slices(&self) -> usize {
        self.buffer.len() / SLICE_BYTES
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
