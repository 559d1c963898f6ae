//! One result: the figures of a case, its limit, and the evidence.

use std::time::Duration;

use serde::Serialize;
use towline_wire::receipt::Receipt;

use super::SCHEMA;
use super::case::Case;
use super::flags::{Order, Pattern};
use super::owner::Threads;
use super::yardstick::Limit;
use crate::value::ByteSize;

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
}

impl Spread {
    /// Of times in seconds; all 0 of none.
    pub(crate) fn of(seconds: impl Iterator<Item = f64>) -> Self {
        let mut us: Vec<f64> = seconds.map(|seconds| seconds * 1e6).collect();
        us.sort_by(f64::total_cmp);
        let [p50, p90, p99] = [50, 90, 99].map(|percent| percentile(&us, percent).unwrap_or(0.0));
        Self { p50, p90, p99 }
    }
}

/// The smallest value that at least `percent` of the sorted ones don't exceed (nearest rank).
fn percentile<T: Copy>(sorted: &[T], percent: usize) -> Option<T> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// The median of times.
pub(crate) fn median(times: &[Duration]) -> Option<Duration> {
    let mut sorted = times.to_vec();
    sorted.sort();
    percentile(&sorted, 50)
}

/// 10⁹ bytes a second; 0 for no time.
#[expect(clippy::cast_precision_loss, reason = "a rate; 2^53 bytes are exact")]
pub(crate) fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}

/// What was measured of one case.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// A value a repetition: the time of one round of all its transfers.
    pub(crate) elapsed: Vec<Duration>,
    /// Rounds of a repetition.
    pub(crate) burst: u32,
    /// Over all repetitions, all processes.
    pub(crate) cpu: Option<Duration>,
    /// Of every transfer.
    pub(crate) receipts: Vec<Receipt>,
    /// Pieces of a transfer, before and after merging.
    pub(crate) descriptors: (u64, u64),
    /// Whether every byte was checked.
    pub(crate) verified: &'static str,
}

/// One line of the result; in JSON the fields below.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) schema: u32,
    pub(crate) kind: &'static str,
    pub(crate) transport: &'static str,
    pub(crate) op: &'static str,
    pub(crate) pattern: Pattern,
    pub(crate) peers: u32,
    pub(crate) batch: u32,
    pub(crate) order: Order,
    /// Bytes of one transfer; of all of a re-sharding's.
    pub(crate) size_bytes: u64,
    /// Bytes of a block; null for one contiguous piece.
    pub(crate) block_bytes: Option<u64>,
    pub(crate) model: Option<&'static str>,
    /// Tokens of the model's prompt.
    pub(crate) isl: Option<u32>,
    /// From which ranks to which it moved, as `tp4:tp1`.
    pub(crate) reshard: Option<String>,
    pub(crate) repeat: usize,
    /// Rounds of a repetition, back to back within the timer: more than one for small transfers.
    pub(crate) burst: u32,
    pub(crate) copy_threads: usize,
    pub(crate) tcp_streams: usize,
    /// At the median repetition, all its transfers together.
    pub(crate) gb_per_s: f64,
    /// At the fastest.
    pub(crate) gb_per_s_best: f64,
    /// What the machine can do at most; null with the reason in `limit.note`.
    pub(crate) limit_gb_per_s: Option<f64>,
    /// `gb_per_s / limit_gb_per_s`: the median repetition over the best that was seen of the machine.
    pub(crate) share_of_limit: Option<f64>,
    pub(crate) limit: Limit,
    /// What cross-memory attach does with the same runs, beside shared memory; null with the reason in `cma.note`.
    pub(crate) cma_gb_per_s: Option<f64>,
    pub(crate) cma: Option<Limit>,
    /// Processor seconds of all processes for 10⁹ bytes; null where the kernel doesn't tell.
    pub(crate) cpu_s_per_gb: Option<f64>,
    /// Total time of a transfer.
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    /// Lists checked and merged.
    pub(crate) prepare_us: Spread,
    /// Until the call returned, preparing included.
    pub(crate) post_us: Spread,
    /// From posting to the last byte in place.
    pub(crate) wire_us: Spread,
    pub(crate) total_us: Spread,
    /// Pieces of a transfer as asked for; of all of a re-sharding's.
    pub(crate) descriptors: u64,
    /// Left when those that touch on both sides are one.
    pub(crate) descriptors_merged: u64,
    pub(crate) rails: usize,
    /// Whether every byte was checked: `full` or `off`.
    pub(crate) verified: &'static str,
    /// Of the last transfer.
    pub(crate) receipt: Option<Receipt>,
}

