//! What must hold, after every step and at the end; and what happened, so that nobody takes a dull run for a proof.

use std::collections::BTreeMap;

use towline_wire::digest::DigestMode;
use towline_wire::fence::{Fence, FenceError};
use towline_wire::handoff::HandoffError;

use super::world::{SWEEP_LATE_US, World, moment};

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Violation {
    /// A reader was told that a part is complete, or ended with success, and does not hold its request's bytes.
    WrongBytes(String),
    /// A reader ended with success after a changed generation, or with a fence older than its data.
    Unfenced(String),
    /// A reader was told that its lease is over while its owner held it.
    SpuriousExpiry(String),
    /// A handoff outlived its deadline, or never ended.
    Overdue(String),
    /// A connected reader ended and did not ask for release.
    Unreleased(String),
    /// The owner's blocks, leases or slots do not add up.
    Pool(String),
}

/// How often each thing happened.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally(pub(super) BTreeMap<String, u64>);

impl Tally {
    pub(super) fn count(&mut self, what: &str) {
        *self.0.entry(what.to_owned()).or_default() += 1;
    }

    pub(super) fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }
}

impl World<'_> {
    pub(super) fn check_step(&self) -> Result<(), Violation> {
        for (index, reader) in self.readers.iter().enumerate().filter(|(_, reader)| !reader.crashed) {
            let Some(handoff) = &reader.handoff else { continue };
            let due = handoff.deadline().max(moment(reader.paused_until));
            if handoff.outcome().is_none() && moment(self.now) > due {
                return Err(Violation::Overdue(format!("reader {index} was due at {due:?}")));
            }
        }
        let owner = &self.owners[self.current()];
        let Some(expiry) = owner.table.next_expiry().filter(|_| owner.alive && !owner.locked) else {
            return Ok(());
        };
        let free = owner.paused_until.max(owner.unlocked_us);
        let due = expiry.max(moment(free)) + moment(SWEEP_LATE_US);
        if moment(self.now) > due {
            return Err(Violation::Pool(format!("a lease that ended at {expiry:?} is still held")));
        }
        Ok(())
    }

    /// Judges a part at the moment at which its reader is told of it.
    pub(super) fn check_part(&mut self, index: usize, part: u32) -> Result<(), Violation> {
        let reader = &mut self.readers[index];
        reader.parts_told = part + 1;
        // A flipped bit shows at the end, where digests are compared.
        if !reader.has(part) && !self.scenario.corrupts {
            return Err(Violation::WrongBytes(format!("reader {index} took them for part {part}")));
        }
        let parts = reader.ticket.as_ref().map_or(0, |ticket| ticket.parts);
        let counted = reader.fence.and_then(|fence| Fence::decode(&fence.bytes).ok());
        if counted.is_some_and(|fence| fence.parts_ready < u64::from(parts)) {
            self.tally.count("a part arrived before the next was computed");
        }
        Ok(())
    }

    /// Judges a handoff at the moment at which it ended, once.
    pub(super) fn check_outcome(&mut self, index: usize) -> Result<(), Violation> {
        let reader = &self.readers[index];
        let Some(outcome) = reader.outcome().filter(|_| !reader.recorded).cloned() else { return Ok(()) };
        let right = reader.is_right();
        if reader.connected && !reader.release_asked {
            return Err(Violation::Unreleased(format!("reader {index} ended with {outcome:?}")));
        }
        match &outcome {
            Ok(()) if !right => {
                return Err(Violation::WrongBytes(format!(
                    "reader {index} took them for request {}",
                    reader.request
                )));
            }
            Ok(()) if !reader.is_fenced() => {
                return Err(Violation::Unfenced(format!("reader {index} saw {:?}", reader.fence)));
            }
            Err(HandoffError::Expired { .. }) if reader.fence.is_some_and(|fence| fence.lease_held) => {
                return Err(Violation::SpuriousExpiry(format!("reader {index}: {outcome:?}")));
            }
            Err(HandoffError::Expired { .. }) if !right => {
                self.tally.count("expired, with torn or alien data")
            }
            Err(HandoffError::Expired { detail: FenceError::Torn }) => {
                self.tally.count("expired, slot torn to the end")
            }
            _ => {}
        }
        if matches!(outcome, Err(HandoffError::Expired { .. }))
            && !right
            && self.scenario.digests == DigestMode::Off
        {
            self.tally.count("saved by the fence alone");
        }
        let reader = &mut self.readers[index];
        let parts = reader.ticket.as_ref().map_or(0, |ticket| ticket.parts);
        match &outcome {
            Ok(()) if parts > 1 => self.tally.count("success in parts"),
            Err(HandoffError::Expired { .. }) if (1..parts).contains(&reader.parts_told) => {
                self.tally.count("expired between parts");
            }
            Err(HandoffError::Unreachable { .. }) if (1..parts).contains(&reader.parts_told) => {
                self.tally.count("owner died between parts");
            }
            _ => {}
        }
        reader.recorded = true;
        let torn = reader.fence.is_some_and(|fence| Fence::decode(&fence.bytes) == Err(FenceError::Torn));
        let code = match &outcome {
            Ok(()) => "success",
            Err(HandoffError::LeaseOver) => "refused: lease over",
            Err(error) => error.code(),
        };
        self.tally.count(code);
        if torn {
            self.tally.count("a torn slot was seen");
        }
        Ok(())
    }

    /// When nothing is left to happen.
    pub(super) fn check_end(&mut self) -> Result<(), Violation> {
        for (index, reader) in self.readers.iter().enumerate() {
            if reader.outcome() == Some(&Ok(())) && !reader.is_right() {
                return Err(Violation::WrongBytes(format!("reader {index}'s bytes changed after success")));
            }
            if reader.handoff.is_some() && reader.outcome().is_none() && !reader.crashed {
                return Err(Violation::Overdue(format!("reader {index} never ended")));
            }
            if reader.crashed && reader.session.is_some() && reader.outcome().is_none() {
                self.tally.count("reader crashed in a handoff");
            }
        }
        let owner = &self.owners[self.current()];
        match owner.unsettled().filter(|_| owner.alive) {
            Some(unsettled) => Err(Violation::Pool(unsettled)),
            None => Ok(()),
        }
    }
}
