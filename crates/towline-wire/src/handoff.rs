//! The reader's side of a handoff, as a state machine: no sockets, no clock.
//!
//! ```text
//! Connecting ─connected→ Reading ─all bytes in place→ Fencing ─same generation→ Checking ─equal→ Releasing ─→ done
//!      └───────────────────┴── any failure, or the deadline ──┴──────────────────┴───────→ Releasing ─→ failed
//! ```
//!
//! The shell asks [`Handoff::poll_action`] what to do, does it, and reports with [`Handoff::handle_event`]; time goes
//! in as an argument. Three rules live here and nowhere else:
//! - the fence is read only after **every** byte of the data has arrived;
//! - data is good only if the fence holds the ticket's generation **and** every digest is equal;
//! - whatever happens after connecting, the lease is released, so that prefill's blocks go back early.

use std::time::Duration;

use thiserror::Error;

use crate::digest::DigestMismatch;
use crate::fault::{Fault, Retry};
use crate::fence::{Fence, FenceError};
use crate::id::Generation;
use crate::lease::Now;

/// How often a torn fence slot is read again: the owner's two stores take nanoseconds, so a slot that is torn this
/// often was never written by an owner.
pub const FENCE_READS_MAX: u32 = 8;

/// What the shell must do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reach the owner and check that it is the ticket's; answer [`Event::Connected`] or [`Event::Failed`].
    Connect,
    /// Read the blocks; answer [`Event::DataArrived`] once all are in place, or [`Event::Failed`].
    ReadBlocks,
    /// Read the fence slot; answer [`Event::FenceRead`] or [`Event::Failed`].
    ReadFence,
    /// Digest what arrived; answer [`Event::Digested`].
    Digest,
    /// Tell the owner that the lease is no longer needed. No answer is awaited: expiry does it otherwise.
    Release,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The owner is reached, authenticated, and compatible.
    Connected,
    /// All blocks are in place, on every rail.
    DataArrived,
    /// The first 24 bytes of the fence slot.
    FenceRead([u8; 24]),
    /// Whether what arrived is what the owner computed, as far as the ticket's digests cover it.
    Digested(Result<(), DigestMismatch>),
    /// The current step failed.
    Failed(HandoffError),
    /// Time passed; needed at [`Handoff::deadline`] at the latest.
    Tick,
    /// The caller no longer wants it.
    Cancelled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Reading,
    Fencing { reads: u32 },
    Checking,
    Over,
}

/// One handoff from the reader's side.
#[derive(Debug)]
pub struct Handoff {
    generation: Generation,
    parts: u64,
    deadline: Now,
    phase: Phase,
    next: Option<Action>,
    release: bool,
    outcome: Option<Result<(), HandoffError>>,
}

impl Handoff {
    /// Begins: the fence must show `generation` with `parts` parts ready, and all be done by `deadline`.
    pub fn new(generation: Generation, parts: u64, deadline: Now) -> Self {
        Self {
            generation,
            parts,
            deadline,
            phase: Phase::Connecting,
            next: Some(Action::Connect),
            release: false,
            outcome: None,
        }
    }

    /// When [`Event::Tick`] is due.
    pub fn deadline(&self) -> Now {
        self.deadline
    }

    /// What to do now; `None` while an answer is awaited or when it is over.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.next.take().or_else(|| {
            (self.outcome.is_some() && std::mem::take(&mut self.release)).then_some(Action::Release)
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
            return self.fail(HandoffError::Stalled { after: self.deadline });
        }
        match (self.phase, event) {
            (_, Event::Failed(error)) => self.fail(error),
            (_, Event::Cancelled) => self.fail(HandoffError::Cancelled),
            (Phase::Connecting, Event::Connected) => {
                self.release = true;
                self.enter(Phase::Reading, Action::ReadBlocks);
            }
            (Phase::Reading, Event::DataArrived) => {
                self.enter(Phase::Fencing { reads: 1 }, Action::ReadFence)
            }
            (Phase::Fencing { reads }, Event::FenceRead(slot)) => self.handle_fence(reads, &slot),
            (Phase::Checking, Event::Digested(found)) => {
                self.end(found.map_err(HandoffError::DigestMismatch))
            }
            _ => {}
        }
    }

    fn handle_fence(&mut self, reads: u32, slot: &[u8; 24]) {
        match Fence::decode(slot).and_then(|fence| fence.check(self.generation, self.parts)) {
            Ok(()) => self.enter(Phase::Checking, Action::Digest),
            Err(FenceError::Torn) if reads < FENCE_READS_MAX => {
                self.enter(Phase::Fencing { reads: reads + 1 }, Action::ReadFence);
            }
            Err(error) => self.fail(HandoffError::Expired { detail: error }),
        }
    }

    fn enter(&mut self, phase: Phase, action: Action) {
        self.phase = phase;
        self.next = Some(action);
    }

    fn fail(&mut self, error: HandoffError) {
        self.end(Err(error));
    }

    fn end(&mut self, outcome: Result<(), HandoffError>) {
        self.phase = Phase::Over;
        self.next = None;
        self.outcome = Some(outcome);
    }
}

