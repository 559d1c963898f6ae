//! A connected peer: its card, a control session, and one path for data.
//!
//! Both are up, or the peer is down: losing either closes the other, and every outstanding transfer fails at once. A
//! peer that is down stays down; connect again (a restarted agent has another boot epoch and is told apart there).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use towline_wire::card::AgentCard;
use towline_wire::contract::ContractViolation;
use towline_wire::control::{Body, HEARTBEAT_LEASES_MAX, NOTIFY_BYTES_MAX, v1};
use towline_wire::id::{Generation, LeaseId};
use towline_wire::receipt::{Evidence, Op, Rail, TransportKind};

use super::book::Totals;
use super::environment::Environment;
use super::pair::Pair;
use super::plan::Plan;
use super::stats::Seat;
use super::transfer::{Prepared, Transfer, TransferRequest};
use crate::control::Link;
use crate::error::{ControlError, Reasons, TransferError};
use crate::pending::{Pending, ready};
use crate::transport::{Path, PathError, PathEvents};

/// An agent that proved itself, and how its memory is reached. A cheap handle; the last clone that goes closes the
/// sessions, once the transfers under way have ended.
#[derive(Clone)]
pub struct Peer(pub(super) Arc<PeerShared>);

pub(crate) struct PeerShared {
    pub(super) environment: Arc<Environment>,
    pub(super) card: Arc<AgentCard>,
    pub(super) transport: TransportKind,
    pub(super) path: Arc<dyn Path>,
    pub(super) link: Arc<Link>,
    pub(super) state: Arc<PeerState>,
    pub(super) passed_over: Reasons,
    pub(super) pair: Pair,
    pub(super) _seat: Seat,
}

impl Peer {
    /// What it offered when it was connected to.
    pub fn card(&self) -> &AgentCard {
        &self.0.card
    }

    /// Which wire carries data.
    pub fn transport(&self) -> TransportKind {
        self.0.transport
    }

    /// What shows that.
    pub fn evidence(&self) -> Evidence {
        self.0.path.evidence()
    }

    /// Transports preferred over this one, with the reason why each was not used.
    pub fn passed_over(&self) -> &Reasons {
        &self.0.passed_over
    }

    /// How the pair breaks its contract now: when the contract says to go on with an alarm, or after it was refused.
    pub fn violation(&self) -> Option<ContractViolation> {
        self.0.pair.violation()
    }

    /// What it has moved since it was connected.
    pub fn totals(&self) -> Totals {
        self.0.pair.totals()
    }

    /// How long a transfer of `bytes` will take, from what the pair has moved lately; `None` until it has moved enough
    /// to tell: a small transfer for its latency, one of 1 MiB for its rate.
    pub fn estimate(&self, bytes: u64) -> Option<Duration> {
        self.0.pair.estimate(bytes)
    }

    /// Whether transfers can be posted: both sessions are up as far as this side knows.
    pub fn is_open(&self) -> bool {
        self.0.state.down_reason().is_none()
    }

    /// Why the peer is down, if it is.
    pub fn down_reason(&self) -> Option<String> {
        self.0.state.down_reason()
    }

    /// Closes the sessions now; outstanding transfers fail with [`TransferError::Closed`].
    pub fn close(&self) {
        self.0.state.go_down("closed here", Side::Ours);
    }

    /// Checks and posts a transfer; returns at once, save for the checks and for copies of at most 64 KiB. Its blocks
    /// are merged and cut while it moves.
    ///
    /// # Errors
    /// What can be told without asking the peer: unknown regions, ranges, sizes, a closed peer, a full agent.
    pub fn transfer(&self, request: TransferRequest) -> Result<Transfer, TransferError> {
        let (plan, held) = Plan::new(request, &self.0.card)?;
        Transfer::post(&self.0, &Arc::new(plan), held)
    }

    /// Checks, merges and cuts a transfer to be posted later, any number of times.
    ///
    /// # Errors
    /// As [`Peer::transfer`].
    pub fn prepare(&self, request: TransferRequest) -> Result<Prepared, TransferError> {
        Prepared::new(&self.0, request)
    }

    /// Tells the owner that this reader needs the lease no more.
    pub fn release(&self, lease: LeaseId, generation: Generation) -> Pending<Result<(), ControlError>> {
        self.0.link.call(Body::Release(v1::Release { lease: lease.0, generation: generation.0 }))
    }

