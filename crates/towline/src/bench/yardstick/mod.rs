//! What this machine can do at most, measured between the repetitions of the case that it is the limit of.
//!
//! Each limit moves the same runs in the same order between memories of the same kind as the transfer, the local one
//! being the transfer's own, by as many threads or streams as the transfer uses. For `shm` it is a copy (`copying`), for
//! `tcp` raw streams to the same process (`flooding`); beside a copy stands what the kernel's cross-memory attach does
//! (`crossing`), which is what other engines use between processes of one host.
//!
//! A limit is what *can* be done, so it is the best of all its rounds; the median is told as well, for who wants to
//! compare like with like. It takes turns with the repetitions, so that whatever else the machine does meets both alike; and
//! each of its rounds finds the memories as a repetition does, just filled: a copy of what was copied just before is
//! faster by up to a fifth, since the caches still know where its pages lie.

mod copying;
mod crossing;
mod flooding;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use serde::Serialize;
use towline_wire::receipt::TransportKind;

use super::case::Case;
use super::links::Links;
use super::owner::Threads;
use super::row::{gb_per_s, median};

use copying::Copying;
use crossing::Crossing;
use flooding::Flooding;

/// Longest run that is moved at a time: a slice of the fabric.
const RUN_BYTES_MAX: u64 = 2 << 20;
/// Up to here the fabric copies on the thread that posts, and so do the limits.
const INLINE_BYTES: u64 = 64 << 10;
/// Most limit measurements of a case, spread over its repetitions.
const SAMPLES_MAX: u32 = 50;

/// A limit of a case.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Limit {
    /// 10⁹ bytes a second, the best of all rounds; `None` with the reason in `note`.
    pub(crate) gb_per_s: Option<f64>,
    /// At the median round, of whichever way has the best one.
    pub(crate) gb_per_s_median: Option<f64>,
    /// `memcpy`, `cma` or `tcp-streams`.
    pub(crate) kind: &'static str,
    /// Threads that copied, or streams.
    pub(crate) threads: usize,
    /// How it was measured: the best of `ways`.
    pub(crate) note: String,
    /// All ways that were tried.
    pub(crate) ways: Vec<Way>,
}

/// One of several ways to measure a limit.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Way {
    /// What it did.
    pub(crate) how: String,
    /// 10⁹ bytes a second at its best round.
    pub(crate) gb_per_s: Option<f64>,
    /// At its median round.
    pub(crate) gb_per_s_median: Option<f64>,
}

/// One way to move what the case moves.
trait Gauge {
    /// Moves all of it `rounds` times; the time of each round, or of an average one.
    fn rounds(&mut self, rounds: u32) -> Result<Vec<Duration>>;
}

/// A gauge with what it has measured.
struct Scale {
    gauge: Box<dyn Gauge>,
    threads: usize,
    note: String,
    bytes: u64,
    times: Vec<Duration>,
}

impl Scale {
    fn way(&self) -> Way {
        let rate = |time: Option<Duration>| time.map(|time| gb_per_s(self.bytes, time));
        Way {
            how: self.note.clone(),
            gb_per_s: rate(self.times.iter().min().copied()),
            gb_per_s_median: rate(median(&self.times)),
        }
    }
}

/// Several ways of one kind, of which the best is the limit; or why there is none.
struct Choice {
    kind: &'static str,
    scales: Result<Vec<Scale>, String>,
}

impl Choice {
    fn new(kind: &'static str, scales: Result<Vec<Scale>>) -> Self {
        // A limit that can't be had is a gap of the result, not its end.
        Self { kind, scales: scales.map_err(|error| format!("{error:#}")) }
    }