/// Why a handoff failed. What the reader may have received is thrown away in every case.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HandoffError {
    /// The owner can't be reached, or the way broke: another prefill worker, or computing locally, may help.
    #[error("prefill cannot be reached: {detail}")]
    Unreachable {
        /// What failed.
        detail: String,
    },
    /// The owner was restarted since it granted the lease; its KV is gone.
    #[error("prefill was restarted since it computed this KV")]
    PeerRestarted,
    /// The engines differ; pairing them is a configuration error.
    #[error("incompatible {field}: {detail}")]
    Incompatible {
        /// The field that differs.
        field: &'static str,
        /// Both sides' values.
        detail: String,
    },
    /// The path is not what the contract requires.
    #[error("contract violation: {detail}")]
    ContractViolation {
        /// Required, found, evidence, remedy.
        detail: String,
    },
    /// The deadline passed.
    #[error("the KV did not arrive within {after:?}")]
    Stalled {
        /// The deadline.
        after: Duration,
    },
    /// The lease was over when the data had arrived; the data may be torn.
    #[error("the KV expired: {detail}")]
    Expired {
        /// What the fence slot showed.
        detail: FenceError,
    },
    /// The owner refused the read: its lease is over.
    #[error("prefill refused the read: its lease is over")]
    LeaseOver,
    /// The data is not what the owner computed.
    #[error("digest mismatch: {0}")]
    DigestMismatch(DigestMismatch),
    /// The caller gave up.
    #[error("cancelled")]
    Cancelled,
    /// The ticket and the request don't belong together, or the ticket can't be served here.
    #[error("{detail}")]
    Invalid {
        /// What is wrong.
        detail: String,
    },
}

