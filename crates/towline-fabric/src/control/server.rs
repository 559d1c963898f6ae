//! A peer's control session, served: its questions answered, and the changes of the card that it once asked for.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use towline_wire::auth::Identity;
use towline_wire::control::{Body, decode, encode, v1};
use towline_wire::engine_card::EngineCard;
use towline_wire::frame::FrameKind;
use towline_wire::id::{Generation, LeaseId};
use towline_wire::lease::LeaseError;

use super::subscribers::Subscription;
use crate::agent::{Environment, Seat};
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, Session, SessionId};

/// Answers that may wait for a peer that does not read; beyond, its questions and our news wait. A card has up to 64 KiB,
/// so this bounds a session to 1 MiB.
const BACKLOG: usize = 16;

/// Messages handled in one turn.
const TURN: usize = 64;

/// See the head of this file.
pub(super) struct ControlServer {
    channel: Channel,
    environment: Arc<Environment>,
    peer: Identity,
    /// The revision of the card that the peer has, once it asked.
    told: Option<u64>,
    _subscription: Subscription,
    _seat: Seat,
}

impl ControlServer {
    pub(super) fn new(
        channel: Channel,
        environment: &Arc<Environment>,
        (id, peer, seat): (SessionId, Identity, Seat),
    ) -> Self {
        tracing::debug!(peer = %peer.agent, "control session");
        let _subscription = Subscription::new(environment, id);
        Self { channel, environment: Arc::clone(environment), peer, told: None, _subscription, _seat: seat }
    }

    fn handle(&mut self, kind: FrameKind, body: &[u8]) -> Result<(), SessionError> {
        if kind != FrameKind::Control {
            return Err(SessionError::Protocol("a data frame on a control session".into()));
        }
        let (call, body) = decode(body)?;
        let owner = &self.environment.owner;
        let answer = match body {
            Body::CardRequest(_) => self.card(),
            Body::EngineCardRequest(_) => engine_card(owner.engine_card()),
            Body::Release(v1::Release { lease, generation }) => {
                answer(owner.handle_release(&self.peer, LeaseId(lease), Generation(generation)))
            }
            Body::Heartbeat(v1::Heartbeat { leases }) => {
                let leases: Vec<_> = leases.into_iter().map(LeaseId).collect();
                owner.handle_heartbeat(&self.peer, &leases);
                return Ok(());
            }
            Body::Notify(v1::Notify { payload }) => {
                owner.handle_notify(&self.peer, payload);
                return Ok(());
            }
            Body::Card(_)
            | Body::EngineCard(_)
            | Body::Refused(_)
            | Body::Done(_)
            | Body::ForeignRegion(_) => {
                return Err(SessionError::Protocol("an answer that was not asked for".into()));
            }
        };
        self.channel.send(FrameKind::Control, &encode(call, answer))
    }

    fn card(&mut self) -> Body {
        let card = self.environment.card();
        self.told = Some(card.revision);
        Body::Card(card.to_wire())
    }

    /// Queues the card if the peer has an older one; false when there is no news.
    fn tell_news(&mut self) -> Result<bool, SessionError> {
        if self.told.is_none_or(|told| told == self.environment.regions.revision()) {
            return Ok(false);
        }
        let news = self.card();
        self.channel.send(FrameKind::Control, &encode(0, news))?;
        Ok(true)
    }
}

/// A card that breaks the rules is the owner's mistake; the peer is told instead of being sent it.
fn engine_card(card: Option<EngineCard>) -> Body {
    let refused = |code: &str, message| Body::Refused(v1::Refused { code: code.into(), message });
    match card.map(|card| card.validate().map(|()| card)) {
        Some(Ok(card)) => Body::EngineCard(card.to_wire()),
        Some(Err(error)) => refused("invalid-engine-card", error.to_string()),
        None => refused("no-engine-card", "this agent has no card of an engine".into()),
    }
}

fn answer(outcome: Result<(), LeaseError>) -> Body {
    let Err(error) = outcome else { return Body::Done(v1::Done {}) };
    let code = match error {
        LeaseError::Over { .. } => "lease-over",
        LeaseError::NotCovered { .. } => "not-covered",
        LeaseError::Full { .. } => "full",
        LeaseError::Readers { .. } => "readers",
        LeaseError::Reader { .. } => "reader",
    };
    Body::Refused(v1::Refused { code: code.into(), message: error.to_string() })
}

impl Session for ControlServer {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        Some(self.channel.source())
    }

    fn drive(&mut self, _cause: Cause) -> Result<Flow, SessionError> {
        for _ in 0..TURN {
            if !self.channel.flush(|_| {})? && self.channel.backlog() >= BACKLOG {
                return Ok(Flow::Wait);
            }
            if self.tell_news()? {
                continue;
            }
            let Some((kind, body)) = self.channel.next_frame()? else { return Ok(Flow::Wait) };
            self.handle(kind, &body)?;
        }
        Ok(Flow::Again)
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        if matches!(why, SessionError::Protocol(_)) {
            self.environment.counters.protocol_errors.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %self.peer.agent, %why, "control session closed");
        }
        let Self { channel, environment, peer, _subscription: subscription, _seat: seat, .. } = *self;
        drop((channel, subscription, seat));
        environment.owner.handle_peer_gone(&peer);
    }
}
