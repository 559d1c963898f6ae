//! How many bytes a port moved, by the kernel's own count: evidence that does not rest on the word of a library.
//!
//! A sample before and one after, and the difference is what the port carried meanwhile, for everybody. So it proves a
//! transfer only on a port that is otherwise quiet, and with more bytes than the noise. Drivers let the kernel keep
//! values of `hw_counters` for a while (10 ms, or what `hw_counters/lifespan` says): a sample sooner after the transfer
//! may miss its end. Counts include headers, and of retransmitted data each copy.

mod table;

use serde::{Deserialize, Serialize};

pub use self::table::{Counter, DRIVERS, Direction, DriverCounters, Limit, NETDEV, Scope, of_driver};
use crate::gap::{Gap, Gaps, Reason};
use crate::label::Label;
use crate::rdma::RdmaPort;
use crate::reader::Reader;
use crate::system::System;

/// What the counters of a port or an interface read at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterSample {
    /// Of which: `mlx5_0/1`, or an interface's name.
    pub subject: String,
    /// What was read.
    pub readings: Vec<Reading>,
    /// What could not be.
    pub gaps: Gaps,
}

/// What one counter read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// The file.
    pub file: String,
    /// Which way the bytes it counts went.
    pub direction: Direction,
    /// Which traffic it counts.
    pub scope: Scope,
    /// The number in the file.
    pub count: u64,
    /// How many bytes one count stands for.
    pub unit_bytes: u32,
    /// What the counter does at its end.
    pub limit: Limit,
}

impl CounterSample {
    /// Reads the byte counters of an RDMA port: those that [`DRIVERS`] lists for its driver.
    pub fn of_port(system: &dyn System, port: &RdmaPort) -> Self {
        let subject = port.name();
        let driver = port.device.driver.as_ref().map(Label::as_str);
        let why_none = match driver.map(of_driver) {
            Some(Some(known)) if !known.counters.is_empty() => {
                return Self::read(system, subject, &port.folder(), known.counters);
            }
            Some(Some(known)) => format!("driver {} counts no bytes", known.driver),
            Some(None) => format!("no byte counter is known of driver {}", driver.unwrap_or_default()),
            None => "its driver is not known, so neither are its counters".to_owned(),
        };
        Self::without(subject, Reason::NotOffered { detail: why_none })
    }

    /// Reads the byte counters of a network interface, for what TCP moved.
    pub fn of_netdev(system: &dyn System, name: &str) -> Self {
        let Some(name) = Label::part(name) else {
            let reason = Gap::unparsable(name, "the name of an interface", name).reason;
            return Self::without("an interface".to_owned(), reason);
        };
        let folder = format!("/sys/class/net/{name}");
        Self::read(system, name.into(), &folder, NETDEV)
    }

    fn read(system: &dyn System, subject: String, folder: &str, counters: &[Counter]) -> Self {
        let mut reader = Reader::new(system);
        let mut readings = Vec::new();
        for counter in counters {
            let file = format!("{folder}/{}", counter.file);
            let Some(count) = reader.field(&file, "a count", count) else { continue };
            let Counter { direction, scope, unit_bytes, limit, .. } = *counter;
            readings.push(Reading { file, direction, scope, count, unit_bytes, limit });
        }
        Self { subject, readings, gaps: reader.gaps }
    }

    fn without(subject: String, reason: Reason) -> Self {
        let mut gaps = Gaps::default();
        gaps.push(Gap::new(subject.clone(), reason));
        Self { subject, readings: Vec::new(), gaps }
    }
}

/// A decimal number, without the sign that `parse` would take.
fn count(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// What a counter grew by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The file.
    pub file: String,
    /// Which way the bytes went.
    pub direction: Direction,
    /// Which traffic.
    pub scope: Scope,
    /// How much.
    pub moved: Moved,
}

/// A number of bytes, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moved {
    /// So many bytes; exact to the counter's unit.
    Bytes(u64),
    /// Not known.
    Unknown(Doubt),
}

/// Why two samples don't tell what moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Doubt {
    /// There is no counter for it in both samples.
    NotSampled,
    /// The later value is the smaller one: the counter was reset, its driver reloaded, or it ran over.
    Backwards,
    /// It stopped at its end.
    Saturated,
}

/// What moved between two samples of one port or interface, counter by counter.
pub fn delta(before: &CounterSample, after: &CounterSample) -> Vec<Change> {
    before.readings.iter().map(|reading| reading.until(after)).collect()
}

