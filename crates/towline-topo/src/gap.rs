//! What is not known, and why: a value beside the data, never a default inside it.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::label::excerpt;

/// Something about the machine that could not be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[error("{subject}: {reason}")]
pub struct Gap {
    /// What is not known: mostly the file that would have told.
    pub subject: String,
    /// Why not.
    pub reason: Reason,
}

/// Why something is not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// There is no such file: another kernel, another driver, a container that hides it, or no such device.
    #[error("is not there")]
    Absent,
    /// This process may not read it; one with more rights can.
    #[error("may not be read by this process")]
    Denied,
    /// A link leads out of the recorded tree; record the tree again with its links relative.
    #[error("leads out of the recorded tree")]
    Outside,
    /// It is a folder, a pipe, a device: something whose reading may have no end.
    #[error("is not a regular file")]
    NotAFile,
    /// It is not UTF-8.
    #[error("is not text")]
    NotText,
    /// It is longer than anything this crate reads ever is.
    #[error("is larger than {bytes_max} bytes")]
    TooLarge {
        /// The bound, in bytes.
        bytes_max: u64,
    },
    /// It holds more entries than this crate takes.
    #[error("has more than {entries_max} entries")]
    TooMany {
        /// The bound.
        entries_max: u64,
    },
    /// The file is there, and the kernel or the driver put nothing in it.
    #[error("is there without a value")]
    Unset,
    /// It reads otherwise than expected: a newer kernel, another driver, or damage.
    #[error("reads {found:?} where {expected} was expected")]
    Unparsable {
        /// What was expected, in words.
        expected: String,
        /// How it began; withheld where the file identifies the machine.
        found: String,
    },
    /// The driver does not offer this, or it is not known how it does.
    #[error("{detail}")]
    NotOffered {
        /// Which, and of which driver.
        detail: String,
    },
    /// The kernel refused.
    #[error("could not be read: {error}")]
    Failed {
        /// The kernel's words.
        error: String,
    },
}

impl Gap {
    /// A gap about `subject`.
    pub fn new(subject: impl Into<String>, reason: Reason) -> Self {
        Self { subject: subject.into(), reason }
    }

    /// A gap for text that is not what was `expected`; an excerpt of `found` is kept.
    pub(crate) fn unparsable(subject: &str, expected: &str, found: &str) -> Self {
        let reason = Reason::Unparsable { expected: expected.to_owned(), found: excerpt(found) };
        Self::new(subject, reason)
    }
}

/// Most gaps kept of one reading: a machine with more has one trouble, many times over.
pub const GAPS_MAX: usize = 256;

/// The gaps of one reading, in the order in which they were met.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gaps {
    /// The first [`GAPS_MAX`].
    pub list: Vec<Gap>,
    /// How many more there were.
    pub left_out: u64,
}

impl Gaps {
    /// Notes a gap.
    pub fn push(&mut self, gap: Gap) {
        if self.list.len() < GAPS_MAX { self.list.push(gap) } else { self.left_out += 1 }
    }

    /// The value, or nothing and its gap noted.
    pub fn keep<T>(&mut self, result: Result<T, Gap>) -> Option<T> {
        result.map_err(|gap| self.push(gap)).ok()
    }

    /// Whether everything asked for was told.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_beyond_the_bound_are_counted() {
        let mut gaps = Gaps::default();
        for index in 0..GAPS_MAX + 3 {
            gaps.push(Gap::new(format!("file {index}"), Reason::Absent));
        }
        assert_eq!((gaps.list.len(), gaps.left_out), (GAPS_MAX, 3));
    }

    #[test]
    fn a_gap_is_a_sentence() {
        let gap = Gap::unparsable("/sys/x", "a number", "ab\u{1b}c");
        assert_eq!(gap.to_string(), "/sys/x: reads \"ab.c\" where a number was expected");
        assert_eq!(Gap::new("/sys/x", Reason::Unset).to_string(), "/sys/x: is there without a value");
    }

    #[test]
    fn what_was_found_is_cut_short() {
        let gap = Gap::unparsable("/sys/x", "a number", &"9".repeat(10_000));
        assert!(serde_json::to_string(&gap).unwrap().len() < 256);
    }
}
