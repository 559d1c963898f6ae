//! Connecting to a peer: resolve, control session, card, checks, path.
//!
//! ```text
//!   resolve ──> control session (each address in turn) ──> card checked ──> transports (preferred first) ──> contract ──> Peer
//! ```
//! Every step runs on the io thread as a callback of the one before; only names, which the C library resolves
//! blockingly, get a short-lived thread. One timer ends it all at the deadline.

use std::collections::VecDeque;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use towline_wire::card::AgentCard;
use towline_wire::contract::{ContractViolation, OnViolation};
use towline_wire::receipt::TransportKind;

use super::TransportStatus;
use super::config::{ConnectOptions, TransportChoice};
use super::environment::Environment;
use super::pair::Pair;
use super::peer::{Peer, PeerShared, PeerState, Side};
use super::stats::Seat;
use crate::control::{Dialled, Link, open_control};
use crate::error::{ConnectError, Reasons, SessionError};
use crate::io::{Timed, TimerKey};
use crate::pending::{Completer, Pending, pending};
use crate::transport::{Path, PathError, PeerAddress, Transport};

/// Addresses of one name that are tried: both families of a few interfaces.
const ADDRESSES_MAX: usize = 8;

/// Transports that will not do, each with its reason.
type RuledOut = Vec<(TransportKind, String)>;

struct Dial {
    environment: Arc<Environment>,
    candidates: Vec<Arc<dyn Transport>>,
    ruled_out: RuledOut,
    address: String,
    options: ConnectOptions,
    until: Instant,
    outcome: Completer<Result<Peer, ConnectError>>,
    seat: Mutex<Option<Seat>>,
    timer: OnceLock<TimerKey>,
    addresses: Mutex<VecDeque<SocketAddr>>,
}

/// What the control session brought.
struct Met {
    link: Arc<Link>,
    card: Arc<AgentCard>,
    socket: SocketAddr,
    state: Arc<PeerState>,
}

pub(super) fn dial(
    environment: &Arc<Environment>,
    transports: &[Arc<dyn Transport>],
    statuses: &[TransportStatus],
    (address, options): (&str, ConnectOptions),
) -> Pending<Result<Peer, ConnectError>> {
    let (outcome, pending) = pending(|| Err(ConnectError::Closed { reason: "the agent stopped" }));
    let Some(seat) = Seat::take(&environment.counters.peers, environment.limits.peers) else {
        outcome.complete(Err(ConnectError::Closed { reason: "it has as many peers as it may" }));
        return pending;
    };
    // A deadline past the end of the clock becomes an hour: nobody dials for longer.
    let (now, long) = (Instant::now(), Duration::from_secs(3600));
    let until = now.checked_add(options.deadline).unwrap_or(now + long);
    let (candidates, ruled_out) = candidates(transports, statuses, options.transport);
    let dial = Arc::new(Dial {
        environment: Arc::clone(environment),
        candidates,
        ruled_out,
        address: address.into(),
        options,
        until,
        outcome,
        seat: Mutex::new(Some(seat)),
        timer: OnceLock::new(),
        addresses: Mutex::default(),
    });
    dial.resolve();
    pending
}

fn candidates(
    transports: &[Arc<dyn Transport>],
    statuses: &[TransportStatus],
    choice: TransportChoice,
) -> (Vec<Arc<dyn Transport>>, RuledOut) {
    let fits = |kind| choice == TransportChoice::Auto || choice == TransportChoice::Only(kind);
    let chosen = transports.iter().filter(|transport| fits(transport.kind())).cloned().collect();
    let missing = |status: &TransportStatus| Some((status.kind, status.available.as_ref().err()?.clone()));
    let mut ruled_out: Vec<_> =
        statuses.iter().filter(|status| fits(status.kind)).filter_map(missing).collect();
    if let TransportChoice::Only(kind) = choice
        && statuses.iter().all(|status| status.kind != kind)
    {
        ruled_out.push((kind, "this build does not have it".into()));
    }
    (chosen, ruled_out)
}

impl Dial {
    fn resolve(self: &Arc<Self>) {
        let timed: Arc<dyn Timed> = Arc::<Self>::clone(self);
        let key = self.environment.io.timers().insert(self.until, Arc::downgrade(&timed));
        let _ = self.timer.set(key);
        if let Ok(literal) = self.address.parse() {
            self.set_addresses([literal].into());
            return;
        }
        let dial = Arc::clone(self);
        let resolver = std::thread::Builder::new().name("towline-resolve".into());
        let spawned = resolver.spawn(move || match dial.address.to_socket_addrs() {
            Ok(found) => dial.set_addresses(found.take(ADDRESSES_MAX).collect()),
            Err(error) => dial.fail(dial.unreachable(&error)),
        });
        if let Err(error) = spawned {
            self.fail(self.unreachable(&error));
        }
    }

    fn set_addresses(self: &Arc<Self>, found: VecDeque<SocketAddr>) {
        *self.addresses.lock().unwrap_or_else(PoisonError::into_inner) = found;
        self.try_next_address(self.unreachable(&"the name has no address"));
    }