impl Reading {
    fn until(&self, later: &CounterSample) -> Change {
        let moved = match later.readings.iter().find(|after| after.file == self.file) {
            Some(after) => self.moved(after),
            None => Moved::Unknown(Doubt::NotSampled),
        };
        Change { file: self.file.clone(), direction: self.direction, scope: self.scope, moved }
    }

    fn moved(&self, after: &Self) -> Moved {
        let ends = [u64::MAX, u64::from(u32::MAX)];
        if self.limit == Limit::Stops && (ends.contains(&self.count) || ends.contains(&after.count)) {
            return Moved::Unknown(Doubt::Saturated);
        }
        let grown = after.count.checked_sub(self.count);
        let bytes = grown.map(|count| count.saturating_mul(u64::from(self.unit_bytes)));
        bytes.map_or(Moved::Unknown(Doubt::Backwards), Moved::Bytes)
    }
}

/// What all traffic came to one way: the change of the counter whose scope is everything.
pub fn total(changes: &[Change], direction: Direction) -> Moved {
    let all = |change: &&Change| change.scope == Scope::All && change.direction == direction;
    changes.iter().find(all).map_or(Moved::Unknown(Doubt::NotSampled), |change| change.moved)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample(count: u64, unit_bytes: u32, limit: Limit) -> CounterSample {
        let reading = Reading {
            file: "counters/port_xmit_data".to_owned(),
            direction: Direction::Sent,
            scope: Scope::All,
            count,
            unit_bytes,
            limit,
        };
        CounterSample { subject: "mlx5_0/1".to_owned(), readings: vec![reading], gaps: Gaps::default() }
    }

    fn words_between(before: u64, after: u64) -> Moved {
        let changes = delta(&sample(before, 4, Limit::Stops), &sample(after, 4, Limit::Stops));
        total(&changes, Direction::Sent)
    }

    #[test]
    fn words_are_four_bytes() {
        assert_eq!(words_between(1_000, 1_000 + (1 << 18)), Moved::Bytes(1 << 20));
        assert_eq!(words_between(7, 7), Moved::Bytes(0));
    }

    #[test]
    fn a_counter_that_went_backwards_tells_nothing() {
        assert_eq!(words_between(1_000, 999), Moved::Unknown(Doubt::Backwards));
        assert_eq!(words_between(u64::MAX - 1, 3), Moved::Unknown(Doubt::Backwards), "nor one that ran over");
    }

    #[test]
    fn a_counter_that_stopped_at_its_end_tells_nothing() {
        let end = u64::from(u32::MAX);
        for (before, after) in [(5, end), (end, end), (end, end + 9), (5, u64::MAX)] {
            assert_eq!(words_between(before, after), Moved::Unknown(Doubt::Saturated), "{before} {after}");
        }
        let bytes = |count| sample(count, 1, Limit::BeyondReach);
        let changes = delta(&bytes(end), &bytes(end + 10));
        assert_eq!(total(&changes, Direction::Sent), Moved::Bytes(10), "an interface passes there by chance");
    }

    #[test]
    fn what_was_not_sampled_twice_is_not_known() {
        let mut after = sample(9, 4, Limit::Stops);
        after.readings.clear();
        let changes = delta(&sample(5, 4, Limit::Stops), &after);
        assert_eq!(total(&changes, Direction::Sent), Moved::Unknown(Doubt::NotSampled));
        assert_eq!(total(&changes, Direction::Received), Moved::Unknown(Doubt::NotSampled));
    }

    #[test]
    fn the_total_is_never_the_count_of_one_kind() {
        let mut before = sample(5, 1, Limit::BeyondReach);
        before.readings[0].scope = Scope::RdmaWrite;
        assert_eq!(total(&delta(&before, &before), Direction::Sent), Moved::Unknown(Doubt::NotSampled));
    }

    #[test]
    fn a_count_is_digits() {
        assert_eq!(count("18446744073709551615"), Some(u64::MAX));
        for text in ["", "-1", "+1", "0x1", "1.5", "N/A (no PMA)", "18446744073709551616"] {
            assert_eq!(count(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_two_counts_are_too_far_apart(before: u64, after: u64) {
            match words_between(before, after) {
                Moved::Bytes(bytes) => prop_assert!(before <= after && bytes / 4 <= after - before),
                Moved::Unknown(doubt) => prop_assert!(after < before || doubt == Doubt::Saturated),
            }
        }
    }
}
