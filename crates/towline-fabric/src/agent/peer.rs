//! A peer as callers see it: its card, and everything that can be asked of it.
//!
//! A peer is connected when it is made by [`Agent::connect`](crate::Agent::connect), and connects at its first use when it is
//! made by [`Agent::introduce`](crate::Agent::introduce). One that nobody uses is put to rest and wakes when it is used
//! again; the limits say when. One that is *lost* stays down; connect again. A restarted agent has another boot epoch, and
//! is never taken for the one before.

use std::sync::Arc;
use std::time::Duration;

use towline_topo::place::{Place, Relation};
use towline_wire::card::AgentCard;
use towline_wire::contract::ContractViolation;
use towline_wire::control::{Body, HEARTBEAT_LEASES_MAX, NOTIFY_BYTES_MAX, v1};
use towline_wire::engine_card::EngineCard;
use towline_wire::id::{Generation, LeaseId};
use towline_wire::receipt::{Evidence, TransportKind};

use super::book::Totals;
pub(super) use super::connection::{PeerShared, Side};
use super::handle::Handle;
use super::lease::HeldLease;
use super::place;
use super::plan::Plan;
use super::transfer::{Prepared, Transfer, TransferRequest};
use crate::error::{ConnectError, ControlError, Reasons, TransferError};
use crate::pending::{Pending, pending, ready};

/// An agent that proved itself, or will before it is used, and how its memory is reached. A cheap handle; the last clone
/// that goes closes the sessions, once the transfers under way have ended.
#[derive(Clone)]
pub struct Peer(pub(super) Arc<Handle>);

impl Peer {
    /// What it offers now, as far as it has told: regions that it registered since the connect are here, those that it
    /// deregistered are not. Of a peer that has not connected yet, the card that it is known by.
    pub fn card(&self) -> Arc<AgentCard> {
        self.0.view.card()
    }

    /// Completes when the card has a higher [`revision`](AgentCard::revision) than `known`: regions came or went. At once,
    /// if it has now. At most 64 may wait for one peer.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`] when the peer goes down, [`ControlError::Full`].
    pub fn watch(&self, known: u64) -> Pending<Result<Arc<AgentCard>, ControlError>> {
        if let Some((reason, _)) = self.0.down() {
            return ready(Err(ControlError::Unreachable { reason }));
        }
        let news = self.0.view.watch(known);
        // News come over a session; should it not come up, the one who waits is told.
        self.0.with_link(|_| {});
        news
    }

    /// Where it runs, as it says; unknown fields have no value.
    pub fn place(&self) -> Place {
        place::of(&self.0.view.card())
    }

    /// How near that is, by both places alone: a hint, as the peer's place is a claim.
    pub fn relation(&self) -> Relation {
        self.0.environment.place.relation(&self.place())
    }

    /// Which wire carries data. Of a peer that has not connected yet, the one that will be tried first; its evidence says
    /// so.
    pub fn transport(&self) -> TransportKind {
        self.0.reached().transport
    }

    /// What shows that.
    pub fn evidence(&self) -> Evidence {
        self.0.evidence()
    }

    /// Transports preferred over this one, with the reason why each was not used.
    pub fn passed_over(&self) -> Reasons {
        self.0.reached().passed_over
    }

    /// How the pair breaks its contract now: when the contract says to go on with an alarm, or after it was refused.
    pub fn violation(&self) -> Option<ContractViolation> {
        self.0.pair.violation()
    }

    /// What it has moved since it was first connected.
    pub fn totals(&self) -> Totals {
        self.0.pair.totals()
    }

    /// How long a transfer of `bytes` will take, from what the pair has moved lately; `None` until it has moved enough
    /// to tell: a small transfer for its latency, one of 1 MiB for its rate.
    pub fn estimate(&self, bytes: u64) -> Option<Duration> {
        self.0.pair.estimate(bytes)
    }

    /// Whether transfers can be posted: as far as this side knows, the sessions are up, or will come up when needed.
    pub fn is_open(&self) -> bool {
        self.0.down().is_none()
    }

    /// Why the peer is down, if it is.
    pub fn down_reason(&self) -> Option<String> {
        self.0.down().map(|(reason, _)| reason)
    }

