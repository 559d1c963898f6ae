//! What this machine can do at most, measured between the repetitions of the case that it is the limit of.
//!
//! For `shm` it is `memcpy`: as many threads as the agents have copy threads copy the same runs, in the same order,
//! between two memories of this process that are allocated like regions. For `tcp` it is raw streams (`flood`): the
//! best of one, two, and one for each peer.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use towline_fabric::Memory;
use towline_wire::blocks::{Run, runs};
use towline_wire::receipt::TransportKind;

use super::flags::Case;
use super::flood::{BUFFER_BYTES_MAX, Plan, Stream};
use super::links::Links;
use super::row::{gb_per_s, median};
use super::shape::Side;

/// Longest run that is copied at a time: a slice of the fabric.
const RUN_BYTES_MAX: u64 = 2 << 20;
/// Up to here the fabric copies on the thread that posts, and so does the yardstick.
const INLINE_BYTES: u64 = 64 << 10;
/// Most bytes that raw streams move in a round: a rate doesn't depend on more.
const FLOOD_BYTES_MAX: u64 = 128 << 20;
/// Most raw streams at once.
const STREAMS_MAX: u32 = 8;
/// Most limit measurements of a case, spread over its repetitions.
const SAMPLES_MAX: u32 = 50;

/// The limit of a case.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Limit {
    /// 10⁹ bytes a second at the median; `None` with the reason in `note`.
    pub(crate) gb_per_s: Option<f64>,
    /// `memcpy` or `tcp-streams`.
    pub(crate) kind: &'static str,
    /// Threads that copied, or streams.
    pub(crate) threads: usize,
    /// How it was measured.
    pub(crate) note: String,
}

/// Measures the limit of one case.
pub(crate) enum Yardstick {
    Copy(Copying),
    Flood(Box<Flood>),
    /// It can't, and why.
    Missing(String),
}

impl Yardstick {
    /// The one that fits the case's wire.
    pub(crate) fn new(case: &Case, links: &Links, copy_threads: usize) -> Result<Self> {
        if case.transport == TransportKind::Shm {
            return Ok(Self::Copy(Copying::new(case, links, copy_threads)?));
        }
        // A limit that can't be had is a gap of the result, not its end.
        Ok(Flood::open(case, links)
            .map_or_else(|error| Self::Missing(format!("{error:#}")), |flood| Self::Flood(Box::new(flood))))
    }

    /// Bytes that it needs beside the local memories: for a check before anything is allocated.
    pub(crate) fn bytes(case: &Case) -> u64 {
        let lanes = u64::from(case.batch) * u64::from(case.peers);
        if case.transport == TransportKind::Shm {
            return case.shape.span_bytes() * lanes;
        }
        // Sets of streams, both ends, twice the room for pages in random order.
        FLOOD_BYTES_MAX.min(case.bytes()) * stream_counts(case).len() as u64 * 4
    }

    /// Whether the limit is measured after repetition `index` of `count`.
    pub(crate) fn is_due(index: u32, count: u32) -> bool {
        index.is_multiple_of(count.div_ceil(SAMPLES_MAX))
    }

    /// Measures `burst` rounds, back to back as those of the case are.
    pub(crate) fn measure(&mut self, burst: u32) {
        let outcome = match self {
            Self::Copy(copying) => copying.measure(burst),
            Self::Flood(flood) => flood.measure(burst),
            Self::Missing(_) => Ok(()),
        };
        if let Err(error) = outcome {
            *self = Self::Missing(format!("{error:#}"));
        }
    }

    /// Forgets what was measured so far: the first time touches new pages.
    pub(crate) fn warmed(&mut self) {
        match self {
            Self::Copy(copying) => copying.times.clear(),
            Self::Flood(flood) => flood.sets.iter_mut().for_each(|set| set.times.clear()),
            Self::Missing(_) => {}
        }
    }

    /// What came of it.
    pub(crate) fn limit(self, transport: TransportKind) -> Limit {
        match self {
            Self::Copy(copying) => copying.limit(),
            Self::Flood(flood) => flood.limit(),
            Self::Missing(note) => {
                let kind = if transport == TransportKind::Shm { "memcpy" } else { "tcp-streams" };
                Limit { gb_per_s: None, kind, threads: 0, note }
            }
        }
    }
}

/// A run to be copied.
#[derive(Clone)]
struct Piece {
    from: Arc<Memory>,
    to: Arc<Memory>,
    run: Run,
}

