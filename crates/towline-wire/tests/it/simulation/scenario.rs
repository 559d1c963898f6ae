//! What a seed decides before anything happens: sizes, wire, network, requests, and which faults come when.

use towline_wire::digest::DigestMode;

use crate::random::Random;

/// Bytes of a block.
pub(super) const BLOCK_BYTES: usize = 16;
/// Bytes of a slice: two a block, so that a block can be torn as well as a list of blocks. Where KV is lent in two
/// parts, the first slice of every block is part 0 and the second is part 1, as layers are.
pub(super) const SLICE_BYTES: usize = 8;
/// Slices of a block.
pub(super) const SLICES: usize = BLOCK_BYTES / SLICE_BYTES;
/// After this nothing new begins, in µs; what runs still ends.
pub(super) const QUIET_US: u64 = 150_000;

/// How bytes reach the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire {
    /// A mapping (shm): the owner takes no part, and its memory outlives it.
    Mapped,
    /// One-sided over a network (RDMA): the owner's CPU takes no part; a lost answer makes the read happen again.
    Remote,
    /// The owner's process serves each read and checks the lease first (tcp).
    Served,
}

/// A mutation that the simulation must catch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mutant {
    /// None: the code as it is.
    None,
    /// The owner frees the blocks, and only then stores the new generation.
    OwnerFreesFirst,
    /// The owner shows a new lease in its slot without keeping the book locked, so that the lease can end meanwhile.
    OwnerShowsUnlocked,
    /// The owner counts a part as ready, and only then stores its data.
    OwnerCountsFirst,
    /// The owner stores a count without its book: it may come when the slot shows another lease.
    OwnerCountsUnlocked,
    /// The reader reads the fence before the data.
    ReaderFencesFirst,
    /// The reader does not wait until a part is counted.
    ReaderIgnoresCount,
    /// The reader does not compare the boot epoch when it connects.
    ReaderForgetsEpoch,
}

/// What goes wrong, beside what the network does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    OwnerCrashes,
    OwnerRestarts,
    /// Like SIGSTOP, until that many µs later.
    OwnerPauses(u64),
    ReaderCrashes(usize),
    ReaderPauses(usize, u64),
    /// Nothing crosses the network to or from that reader.
    Cut(usize, u64),
    Cancel(usize),
}

#[derive(Debug)]
pub(super) struct Request {
    /// When its KV is computed.
    pub(super) at_us: u64,
    pub(super) blocks: usize,
    pub(super) readers: u32,
    pub(super) lending: Lending,
}

/// When a request's KV is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lending {
    /// When all of it is computed, as one part.
    Whole,
    /// Before any of it is, as two parts.
    Early,
}

impl Lending {
    /// Parts, and how many of them are ready when the ticket goes out.
    pub(super) fn parts(self) -> (u32, u32) {
        match self {
            Self::Whole => (1, 1),
            Self::Early => (2, 0),
        }
    }
}

#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) blocks: usize,
    pub(super) slots: u32,
    pub(super) wire: Wire,
    pub(super) digests: DigestMode,
    /// Whether the network flips bits; only with full digests, since nothing else promises to notice.
    pub(super) corrupts: bool,
    pub(super) ttl_us: u64,
    /// From the ticket's arrival.
    pub(super) deadline_us: u64,
    pub(super) latency_us: u64,
    pub(super) loss_permille: u64,
    /// Whether readers keep their leases alive; without, a lease may end under a reader that is only slow.
    pub(super) heartbeats: bool,
    pub(super) tail_permille: u64,
    /// Longest time between two stores of the owner: a thread may lose its CPU in between.
    pub(super) store_gap_us: u64,
    /// Longest time that computing a part takes.
    pub(super) compute_us: u64,
    pub(super) requests: Vec<Request>,
    pub(super) faults: Vec<(u64, Fault)>,
}

impl Scenario {
    pub(super) fn of(random: &mut Random) -> Self {
        let digests = [DigestMode::Off, DigestMode::Off, DigestMode::Sampled, DigestMode::Full];
        let digests = digests[random.index(4)];
        let corrupts = digests == DigestMode::Full && random.chance(200);
        // What is lent before it is computed has no digests: a flipped bit would go unnoticed, as nobody promised else.
        let early_permille = if corrupts { 0 } else { 500 };
        let requests: Vec<_> = (0..random.within(1, 3))
            .map(|_| Request {
                at_us: random.within(0, 60_000),
                blocks: random.index(3) + 1,
                readers: if random.chance(200) { 2 } else { 1 },
                lending: if random.chance(early_permille) { Lending::Early } else { Lending::Whole },
            })
            .collect();
        let readers = requests.iter().map(|request| request.readers as usize).sum();
        Self {
            blocks: random.index(5) + 3,
            slots: [1, 2, 4][random.index(3)],
            wire: [Wire::Mapped, Wire::Remote, Wire::Served][random.index(3)],
            digests,
            corrupts,
            ttl_us: random.within(4_000, 40_000),
            deadline_us: random.within(5_000, 80_000),
            latency_us: random.within(50, 2_000),
            heartbeats: random.chance(600),
            loss_permille: [0, 20, 150][random.index(3)],
            tail_permille: [0, 30, 200][random.index(3)],
            store_gap_us: [1, 20, 500, 8_000][random.index(4)],
            compute_us: [10, 2_000, 20_000][random.index(3)],
            faults: (0..random.within(0, 2)).flat_map(|_| fault(random, readers)).collect(),
            requests,
        }
    }
}

fn fault(random: &mut Random, readers: usize) -> Vec<(u64, Fault)> {
    let at = random.within(0, 80_000);
    let reader = random.index(readers);
    // Shorter and longer than leases and deadlines.
    let long = random.within(500, 100_000);
    match random.index(7) {
        0 => vec![(at, Fault::OwnerCrashes)],
        1 | 2 => vec![(at, Fault::OwnerCrashes), (at + long / 10, Fault::OwnerRestarts)],
        3 => vec![(at, Fault::OwnerPauses(long))],
        4 => vec![(at, Fault::ReaderCrashes(reader))],
        5 => vec![(at, Fault::ReaderPauses(reader, long)), (at / 2, Fault::Cut(reader, long / 4))],
        _ => vec![(at, Fault::Cancel(reader))],
    }
}

/// What the KV of a request (or of other work, by a number of its own) is at a position: never alike for two of them.
pub(super) fn content(of: u64, position: usize) -> [u8; BLOCK_BYTES] {
    let mut random = Random::new(of << 8 | position as u64);
    let mut bytes = [0; BLOCK_BYTES];
    bytes[..8].copy_from_slice(&random.next().to_le_bytes());
    bytes[8..].copy_from_slice(&random.next().to_le_bytes());
    bytes
}