impl Row {
    /// From what was measured.
    pub(crate) fn new(
        case: &Case,
        measured: Measured,
        (limit, cma): (Limit, Option<Limit>),
        threads: Threads,
    ) -> Self {
        let Measured { elapsed, burst, cpu, mut receipts, descriptors, verified } = measured;
        let bytes = case.bytes();
        let rate = |time: Option<Duration>| time.map_or(0.0, |time| gb_per_s(bytes, time));
        let rate_at_median = rate(median(&elapsed));
        let moved = bytes * elapsed.len() as u64 * u64::from(burst);
        #[expect(clippy::cast_precision_loss, reason = "a rate; 2^53 bytes are exact")]
        let cpu_s_per_gb = cpu.map(|cpu| cpu.as_secs_f64() / (moved as f64 / 1e9));
        let total_us = Spread::of(receipts.iter().map(|receipt| receipt.seconds));
        let timings = || receipts.iter().map(|receipt| receipt.timings);
        let [prepare_us, post_us, wire_us] = [
            Spread::of(timings().map(|timings| timings.prepare_s)),
            Spread::of(timings().map(|timings| timings.post_s)),
            Spread::of(timings().map(|timings| timings.wire_s)),
        ];
        let receipt = receipts.pop();
        Self {
            schema: SCHEMA,
            kind: "row",
            transport: case.transport.as_str(),
            op: if case.op == towline_wire::receipt::Op::Read { "read" } else { "write" },
            pattern: case.pattern,
            peers: case.peers,
            batch: case.batch,
            order: case.order,
            size_bytes: if case.reshard.is_some() { bytes } else { case.shape.size_bytes() },
            block_bytes: case.block_bytes,
            model: case.model.map(|(model, _)| model.name),
            isl: case.model.map(|(_, isl)| isl),
            reshard: case.reshard.map(|reshard| reshard.to_string()),
            repeat: elapsed.len(),
            burst,
            copy_threads: threads.copy,
            tcp_streams: threads.streams,
            gb_per_s: rate_at_median,
            gb_per_s_best: rate(elapsed.iter().min().copied()),
            limit_gb_per_s: limit.gb_per_s,
            share_of_limit: limit.gb_per_s.filter(|limit| *limit > 0.0).map(|limit| rate_at_median / limit),
            limit,
            cma_gb_per_s: cma.as_ref().and_then(|cma| cma.gb_per_s),
            cma,
            cpu_s_per_gb,
            p50_us: total_us.p50,
            p90_us: total_us.p90,
            p99_us: total_us.p99,
            prepare_us,
            post_us,
            wire_us,
            total_us,
            descriptors: descriptors.0,
            descriptors_merged: descriptors.1,
            rails: receipt.as_ref().map_or(0, |receipt| receipt.rails.len()),
            verified,
            receipt,
        }
    }

    /// What it is, in words: `shm read 256MiB in 4KiB random`.
    pub(crate) fn title(&self) -> String {
        let mut title = format!("{} {} {}", self.transport, self.op, ByteSize(self.size_bytes));
        match (self.model.zip(self.isl), self.block_bytes) {
            (Some((model, isl)), _) => title.push_str(&format!(", {model} at {isl}")),
            (None, Some(block)) => {
                let order = if self.order == Order::Random { "random" } else { "in order" };
                title.push_str(&format!(" in {} {order}", ByteSize(block)));
            }
            (None, None) => {}
        }
        if self.batch > 1 {
            title.push_str(&format!(" x{}", self.batch));
        }
        if let Some(reshard) = &self.reshard {
            title.push_str(&format!(" {reshard}"));
        } else if self.pattern != Pattern::OneToOne {
            title.push_str(&format!(" {} {}", self.pattern.as_str(), self.peers));
        }
        title
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use towline_wire::receipt::{Op, TransportKind};

    use super::*;
    use crate::bench::shape::Shape;

    /// A row with these rates.
    pub(crate) fn sample(gb_per_s: f64, limit: Option<f64>) -> Row {
        let case = Case {
            transport: TransportKind::Shm,
            op: Op::Read,
            pattern: Pattern::OneToOne,
            peers: 1,
            batch: 1,
            order: Order::Random,
            block_bytes: Some(4096),
            model: None,
            reshard: None,
            shape: Shape::blocks(1 << 20, 4096, Some(1)).unwrap(),
        };
        let limit = Limit {
            gb_per_s: limit,
            gb_per_s_median: limit,
            kind: "memcpy",
            threads: 2,
            note: "test".into(),
            ways: Vec::new(),
        };
        let elapsed = vec![Duration::from_secs_f64((1 << 20) as f64 / gb_per_s / 1e9); 3];
        let cpu = Some(Duration::from_millis(3));
        Row::new(
            &case,
            Measured { elapsed, cpu, burst: 1, verified: "full", ..Measured::default() },
            (limit, None),
            Threads { copy: 2, streams: 2 },
        )
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let hundred = Spread::of((1..=100).rev().map(|us| f64::from(us) / 1e6));
        for (found, expected) in [(hundred.p50, 50.0), (hundred.p90, 90.0), (hundred.p99, 99.0)] {
            assert!((found - expected).abs() < 1e-6, "{found}");
        }
        let one = Spread::of(std::iter::once(7e-6));
        assert!((one.p50 - 7.0).abs() < 1e-6 && (one.p99 - 7.0).abs() < 1e-6);
        assert_eq!(Spread::of(std::iter::empty()), Spread { p50: 0.0, p90: 0.0, p99: 0.0 });
    }

    #[test]
    fn rates_and_shares_are_of_the_median() {
        let row = sample(4.0, Some(8.0));
        assert!((row.gb_per_s - 4.0).abs() < 1e-3 && (row.share_of_limit.unwrap() - 0.5).abs() < 1e-3);
        let cpu = row.cpu_s_per_gb.unwrap();
        assert!((cpu - 0.003 / (3.0 * f64::from(1 << 20) / 1e9)).abs() < 1e-6, "{cpu}");
        assert_eq!(sample(4.0, None).share_of_limit, None);
        assert_eq!(row.title(), "shm read 1MiB in 4KiB random");
    }
}