/// Copies between memories of this process.
pub(crate) struct Copying {
    /// What each thread copies.
    shares: Vec<Vec<Piece>>,
    bytes: u64,
    times: Vec<Duration>,
}

impl Copying {
    fn new(case: &Case, links: &Links, copy_threads: usize) -> Result<Self> {
        let shape = case.shape;
        let mut work = Vec::new();
        for link in &links.links {
            let source = Arc::new(Memory::allocate("bench-limit", link.local.len())?);
            super::pattern::fill(&source, super::pattern::Seed(0))?;
            for lane in 0..case.batch {
                let base = u64::from(lane) * shape.span_bytes();
                let [to, from] =
                    [Side::Local, Side::Remote].map(|side| shape.list(side, link.first_lane + lane, base));
                for run in runs(&to, &from, RUN_BYTES_MAX)? {
                    let (from, to) = (Arc::clone(&source), Arc::clone(&link.local));
                    work.push(Piece { from, to, run });
                }
            }
        }
        let threads = if shape.size_bytes() <= INLINE_BYTES {
            1
        } else {
            (copy_threads * case.initiators() as usize).min(work.len())
        };
        let shares = work.chunks(work.len().div_ceil(threads.max(1))).map(<[_]>::to_vec).collect();
        Ok(Self { shares, bytes: case.bytes(), times: Vec::new() })
    }

    fn measure(&mut self, burst: u32) -> Result<()> {
        if let [share] = self.shares.as_slice() {
            let started = Instant::now();
            (0..burst).try_for_each(|_| copy(share))?;
            self.times.push(started.elapsed() / burst);
            return Ok(());
        }
        for _ in 0..burst {
            self.times.push(together(self.shares.iter().map(|share| {
                move |ready: &Barrier| {
                    ready.wait();
                    let started = Instant::now();
                    copy(share).map(|()| started)
                }
            }))?);
        }
        Ok(())
    }

    fn limit(self) -> Limit {
        let threads = self.shares.len();
        let gb_per_s = median(&self.times).map(|time| gb_per_s(self.bytes, time));
        let note = format!("memcpy of the same pages between two local memories, threads: {threads}");
        Limit { gb_per_s, kind: "memcpy", threads, note }
    }
}

fn copy(share: &[Piece]) -> Result<()> {
    for Piece { from, to, run } in share {
        to.copy_from(run.local, from, run.remote, run.len)?;
    }
    Ok(())
}