    /// Connects ahead of the first use, within the deadline of the options that the peer was made with. At once, if it is
    /// connected.
    ///
    /// # Errors
    /// [`ConnectError`]; of one that another attempt can't mend, such as a restart, the peer stays down.
    pub fn connect(&self) -> Pending<Result<(), ConnectError>> {
        let (outcome, pending) = pending(|| Err(ConnectError::Closed { reason: "the agent stopped" }));
        self.0.wake(Box::new(move |connection| _ = outcome.complete(connection.map(drop))));
        pending
    }

    /// Closes the sessions now; outstanding transfers fail with [`TransferError::Closed`].
    pub fn close(&self) {
        self.0.close();
    }

    /// Checks and posts a transfer; returns at once, save for the checks and for copies of at most 64 KiB. Its blocks are
    /// merged and cut while it moves. If the peer is at rest it connects first, within the transfer's deadline.
    ///
    /// # Errors
    /// What can be told without asking the peer: unknown regions, ranges, sizes, a closed peer, a full agent.
    pub fn transfer(&self, request: TransferRequest) -> Result<Transfer, TransferError> {
        let planned = Plan::new(request, &self.0.view.card());
        let (plan, held) = planned.map_err(|error| self.0.or_down(error))?;
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
        self.call(Body::Release(v1::Release { lease: lease.0, generation: generation.0 }))
    }

    /// Tells the owner once, now, that this reader still wants `leases`. No answer; at most 4096 are sent at a time.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`], [`ControlError::Full`].
    pub fn heartbeat(&self, leases: &[LeaseId]) -> Result<(), ControlError> {
        leases.chunks(HEARTBEAT_LEASES_MAX).try_for_each(|leases| {
            let leases = leases.iter().map(|lease| lease.0).collect();
            self.0.send(Body::Heartbeat(v1::Heartbeat { leases }))
        })
    }

    /// Tells the owner now, and in each heartbeat until what is returned is dropped, that this reader wants `lease`. All
    /// leases held of a peer go in one message.
    ///
    /// # Errors
    /// As [`Peer::heartbeat`].
    pub fn hold(&self, lease: LeaseId) -> Result<HeldLease, ControlError> {
        let held = HeldLease::new(&self.0, lease);
        self.heartbeat(&[lease])?;
        self.0.environment.heart.keep(&self.0);
        Ok(held)
    }

    /// Sends bytes to the peer's [`Owner`](crate::Owner). No answer.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`], [`ControlError::Full`] also for more than 16 KiB.
    pub fn notify(&self, payload: Vec<u8>) -> Result<(), ControlError> {
        if payload.len() > NOTIFY_BYTES_MAX {
            return Err(ControlError::Full { reason: "a notification has at most 16 KiB" });
        }
        self.0.send(Body::Notify(v1::Notify { payload }))
    }

    /// Asks for a sign of life: completes when the owner's io thread answered.
    pub fn ping(&self) -> Pending<Result<(), ControlError>> {
        match self.0.down() {
            Some((reason, _)) => ready(Err(ControlError::Unreachable { reason })),
            None => self.call(Body::CardRequest(v1::CardRequest {})),
        }
    }

    /// Asks for the card of the engine that the peer belongs to.
    ///
    /// # Errors
    /// [`ControlError::Refused`] with the code `no-engine-card` when there is none, [`ControlError::EngineCard`] for one
    /// that breaks the rules, and as every call.
    pub fn engine_card(&self) -> Pending<Result<EngineCard, ControlError>> {
        let (answer, pending) = pending(|| Err(ended()));
        self.0.with_link(move |link| match link {
            Ok(link) => link.ask_engine_card(answer),
            Err(error) => _ = answer.complete(Err(error)),
        });
        pending
    }

    fn call(&self, body: Body) -> Pending<Result<(), ControlError>> {
        let (answer, pending) = pending(|| Err(ended()));
        self.0.with_link(move |link| match link {
            Ok(link) => link.call(body, answer),
            Err(error) => _ = answer.complete(Err(error)),
        });
        pending
    }
}

fn ended() -> ControlError {
    ControlError::Unreachable { reason: "the session ended".into() }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peer({} over {}, open: {})", self.card().agent, self.transport(), self.is_open())
    }
}
