//! The reader's side of a handoff, as a state machine: no sockets, no clock.
//!
//! A reader pulls from one or more *sources*, the ranks of the engine that has the KV, each with a lease, a generation
//! and a fence slot of its own. What a source has comes in ordered *parts*, which may still be in the making:
//!
//! ```text
//!  each source:  Connecting → Waiting ─the slot counts more parts→ Reading ─all bytes in place→ Fencing
//!                                ↑                                                               │ same generation
//!                                └────────────── parts left ─────────────────────────────────────┴─ none left → Done
//!  all of them:  every source done → Checking ─digests equal→ success
//!                any failure, a changed generation, the deadline, a cancel → failure
//!                either way: a release to every source that was reached
//! ```
//!
//! The shell asks [`Handoff::poll_action`] what to do, does it, and reports with [`Handoff::handle_event`]; sources
//! don't wait for each other, so several actions may be under way. Time goes in as an argument, and
//! [`Handoff::next_timer`] says when to come back. [`Handoff::poll_part`] tells which parts are complete. These rules
//! live here and nowhere else:
//! - a part is read only after its source's slot showed, or its ticket said, that it is ready;
//! - the fence is read only after **every** byte of what was asked for has arrived, and before it counts;
//! - all is good only if every fence held its ticket's generation **and** every digest is equal;
//! - whatever happens after connecting, the lease is released, so that prefill's blocks go back early.
//!
//! The fence that shows one part to be good also counts the parts that are ready next: while the owner is ahead, a part
//! costs one read of the slot. When it is behind, the slot is read again after [`RETRY_MIN`], then twice that, and so
//! on up to [`RETRY_MAX`].

mod error;
mod source;

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

pub use error::HandoffError;
pub use source::Source;

use crate::digest::DigestMismatch;
use crate::lease::Now;
use source::{Lane, Next};

/// How often a torn fence slot is read again: the owner's stores take nanoseconds, so a slot that is torn this often
/// was never written by an owner.
pub const FENCE_READS_MAX: u32 = 8;
/// First wait before a slot that showed nothing new is read again: a few reads of a slot over loopback.
pub const RETRY_MIN: Duration = Duration::from_micros(100);
/// Longest such wait, and so what a part that becomes ready may wait for its reader: little beside the last layer's
/// transfer and what decode computes next, and no more than 200 reads of 64 bytes a second.
pub const RETRY_MAX: Duration = Duration::from_millis(5);

/// What the shell must do next. `source` counts the sources as they were given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reach the owner and check that it is the ticket's; answer [`Event::Connected`] or [`Event::Failed`].
    Connect {
        /// Whom.
        source: usize,
    },
    /// Read what the source has of these parts; answer [`Event::DataArrived`] once all is in place, or
    /// [`Event::Failed`].
    ReadParts {
        /// From whom.
        source: usize,
        /// Which, of the handoff's numbering.
        parts: Range<u32>,
    },
    /// Read the fence slot; answer [`Event::FenceRead`] or [`Event::Failed`].
    ReadFence {
        /// Whose.
        source: usize,
    },
    /// Digest what arrived; answer [`Event::Digested`].
    Digest,
    /// Tell the owner that the lease is no longer needed. No answer is awaited: expiry does it otherwise.
    Release {
        /// Whose lease.
        source: usize,
    },
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The owner is reached, authenticated, and compatible.
    Connected {
        /// Which.
        source: usize,
    },
    /// All that was asked for is in place, on every rail.
    DataArrived {
        /// From whom.
        source: usize,
    },
    /// A fence slot was read.
    FenceRead {
        /// Whose.
        source: usize,
        /// Its first 24 bytes.
        slot: [u8; 24],
    },
    /// Whether what arrived is what the owner computed, as far as the ticket's digests cover it.
    Digested(Result<(), DigestMismatch>),
    /// A step failed.
    Failed(HandoffError),
    /// Time passed; needed at [`Handoff::next_timer`] at the latest.
    Tick,
    /// The caller no longer wants it.
    Cancelled,
}