impl HandoffError {
    /// Whose fault it is.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Cancelled
            | Self::Incompatible { .. }
            | Self::ContractViolation { .. }
            | Self::Invalid { .. } => Fault::Caller,
            _ => Fault::Peer,
        }
    }

    /// Where trying again can help.
    pub fn retry(&self) -> Retry {
        match self {
            Self::Cancelled | Self::Incompatible { .. } | Self::Invalid { .. } => Retry::Never,
            _ => Retry::Elsewhere,
        }
    }

    /// A stable word for metrics and error codes.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "unreachable",
            Self::PeerRestarted => "peer_restarted",
            Self::Incompatible { .. } => "incompatible",
            Self::ContractViolation { .. } => "contract_violation",
            Self::Stalled { .. } => "stalled",
            Self::Expired { .. } | Self::LeaseOver => "expired",
            Self::DigestMismatch(_) => "digest_mismatch",
            Self::Cancelled => "cancelled",
            Self::Invalid { .. } => "invalid",
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GENERATION: Generation = Generation(7);
    const MISMATCH: DigestMismatch = DigestMismatch { position: 0, promised: 1, found: 2 };

    fn start() -> Handoff {
        Handoff::new(GENERATION, 1, Duration::from_secs(10))
    }

    fn slot(generation: Generation) -> [u8; 24] {
        Fence { generation, parts_ready: 1 }.encode()
    }

    fn step(handoff: &mut Handoff, expected: Action, event: Event) {
        assert_eq!(handoff.poll_action(), Some(expected));
        assert_eq!(handoff.poll_action(), None, "one action at a time");
        handoff.handle_event(Duration::from_secs(1), event);
    }

    fn up_to_fence(handoff: &mut Handoff) {
        step(handoff, Action::Connect, Event::Connected);
        step(handoff, Action::ReadBlocks, Event::DataArrived);
    }

    #[test]
    fn a_good_handoff_releases_and_succeeds() {
        let mut handoff = start();
        up_to_fence(&mut handoff);
        step(&mut handoff, Action::ReadFence, Event::FenceRead(slot(GENERATION)));
        step(&mut handoff, Action::Digest, Event::Digested(Ok(())));
        assert_eq!(handoff.poll_action(), Some(Action::Release));
        assert_eq!((handoff.poll_action(), handoff.outcome()), (None, Some(&Ok(()))));
    }

    #[test]
    fn a_changed_generation_is_never_used() {
        let mut handoff = start();
        up_to_fence(&mut handoff);
        step(&mut handoff, Action::ReadFence, Event::FenceRead(slot(Generation(8))));
        assert_eq!(handoff.poll_action(), Some(Action::Release));
        assert!(matches!(handoff.outcome(), Some(Err(HandoffError::Expired { .. }))));
    }

    #[test]
    fn a_torn_slot_is_read_again_but_not_for_ever() {
        let mut handoff = start();
        up_to_fence(&mut handoff);
        for _ in 0..FENCE_READS_MAX {
            step(&mut handoff, Action::ReadFence, Event::FenceRead([1; 24]));
        }
        assert!(matches!(handoff.outcome(), Some(Err(HandoffError::Expired { .. }))));
    }

    #[test]
    fn another_digest_fails() {
        let mut handoff = start();
        up_to_fence(&mut handoff);
        step(&mut handoff, Action::ReadFence, Event::FenceRead(slot(GENERATION)));
        step(&mut handoff, Action::Digest, Event::Digested(Err(MISMATCH)));
        assert_eq!(handoff.outcome(), Some(&Err(HandoffError::DigestMismatch(MISMATCH))));
    }

    #[test]
    fn the_fence_cannot_be_read_before_the_data() {
        let mut handoff = start();
        step(&mut handoff, Action::Connect, Event::Connected);
        step(&mut handoff, Action::ReadBlocks, Event::FenceRead(slot(GENERATION)));
        assert_eq!(
            (handoff.poll_action(), handoff.outcome()),
            (None, None),
            "an early fence counts for nothing"
        );
    }

    #[test]
    fn the_deadline_ends_every_phase() {
        let mut handoff = start();
        step(&mut handoff, Action::Connect, Event::Connected);
        handoff.handle_event(Duration::from_secs(10), Event::Tick);
        assert!(matches!(handoff.outcome(), Some(Err(HandoffError::Stalled { .. }))));
        assert_eq!(handoff.poll_action(), Some(Action::Release));
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Connected),
            Just(Event::DataArrived),
            prop_oneof![Just(7u64), Just(8)].prop_map(|g| Event::FenceRead(slot(Generation(g)))),
            Just(Event::FenceRead([9; 24])),
            prop_oneof![Just(Ok(())), Just(Err(MISMATCH))].prop_map(Event::Digested),
            Just(Event::Tick),
            Just(Event::Cancelled),
            Just(Event::Failed(HandoffError::PeerRestarted)),
        ]
    }

    proptest! {
        /// Success needs, in this order: connected, data, a fence of the right generation, the right digest.
        #[test]
        fn success_needs_data_then_fence_then_digest(events in prop::collection::vec((any_event(), 0u64..12), 0..20)) {
            let mut handoff = start();
            let mut proof = 0;
            for (event, at) in events {
                let before = handoff.outcome().is_some();
                proof = match (proof, &event) {
                    (0, Event::Connected) => 1,
                    (1, Event::DataArrived) => 2,
                    (2, Event::FenceRead(bytes)) if *bytes == slot(GENERATION) => 3,
                    (3, Event::Digested(Ok(()))) => 4,
                    (proof, _) => proof,
                };
                handoff.handle_event(Duration::from_secs(at), event);
                while handoff.poll_action().is_some() {}
                if !before && handoff.outcome() == Some(&Ok(())) {
                    prop_assert_eq!(proof, 4);
                    prop_assert!(at < 10);
                }
            }
        }
    }
}