/// Runs all at once, each on a thread of its own and from the moment that it gives back, when all were ready; the time
/// from the first start to the last end.
fn together<W>(work: impl ExactSizeIterator<Item = W>) -> Result<Duration>
where
    W: FnOnce(&Barrier) -> Result<Instant> + Send,
{
    let ready = Barrier::new(work.len());
    let spans = std::thread::scope(|scope| {
        let ready = &ready;
        let timed = |work: W| move || work(ready).map(|started| (started, Instant::now()));
        let threads: Vec<_> = work.map(|work| scope.spawn(timed(work))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|span| span.map_err(|_| anyhow!("a thread of the limit panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    let first = spans.iter().map(|(started, _)| *started).min();
    let last = spans.iter().map(|(_, ended)| *ended).max();
    Ok(last.zip(first).map_or(Duration::ZERO, |(last, first)| last.duration_since(first)))
}

/// Raw streams from or to the first owner.
pub(crate) struct Flood {
    sets: Vec<Streams>,
    paged: bool,
}

/// Some streams that share the bytes of a round.
struct Streams {
    streams: Vec<Stream>,
    /// Bytes that a round moves over all of them.
    bytes: u64,
    times: Vec<Duration>,
}

impl Flood {
    fn open(case: &Case, links: &Links) -> Result<Self> {
        let (address, token) = links.flood.context("the owner serves no raw streams")?;
        let bytes = case.bytes().min(FLOOD_BYTES_MAX);
        let mut sets = Vec::new();
        for count in stream_counts(case) {
            let plan = plan(case, bytes / u64::from(count));
            let streams = (0..count).map(|_| Stream::open(address, token, &plan).context("raw streams"));
            let bytes = plan.bytes() * u64::from(count);
            sets.push(Streams { streams: streams.collect::<Result<_>>()?, bytes, times: Vec::new() });
        }
        Ok(Self { sets, paged: case.block_bytes.is_some() })
    }

    fn measure(&mut self, burst: u32) -> Result<()> {
        self.sets.iter_mut().try_for_each(|set| (0..burst).try_for_each(|_| set.measure()))
    }

    fn limit(self) -> Limit {
        let rate = |set: &Streams| median(&set.times).map(|time| gb_per_s(set.bytes, time));
        let best =
            self.sets.iter().filter_map(|set| Some((rate(set)?, set))).max_by(|a, b| a.0.total_cmp(&b.0));
        let how = if self.paged { "readv and writev of shuffled pages" } else { "reads and writes of 1 MiB" };
        let (threads, bytes) = best.map_or((0, 0), |(_, set)| (set.streams.len(), set.bytes));
        let note = format!("raw TCP, {how}, {bytes} bytes from heap buffers, streams: {threads}");
        Limit { gb_per_s: best.map(|(rate, _)| rate), kind: "tcp-streams", threads, note }
    }
}

impl Streams {
    fn measure(&mut self) -> Result<()> {
        let elapsed = if let [stream] = self.streams.as_mut_slice() {
            let mut started = Instant::now();
            stream.round(|| started = Instant::now())?;
            started.elapsed()
        } else {
            together(self.streams.iter_mut().map(|stream| {
                move |ready: &Barrier| {
                    let mut started = Instant::now();
                    stream.round(|| {
                        ready.wait();
                        started = Instant::now();
                    })?;
                    Ok(started)
                }
            }))?
        };
        self.times.push(elapsed);
        Ok(())
    }
}

/// How many streams are tried: one, two, and as many as there are peers, the wires of the fabric itself.
fn stream_counts(case: &Case) -> Vec<u32> {
    let peers = case.peers.min(STREAMS_MAX);
    let mut counts = vec![1, 2];
    counts.extend((peers > 2).then_some(peers));
    counts
}

/// What one stream moves so that it comes to about `bytes`.
fn plan(case: &Case, bytes: u64) -> Plan {
    let (op, shape) = (case.op, case.shape);
    if case.block_bytes.is_none() {
        return Plan { op, piece_bytes: bytes.max(1), pieces: 1, slots: 1, seed: 0 };
    }
    let piece_bytes = shape.block_bytes.min(BUFFER_BYTES_MAX / 2);
    let pieces = u32::try_from(bytes / piece_bytes).unwrap_or(u32::MAX).max(1);
    let room = u32::try_from(BUFFER_BYTES_MAX / piece_bytes).unwrap_or(u32::MAX);
    let slots = if shape.shuffle.is_some() { pieces.saturating_mul(2).min(room) } else { pieces };
    Plan { op, piece_bytes, pieces, slots, seed: shape.shuffle.unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use towline_wire::receipt::Op;

    use super::*;
    use crate::bench::flags::{Order, Pattern};
    use crate::bench::shape::Shape;

    fn case(shape: Shape, block_bytes: Option<u64>) -> Case {
        let order = if shape.shuffle.is_some() { Order::Random } else { Order::Contiguous };
        let (pattern, transport, op) = (Pattern::OneToOne, TransportKind::Tcp, Op::Read);
        Case { transport, op, pattern, peers: 1, batch: 1, order, block_bytes, model: None, shape }
    }

    #[test]
    fn streams_move_the_cases_pages_within_bounds() {
        let paged = case(Shape::blocks(1 << 20, 4096, Some(1)).unwrap(), Some(4096));
        let found = plan(&paged, 1 << 20);
        assert_eq!((found.piece_bytes, found.pieces, found.slots), (4096, 256, 512));
        let whole = case(Shape::contiguous(3000), None);
        assert_eq!((plan(&whole, 3000).bytes(), plan(&whole, 1500).bytes()), (3000, 1500));
        let huge = case(Shape::blocks(2 << 30, 1 << 30, Some(1)).unwrap(), Some(1 << 30));
        let found = plan(&huge, FLOOD_BYTES_MAX);
        assert!(
            found.piece_bytes * u64::from(found.slots) <= BUFFER_BYTES_MAX && found.pieces <= found.slots
        );
    }

    #[test]
    fn limits_are_spread_over_the_repetitions() {
        assert!((0..10).all(|index| Yardstick::is_due(index, 10)));
        let due = (0..1000).filter(|index| Yardstick::is_due(*index, 1000)).count();
        assert_eq!(due, 50);
    }
}