/// One handoff from the reader's side.
#[derive(Debug)]
pub struct Handoff {
    lanes: Vec<Lane>,
    parts: u32,
    told: u32,
    deadline: Now,
    actions: VecDeque<Action>,
    checking: bool,
    outcome: Option<Result<(), HandoffError>>,
}

impl Handoff {
    /// Begins: all of the `parts` must come from `sources`, at least one, and be checked by `deadline`.
    pub fn new(sources: Vec<Source>, parts: u32, deadline: Now) -> Self {
        let actions = (0..sources.len()).map(|source| Action::Connect { source }).collect();
        let lanes = sources.into_iter().map(Lane::new).collect();
        Self { lanes, parts, told: 0, deadline, actions, checking: false, outcome: None }
    }

    /// When all must be done.
    pub fn deadline(&self) -> Now {
        self.deadline
    }

    /// When [`Event::Tick`] is due; `None` when it is over.
    pub fn next_timer(&self) -> Option<Now> {
        let retries = self.lanes.iter().filter_map(Lane::retry_at);
        self.outcome.is_none().then(|| retries.fold(self.deadline, Now::min))
    }

    /// What to do now; `None` while answers are awaited or when it is over.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The next part, in order, that arrived from all sources under a fence that held. Its digest, where there is one,
    /// is compared at the end only.
    pub fn poll_part(&mut self) -> Option<u32> {
        let missing = self.lanes.iter().filter_map(Lane::missing).min();
        let complete = missing.unwrap_or(self.parts).min(self.parts);
        (self.told < complete).then(|| {
            self.told += 1;
            self.told - 1
        })
    }

    /// How it ended, once it has.
    pub fn outcome(&self) -> Option<&Result<(), HandoffError>> {
        self.outcome.as_ref()
    }

    /// Takes what happened. Late and unexpected events change nothing.
    pub fn handle_event(&mut self, now: Now, event: Event) {
        if self.outcome.is_some() {
            return;
        }
        if now >= self.deadline {
            return self.end(Err(HandoffError::Stalled { after: self.deadline }));
        }
        match event {
            Event::Failed(error) => self.end(Err(error)),
            Event::Cancelled => self.end(Err(HandoffError::Cancelled)),
            Event::Tick => {
                (0..self.lanes.len()).for_each(|source| self.step(source, |lane| lane.handle_time(now)))
            }
            Event::Connected { source } => self.step(source, Lane::handle_connected),
            Event::DataArrived { source } => self.step(source, Lane::handle_data),
            Event::FenceRead { source, slot } => self.step(source, |lane| lane.handle_fence(now, &slot)),
            Event::Digested(found) if self.checking => self.end(found.map_err(HandoffError::DigestMismatch)),
            Event::Digested(_) => {}
        }
    }

    /// Lets one source go on; when it was the last to be done, digests are due.
    fn step(&mut self, source: usize, go_on: impl FnOnce(&mut Lane) -> Next) {
        let Some(lane) = self.lanes.get_mut(source) else { return };
        match go_on(lane) {
            Next::Nothing => {}
            Next::ReadFence => self.actions.push_back(Action::ReadFence { source }),
            Next::ReadParts(parts) => self.actions.push_back(Action::ReadParts { source, parts }),
            Next::Fail(error) => self.end(Err(error)),
            Next::Done => {
                if self.lanes.iter().all(Lane::is_done) {
                    self.checking = true;
                    self.actions.push_back(Action::Digest);
                }
            }
        }
    }

    fn end(&mut self, outcome: Result<(), HandoffError>) {
        self.outcome = Some(outcome);
        let reached = (0..).zip(&self.lanes).filter(|(_, lane)| lane.was_reached());
        self.actions = reached.map(|(source, _)| Action::Release { source }).collect();
    }
}

#[cfg(test)]
mod tests;