    fn try_next_address(self: &Arc<Self>, otherwise: ConnectError) {
        if self.outcome.is_done() {
            return;
        }
        let next = self.addresses.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let Some(socket) = next else { return self.fail(otherwise) };
        let state = Arc::new(PeerState::default());
        let (dial, ours) = (Arc::clone(self), Arc::clone(&state));
        let opened = Box::new(move |outcome| dial.handle_control(outcome, socket, ours));
        let events = Box::new(move |why: &SessionError| {
            let side = if matches!(why, SessionError::Closed(_)) { Side::Ours } else { Side::Theirs };
            state.go_down(&why.to_string(), side);
        });
        open_control(&self.environment, (socket, self.until), opened, events);
    }

    fn handle_control(
        self: &Arc<Self>,
        outcome: Result<Dialled, SessionError>,
        socket: SocketAddr,
        state: Arc<PeerState>,
    ) {
        let (link, card) = match outcome {
            Ok(Dialled { link, card }) => (link, card),
            Err(SessionError::Lost(reason)) => return self.try_next_address(self.unreachable(&reason)),
            Err(error) => return self.fail(self.explain(error)),
        };
        let checked = AgentCard::from_wire(card).map_err(ConnectError::from);
        match checked.and_then(|card| self.check(card)) {
            Ok(card) => self.try_transport(
                Met { link, card: Arc::new(card), socket, state },
                0,
                self.ruled_out.clone(),
            ),
            Err(error) => self.fail(error),
        }
    }

    fn check(&self, card: AgentCard) -> Result<AgentCard, ConnectError> {
        if let Some(expected) = self.options.agent.as_ref().filter(|name| **name != card.agent) {
            let (address, expected, found) = (self.address.clone(), expected.clone(), card.agent);
            return Err(ConnectError::WrongAgent { address, expected, found });
        }
        if let Some(expected) = self.options.boot_epoch.filter(|epoch| *epoch != card.boot_epoch) {
            return Err(ConnectError::PeerRestarted { agent: card.agent, expected, found: card.boot_epoch });
        }
        if let Some(ours) = &self.options.fingerprint {
            ours.check(&card.fingerprint)?;
        }
        self.environment.refused.check(&card.agent, &self.options.contract, Instant::now())?;
        Ok(card)
    }

    fn try_transport(self: &Arc<Self>, met: Met, index: usize, mut passed_over: RuledOut) {
        if self.outcome.is_done() {
            return;
        }
        let Some(transport) = self.candidates.get(index) else {
            return self.fail(ConnectError::NoTransport { reasons: Reasons(passed_over) });
        };
        let events = Arc::<PeerState>::clone(&met.state);
        let peer = PeerAddress { card: Arc::clone(&met.card), socket: met.socket, until: self.until, events };
        let (dial, kind) = (Arc::clone(self), transport.kind());
        let opened = move |path: Result<Arc<dyn Path>, PathError>| match path {
            Ok(path) => dial.finish(met, (kind, path), Reasons(passed_over)),
            Err(error) => {
                let reason = error.to_string();
                tracing::info!(peer = %met.card.agent, transport = %kind, reason, "transport passed over");
                passed_over.push((kind, reason));
                dial.try_transport(met, index + 1, passed_over);
            }
        };
        transport.connect(&peer, Box::new(opened));
    }

    fn finish(&self, met: Met, (transport, path): (TransportKind, Arc<dyn Path>), passed_over: Reasons) {
        let violation = self.options.contract.admits(transport, &path.evidence()).err();
        if let Some(violation) = &violation {
            self.environment.counters.contract_violations.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %met.card.agent, %violation, "contract violated");
            if self.options.contract.on_violation == OnViolation::Refuse {
                path.close();
                return self.fail(violation.clone().into());
            }
        }
        match self.seat.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(seat) => self.deliver(met, (transport, path), passed_over, (violation, seat)),
            None => path.close(),
        }
    }

    fn deliver(
        &self,
        met: Met,
        (transport, path): (TransportKind, Arc<dyn Path>),
        passed_over: Reasons,
        (violation, seat): (Option<ContractViolation>, Seat),
    ) {
        met.state.bind(&path, &met.link);
        tracing::info!(peer = %met.card.agent, %transport, evidence = %path.evidence(), "connected");
        let peer = Peer(Arc::new(PeerShared {
            environment: Arc::clone(&self.environment),
            card: met.card,
            transport,
            path,
            link: met.link,
            state: met.state,
            passed_over,
            pair: Pair::new(self.options.contract.clone(), violation),
            _seat: seat,
        }));
        self.outcome.complete(Ok(peer));
    }

    fn fail(&self, error: ConnectError) {
        // The place is free before the caller is told.
        self.seat.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.outcome.complete(Err(error));
    }

    fn explain(&self, error: SessionError) -> ConnectError {
        let address = self.address.clone();
        match error {
            SessionError::Lost(reason) => ConnectError::Unreachable { address, reason },
            SessionError::Auth(reason) | SessionError::Protocol(reason) => {
                ConnectError::Auth { address, reason }
            }
            SessionError::Deadline => ConnectError::Deadline { address, deadline: self.options.deadline },
            SessionError::Closed(reason) => ConnectError::Closed { reason },
        }
    }

    fn unreachable(&self, reason: &dyn ToString) -> ConnectError {
        ConnectError::Unreachable { address: self.address.clone(), reason: reason.to_string() }
    }
}

impl Timed for Dial {
    fn handle_deadline(&self) {
        self.fail(self.explain(SessionError::Deadline));
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        if let Some(key) = self.timer.take() {
            self.environment.io.timers().cancel(key);
        }
    }
}