    /// Tells the owner that this reader still wants `leases`. No answer; at most 4096 are sent at a time.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`], [`ControlError::Full`].
    pub fn heartbeat(&self, leases: &[LeaseId]) -> Result<(), ControlError> {
        leases.chunks(HEARTBEAT_LEASES_MAX).try_for_each(|leases| {
            let leases = leases.iter().map(|lease| lease.0).collect();
            self.0.link.send(Body::Heartbeat(v1::Heartbeat { leases }))
        })
    }

    /// Sends bytes to the peer's [`Owner`](crate::Owner). No answer.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`], [`ControlError::Full`] also for more than 16 KiB.
    pub fn notify(&self, payload: Vec<u8>) -> Result<(), ControlError> {
        if payload.len() > NOTIFY_BYTES_MAX {
            return Err(ControlError::Full { reason: "a notification has at most 16 KiB" });
        }
        self.0.link.send(Body::Notify(v1::Notify { payload }))
    }

    /// Asks for a sign of life: completes when the owner's io thread answered.
    pub fn ping(&self) -> Pending<Result<(), ControlError>> {
        if self.is_open() {
            return self.0.link.call(Body::CardRequest(v1::CardRequest {}));
        }
        ready(Err(ControlError::Unreachable { reason: self.down_reason().unwrap_or_default() }))
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peer({} over {}, open: {})", self.0.card.agent, self.0.transport, self.is_open())
    }
}

impl PeerShared {
    /// The error for a transfer whose path is gone.
    pub(super) fn lost(&self, reason: &str) -> TransferError {
        let down = self.state.down.lock().unwrap_or_else(PoisonError::into_inner);
        match down.as_ref() {
            Some((reason, Side::Ours)) => TransferError::Closed { reason: reason.clone() },
            Some((reason, Side::Theirs)) => {
                TransferError::Unreachable { agent: self.card.agent.clone(), reason: reason.clone() }
            }
            Some((reason, Side::Contract)) => match self.pair.violation() {
                Some(violation) => TransferError::ContractViolation(Box::new(violation)),
                None => TransferError::Closed { reason: reason.clone() },
            },
            None => TransferError::Unreachable { agent: self.card.agent.clone(), reason: reason.into() },
        }
    }

    /// Writes a transfer that ended into the pair's book, and acts when the pair begins to break its contract.
    pub(super) fn conclude(&self, op: Op, rails: Option<&[Rail]>) {
        let now = Instant::now();
        let Some(violation) = self.pair.handle_end(now, op, rails) else { return };
        self.environment.counters.contract_violations.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(peer = %self.card.agent, %violation, "contract violated");
        if self.pair.refuses() {
            self.environment.refused.remember(&self.card.agent, &violation, now);
            self.state.go_down(&violation.to_string(), Side::Contract);
        }
    }
}

impl Drop for PeerShared {
    fn drop(&mut self) {
        self.state.go_down("the peer was dropped here", Side::Ours);
    }
}

/// Who ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Theirs,
    /// The pair broke it.
    Contract,
}

/// Whether a peer is up; ties its control session and its path together.
#[derive(Default)]
pub(crate) struct PeerState {
    down: Mutex<Option<(String, Side)>>,
    parts: OnceLock<(Weak<dyn Path>, Weak<Link>)>,
}

impl PeerState {
    /// Names what closes together. If one has gone down already, both are closed now.
    pub(super) fn bind(&self, path: &Arc<dyn Path>, link: &Arc<Link>) {
        let _ = self.parts.set((Arc::downgrade(path), Arc::downgrade(link)));
        if self.down_reason().is_some() {
            self.close_parts();
        }
    }

    pub(super) fn down_reason(&self) -> Option<String> {
        let down = self.down.lock().unwrap_or_else(PoisonError::into_inner);
        down.as_ref().map(|(reason, _)| reason.clone())
    }

    /// Marks the peer as down, for the first reason given, and closes session and path.
    pub(crate) fn go_down(&self, reason: &str, side: Side) {
        let mut down = self.down.lock().unwrap_or_else(PoisonError::into_inner);
        if down.is_some() {
            return;
        }
        *down = Some((reason.into(), side));
        drop(down);
        self.close_parts();
    }

    fn close_parts(&self) {
        let Some((path, link)) = self.parts.get() else { return };
        if let Some(path) = path.upgrade() {
            path.close();
        }
        if let Some(link) = link.upgrade() {
            link.close();
        }
    }
}

impl PathEvents for PeerState {
    fn handle_down(&self, reason: &PathError) {
        let side = if matches!(reason, PathError::Closed(_)) { Side::Ours } else { Side::Theirs };
        self.go_down(&reason.to_string(), side);
    }
}