    /// # Errors
    /// What `refill` gives.
    fn measure(&mut self, rounds: u32, refill: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let Ok(scales) = &mut self.scales else { return Ok(()) };
        for scale in scales {
            refill()?;
            match scale.gauge.rounds(rounds) {
                Ok(times) => scale.times.extend(times),
                Err(error) => {
                    self.scales = Err(format!("{error:#}"));
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn limit(&self) -> Limit {
        let (scales, why) = match &self.scales {
            Ok(scales) => (scales.as_slice(), "nothing was measured"),
            Err(why) => (&[][..], why.as_str()),
        };
        let ways: Vec<Way> = scales.iter().map(Scale::way).collect();
        let rate = |way: &Way| way.gb_per_s.unwrap_or(0.0);
        let best = ways.iter().zip(scales).max_by(|(a, _), (b, _)| rate(a).total_cmp(&rate(b)));
        Limit {
            gb_per_s: best.and_then(|(way, _)| way.gb_per_s),
            gb_per_s_median: ways.iter().filter_map(|way| way.gb_per_s_median).max_by(f64::total_cmp),
            kind: self.kind,
            threads: best.map_or(0, |(_, scale)| scale.threads),
            note: best.map_or_else(|| why.to_owned(), |(way, _)| way.how.clone()),
            ways,
        }
    }
}

/// The limits of one case.
pub(crate) struct Yardstick {
    main: Choice,
    cma: Option<Choice>,
}

impl Yardstick {
    /// Those that fit the case's wire.
    pub(crate) fn new(case: &Case, links: &Links, threads: Threads) -> Self {
        let (main, cma) = match case.transport {
            TransportKind::Shm => {
                let crossing = Choice::new("cma", Crossing::scales(case, links, threads));
                (Choice::new("memcpy", Copying::scales(case, links, threads)), Some(crossing))
            }
            TransportKind::Tcp => (Choice::new("tcp-streams", Flooding::scales(case, links, threads)), None),
            TransportKind::Ucx | TransportKind::Libfabric => {
                let unknown = Err(anyhow!("what the wires of {} can do is not measured", case.transport));
                (Choice::new("none", unknown), None)
            }
        };
        Self { main, cma }
    }

    /// Bytes that it needs beside the transfer's memories: for a check before anything is allocated.
    pub(crate) fn bytes(case: &Case, own_owners: bool) -> u64 {
        if case.transport == TransportKind::Shm && !own_owners { case.memory_bytes() } else { 0 }
    }

    /// Whether the limit is measured after repetition `index` of `count`.
    pub(crate) fn is_due(index: u32, count: u32) -> bool {
        index.is_multiple_of(count.div_ceil(SAMPLES_MAX))
    }

    /// Measures as many rounds as the case's repetition had, back to back as those are. `refill` brings the memories into
    /// the state that a repetition finds them in.
    ///
    /// # Errors
    /// What `refill` gives.
    pub(crate) fn measure(&mut self, burst: u32, refill: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let choices = std::iter::once(&mut self.main).chain(&mut self.cma);
        choices.into_iter().try_for_each(|choice| choice.measure(burst, refill))
    }

    /// Forgets what was measured so far: the first time touches new pages and opens windows.
    pub(crate) fn warmed(&mut self) {
        for choice in std::iter::once(&mut self.main).chain(&mut self.cma) {
            choice.scales.iter_mut().flatten().for_each(|scale| scale.times.clear());
        }
    }

    /// The limit of the case's wire, and what cross-memory attach does where both are on one host.
    pub(crate) fn limits(&self) -> (Limit, Option<Limit>) {
        (self.main.limit(), self.cma.as_ref().map(Choice::limit))
    }
}

/// How many threads copy: those of all initiators, but one for what the fabric copies inline.
fn copy_threads(case: &Case, threads: Threads) -> usize {
    let small = case.reshard.is_none() && case.shape.size_bytes() <= INLINE_BYTES;
    if small { 1 } else { threads.copy * case.initiators() as usize }
}

/// More rounds than this are timed as a whole by a thread that is alone: reading the clock would be a good part of them.
const SINGLE_ROUNDS_MAX: u32 = 8;

/// Runs `rounds` rounds of everything at once, each on a thread of its own; the time of each, from when the first started
/// to when the last ended. All start a round together. One alone runs here, without a thread.
fn together<W>(mut works: Vec<W>, rounds: u32) -> Result<Vec<Duration>>
where
    W: FnMut() -> Result<()> + Send,
{
    if let [work] = works.as_mut_slice() {
        if rounds > SINGLE_ROUNDS_MAX {
            let started = Instant::now();
            (0..rounds).try_for_each(|_| work())?;
            return Ok(vec![started.elapsed() / rounds]);
        }
        let timed = |_| {
            let started = Instant::now();
            work().map(|()| started.elapsed())
        };
        return (0..rounds).map(timed).collect();
    }
    let ready = Barrier::new(works.len());
    let spans = std::thread::scope(|scope| {
        let ready = &ready;
        let threads: Vec<_> =
            works.into_iter().map(|work| scope.spawn(|| spans(work, rounds, ready))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|spans| spans.map_err(|_| anyhow!("a thread of the limit panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    let round = |index: usize| {
        let of_round = || spans.iter().filter_map(|spans| spans.get(index));
        let first = of_round().map(|(started, _)| *started).min();
        let last = of_round().map(|(_, ended)| *ended).max();
        last.zip(first).map_or(Duration::ZERO, |(last, first)| last.duration_since(first))
    };
    Ok((0..rounds as usize).map(round).collect())
}

/// One thread's rounds. After an error it goes on waiting with the others, who would else wait for it for ever.
fn spans(
    mut work: impl FnMut() -> Result<()>,
    rounds: u32,
    ready: &Barrier,
) -> Result<Vec<(Instant, Instant)>> {
    let (mut spans, mut outcome) = (Vec::new(), Ok(()));
    for _ in 0..rounds {
        ready.wait();
        let started = Instant::now();
        if outcome.is_ok() {
            outcome = work();
        }
        spans.push((started, Instant::now()));
    }
    outcome.map(|()| spans)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn limits_are_spread_over_the_repetitions() {
        assert!((0..10).all(|index| Yardstick::is_due(index, 10)));
        let due = (0..1000).filter(|index| Yardstick::is_due(*index, 1000)).count();
        assert_eq!(due, 50);
    }

    #[test]
    fn every_thread_runs_every_round_and_one_that_fails_holds_nobody_up() {
        let runs = AtomicU32::new(0);
        let work = |fails: bool| {
            let (runs, mut round) = (&runs, 0);
            move || {
                runs.fetch_add(1, Ordering::Relaxed);
                round += 1;
                if fails && round == 2 { Err(anyhow!("no more")) } else { Ok(()) }
            }
        };
        assert_eq!(together(vec![work(false), work(false), work(false)], 4).unwrap().len(), 4);
        assert_eq!(runs.swap(0, Ordering::Relaxed), 12);
        assert!(together(vec![work(false), work(true)], 4).is_err());
        assert_eq!(runs.swap(0, Ordering::Relaxed), 6);
        assert_eq!(together(vec![work(false)], 3).unwrap().len(), 3);
        assert_eq!(together(vec![work(false)], 100).unwrap().len(), 1, "an average");
    }

    struct Fixed(u64);

    impl Gauge for Fixed {
        fn rounds(&mut self, rounds: u32) -> Result<Vec<Duration>> {
            let Self(us) = self;
            anyhow::ensure!(*us > 0, "it can't be measured");
            Ok((0..rounds).map(|round| Duration::from_micros(*us + u64::from(round))).collect())
        }
    }

    fn scale(us: u64) -> Scale {
        let note = us.to_string();
        Scale { gauge: Box::new(Fixed(us)), threads: 1, note, bytes: 1_000_000, times: Vec::new() }
    }

    #[test]
    fn the_limit_is_the_best_round_of_the_best_way() {
        let mut choice = Choice::new("memcpy", Ok(vec![scale(200), scale(100), scale(150)]));
        choice.measure(3, &mut || Ok(())).unwrap();
        let limit = choice.limit();
        assert_eq!((limit.note.as_str(), limit.threads, limit.ways.len()), ("100", 1, 3));
        assert!((limit.gb_per_s.unwrap() - 10.0).abs() < 1e-9);
        assert!((limit.gb_per_s_median.unwrap() - 1000.0 / 101.0).abs() < 1e-9);
    }

    #[test]
    fn what_cannot_be_measured_is_a_gap_with_its_reason() {
        let mut choice = Choice::new("memcpy", Ok(vec![scale(100), scale(0)]));
        choice.measure(1, &mut || Ok(())).unwrap();
        let limit = choice.limit();
        assert_eq!((limit.gb_per_s, limit.note.as_str()), (None, "it can't be measured"));
        let limit = Choice::new("cma", Err(anyhow!("no child"))).limit();
        assert_eq!((limit.gb_per_s, limit.kind, limit.note.as_str()), (None, "cma", "no child"));
    }
}
