//! Who may read under a lease and must release it, by name: a lease ends when the last of them has, and a message that
//! is sent twice is not a second reader.

use std::collections::BTreeSet;

use crate::id::AgentName;

/// Whom the owner lends to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readers {
    /// These agents and no others: the ranks of a decode engine that is known already.
    Named(BTreeSet<AgentName>),
    /// So many, whoever comes first: for an owner that hears only later who will decode. An agent takes its place with
    /// its first heartbeat, or with its release.
    First(u32),
}

impl Readers {
    /// How many there are.
    pub fn count(&self) -> u32 {
        match self {
            Self::Named(names) => u32::try_from(names.len()).unwrap_or(u32::MAX),
            Self::First(count) => *count,
        }
    }
}

/// What came of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Others still read.
    OthersRead,
    /// Nobody is left.
    Last,
}

/// The readers of one lease.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// Not taken yet.
    open: u32,
    reading: BTreeSet<AgentName>,
    left: BTreeSet<AgentName>,
}

impl Places {
    pub(super) fn new(readers: Readers) -> Self {
        let (open, reading) = match readers {
            Readers::Named(names) => (0, names),
            Readers::First(count) => (count, BTreeSet::new()),
        };
        Self { open, reading, left: BTreeSet::new() }
    }

    /// Whether `reader` has a part in the lease and has not released it; it takes an open place if there is one.
    pub(super) fn admits(&mut self, reader: &AgentName) -> bool {
        if self.reading.contains(reader) {
            return true;
        }
        if self.left.contains(reader) || self.open == 0 {
            return false;
        }
        self.open -= 1;
        self.reading.insert(reader.clone())
    }

    /// Takes note that `reader` has released; `None` when it never had a part.
    pub(super) fn leave(&mut self, reader: &AgentName) -> Option<Left> {
        if self.admits(reader) {
            self.reading.remove(reader);
            self.left.insert(reader.clone());
        } else if !self.left.contains(reader) {
            return None;
        }
        Some(if self.reading.is_empty() && self.open == 0 { Left::Last } else { Left::OthersRead })
    }

    /// Those that have a part and have not released it.
    pub(super) fn into_reading(self) -> BTreeSet<AgentName> {
        self.reading
    }
}
