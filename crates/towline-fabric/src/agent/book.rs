//! What a pair has moved, and how fast while it was busy. Pure: time is an argument.
//!
//! Transfers of a pair overlap and share its path, so the rate of one says little. What counts is a *stretch*: from the
//! first byte asked for while nothing was under way until nothing is again, or until it is long enough to judge. A stretch
//! in which a transfer failed tells nothing: it took time, and what it had moved isn't known. The failure speaks for itself.

use std::time::{Duration, Instant};

use towline_wire::contract::JUDGED_BYTES_MIN;
use towline_wire::receipt::{Op, Rail};

/// A stretch that goes on without a pause is judged this often.
const STRETCH: Duration = Duration::from_millis(500);

/// What a pair has moved since it was connected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Transfers that ended well.
    pub transfers: u64,
    /// Transfers that did not.
    pub failed: u64,
    /// Bytes read from the peer by transfers that ended well.
    pub bytes_read: u64,
    /// Bytes written to it.
    pub bytes_written: u64,
    /// Time during which at least one transfer was under way.
    pub busy: Duration,
    /// The bytes of each rail.
    pub rails: Vec<Rail>,
}

/// A pair's book.
#[derive(Debug, Default)]
pub(super) struct Book {
    totals: Totals,
    under_way: usize,
    /// When the running stretch began, and its bytes.
    since: Option<Instant>,
    bytes: u64,
    transfers: u64,
    /// Whether a transfer failed in it.
    spoiled: bool,
    /// How much of the stretch is in `totals.busy`.
    counted: Duration,
}

/// A stretch to judge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stretch {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    /// Transfers that ended in it.
    pub(super) transfers: u64,
}

impl Book {
    pub(super) fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Whether a transfer is under way.
    pub(super) fn is_busy(&self) -> bool {
        self.under_way > 0
    }

    /// A transfer begins.
    pub(super) fn handle_start(&mut self, now: Instant) {
        self.under_way += 1;
        if self.since.is_none() {
            self.begin(Some(now));
        }
    }

    /// A transfer ended, well if there are rails. Gives the stretch when it is to be judged.
    pub(super) fn handle_end(&mut self, now: Instant, op: Op, rails: Option<&[Rail]>) -> Option<Stretch> {
        self.under_way = self.under_way.saturating_sub(1);
        match rails {
            Some(rails) => self.count(op, rails),
            None => {
                self.totals.failed += 1;
                self.spoiled = true;
            }
        }
        let since = self.since?;
        let lasted = now.saturating_duration_since(since);
        self.totals.busy += lasted.saturating_sub(self.counted);
        self.counted = lasted;
        let over = self.under_way == 0;
        if !over && (lasted < STRETCH || self.bytes < JUDGED_BYTES_MIN) {
            return None;
        }
        let stretch = Stretch { bytes: self.bytes, seconds: lasted.as_secs_f64(), transfers: self.transfers };
        let judged = !self.spoiled;
        self.begin((!over).then_some(now));
        judged.then_some(stretch)
    }

    /// A new stretch, or none.
    fn begin(&mut self, since: Option<Instant>) {
        (self.since, self.bytes, self.transfers) = (since, 0, 0);
        (self.spoiled, self.counted) = (false, Duration::ZERO);
    }

    fn count(&mut self, op: Op, rails: &[Rail]) {
        let bytes = rails.iter().map(|rail| rail.bytes).sum::<u64>();
        self.totals.transfers += 1;
        self.transfers += 1;
        match op {
            Op::Read => self.totals.bytes_read += bytes,
            Op::Write => self.totals.bytes_written += bytes,
        }
        self.bytes += bytes;
        for rail in rails {
            match self.totals.rails.iter_mut().find(|total| total.name == rail.name) {
                Some(total) => total.bytes += rail.bytes,
                None => self.totals.rails.push(rail.clone()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(name: &str, bytes: u64) -> Rail {
        Rail { name: name.into(), bytes }
    }

    #[test]
    fn overlapping_transfers_make_one_stretch() {
        let (mut book, start) = (Book::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        book.handle_start(at(0));
        book.handle_start(at(10));
        assert_eq!(book.handle_end(at(20), Op::Read, Some(&[rail("a", 5)])), None);
        let stretch = book.handle_end(at(40), Op::Read, Some(&[rail("a", 7), rail("b", 1)]));
        assert_eq!(stretch, Some(Stretch { bytes: 13, seconds: 0.04, transfers: 2 }));
        book.handle_start(at(1000));
        assert_eq!(book.handle_end(at(1001), Op::Write, None), None);
        let totals = book.totals();
        assert_eq!((totals.transfers, totals.failed, totals.bytes_read), (2, 1, 13));
        assert_eq!((totals.busy, totals.rails.len()), (Duration::from_millis(41), 2));
        assert_eq!(totals.rails[0], rail("a", 12));
    }

    #[test]
    fn a_stretch_with_a_failure_is_not_judged_and_the_next_one_is() {
        let (mut book, start) = (Book::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        book.handle_start(at(0));
        book.handle_start(at(0));
        assert_eq!(book.handle_end(at(5), Op::Read, Some(&[rail("a", JUDGED_BYTES_MIN)])), None);
        assert_eq!(
            book.handle_end(at(9000), Op::Read, None),
            None,
            "it stalled, and its bytes are not known"
        );
        book.handle_start(at(9000));
        let stretch = book.handle_end(at(9001), Op::Read, Some(&[rail("a", 7)]));
        assert_eq!(stretch, Some(Stretch { bytes: 7, seconds: 0.001, transfers: 1 }));
    }

    #[test]
    fn a_stretch_without_a_pause_is_judged_now_and_then() {
        let (mut book, start) = (Book::default(), Instant::now());
        book.handle_start(start);
        book.handle_start(start);
        let later = start + STRETCH;
        let stretch = book.handle_end(later, Op::Read, Some(&[rail("a", JUDGED_BYTES_MIN)]));
        assert_eq!(stretch, Some(Stretch { bytes: JUDGED_BYTES_MIN, seconds: 0.5, transfers: 1 }));
        let stretch = book.handle_end(later + STRETCH, Op::Read, Some(&[rail("a", 3)]));
        assert_eq!(stretch, Some(Stretch { bytes: 3, seconds: 0.5, transfers: 1 }));
        assert_eq!(book.totals().busy, 2 * STRETCH);
    }
}
