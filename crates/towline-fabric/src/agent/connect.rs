//! Connecting to a peer: resolve, control session, card, checks, path; or, over a session that has none, the path alone.
//!
//! ```text
//!   resolve ──> control session (each address in turn) ──> card checked ──> transports (preferred first) ──> contract ──> connection
//! ```
//! Every step runs on the io thread as a callback of the one before; only names, which the C library resolves
//! blockingly, get a short-lived thread. One timer ends it all at the deadline.
//!
//! While the path opens, several threads may notice that something is wrong, in any order. What the caller is told goes by
//! rank, not by who was first: past the deadline it is the deadline; else, once the last transport has said no, that the peer
//! was lost, if the control session has ended or any transport lost it; else that no transport is fit. A data connection at
//! which another incarnation answers ends it at once.

use std::collections::VecDeque;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use towline_wire::card::AgentCard;
use towline_wire::contract::{ContractViolation, OnViolation};
use towline_wire::receipt::TransportKind;

use super::TransportStatus;
use super::config::{ConnectOptions, TransportChoice};
use super::connection::{PathWatch, PeerShared, PeerState, Session, Side};
use super::environment::Environment;
use super::follow::FollowingPath;
use super::pair::Pair;
use super::place;
use super::stats::Seat;
use super::view::View;
use crate::control::{Dialled, open_control};
use crate::error::{ConnectError, Reasons, SessionError};
use crate::io::{Timed, TimerKey};
use crate::transport::{Path, PathError, PeerAddress, Transport};

/// Addresses of one name that are tried: both families of a few interfaces.
const ADDRESSES_MAX: usize = 8;

/// Transports that will not do, each with its reason.
pub(super) type RuledOut = Vec<(TransportKind, String)>;

/// How a peer is to be reached.
#[derive(Clone)]
pub(super) struct Route {
    /// Preferred first.
    pub(super) candidates: Vec<Arc<dyn Transport>>,
    pub(super) ruled_out: RuledOut,
    /// All that there are, preferred first.
    order: Vec<TransportKind>,
    /// `host:port`.
    pub(super) address: String,
    pub(super) options: ConnectOptions,
}

impl Route {
    /// Over what `options` choose of this agent's transports.
    pub(super) fn new(
        transports: &[Arc<dyn Transport>],
        statuses: &[TransportStatus],
        (address, options): (&str, ConnectOptions),
    ) -> Self {
        let choice = options.transport;
        let fits = |kind| choice == TransportChoice::Auto || choice == TransportChoice::Only(kind);
        let candidates = transports.iter().filter(|transport| fits(transport.kind())).cloned().collect();
        let missing =
            |status: &TransportStatus| Some((status.kind, status.available.as_ref().err()?.clone()));
        let mut ruled_out: Vec<_> =
            statuses.iter().filter(|status| fits(status.kind)).filter_map(missing).collect();
        if let TransportChoice::Only(kind) = choice
            && statuses.iter().all(|status| status.kind != kind)
        {
            ruled_out.push((kind, "this build does not have it".into()));
        }
        let order = statuses.iter().map(|status| status.kind).collect();
        Self { candidates, ruled_out, order, address: address.into(), options }
    }

    /// Of the transports that won't do, those that would have been preferred to `taken`.
    fn passed_over(&self, taken: TransportKind, mut ruled_out: RuledOut) -> RuledOut {
        let rank = |kind| self.order.iter().position(|known| *known == kind);
        ruled_out.retain(|(kind, _)| rank(*kind) < rank(taken));
        ruled_out.sort_by_key(|(kind, _)| rank(*kind));
        ruled_out
    }

    /// Only over what `card`, which may be a part of one, offers.
    pub(super) fn within(mut self, card: &AgentCard) -> Self {
        let offered = |transport: &Arc<dyn Transport>| card.endpoint(transport.kind()).is_some();
        let (candidates, others): (_, Vec<_>) = self.candidates.into_iter().partition(offered);
        self.candidates = candidates;
        self.ruled_out.extend(others.iter().map(|other| (other.kind(), "the card does not offer it".into())));
        self
    }

    /// Whether `card` is of whom the options want.
    pub(super) fn check(&self, card: &AgentCard) -> Result<(), ConnectError> {
        let ConnectOptions { agent, boot_epoch, fingerprint, .. } = &self.options;
        if let Some(expected) = agent.as_ref().filter(|name| **name != card.agent) {
            let (address, expected, found) = (self.address.clone(), expected.clone(), card.agent.clone());
            return Err(ConnectError::WrongAgent { address, expected, found });
        }
        if let Some(expected) = boot_epoch.filter(|epoch| *epoch != card.boot_epoch) {
            let (agent, found) = (card.agent.clone(), card.boot_epoch);
            return Err(ConnectError::PeerRestarted { agent, expected, found });
        }
        if let Some(ours) = fingerprint {
            ours.check(&card.fingerprint)?;
        }
        Ok(())
    }
}

/// What outlives the connections to a peer.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) view: Arc<View>,
    pub(super) pair: Arc<Pair>,
}

/// A path, and what goes with it.
struct Opened {
    transport: TransportKind,
    path: Arc<dyn Path>,
    follows: Option<Arc<FollowingPath>>,
    watch: Arc<PathWatch>,
}

/// What came of the transports that were tried.
struct Tried {
    passed_over: RuledOut,
    /// Whether one was fit, and lost the peer.
    lost: bool,
}

impl Tried {
    fn none(route: &Route) -> Self {
        Self { passed_over: route.ruled_out.clone(), lost: false }
    }
}

/// A dial whose peer is still opening the transport that is wanted.
struct Waiting {
    met: (Arc<Session>, Arc<View>),
    /// Of the candidates.
    index: usize,
    tried: Tried,
}

/// Takes the outcome of a dial, and where the peer's card is kept.
pub(super) type Done = Box<dyn FnOnce(Result<(Arc<PeerShared>, Arc<View>), ConnectError>) + Send>;

struct Dial {
    environment: Arc<Environment>,
    route: Route,
    /// Of a peer that was met before.
    known: Option<Known>,
    until: Instant,
    done: Mutex<Option<Done>>,
    seat: Mutex<Option<Seat>>,
    timer: OnceLock<TimerKey>,
    addresses: Mutex<VecDeque<SocketAddr>>,
    waiting: Mutex<Option<Waiting>>,
}

/// Makes a connection.
pub(super) fn dial(environment: &Arc<Environment>, route: Route, known: Option<Known>, done: Done) {
    let Some(seat) = Seat::take(&environment.counters.peers, environment.limits.peers) else {
        return done(Err(ConnectError::Closed { reason: "it has as many peers as it may" }));
    };
    Dial::start(environment, (route, known), Some(seat), done).resolve();
}

/// Makes a connection over a session that has no path.
pub(super) fn reopen(
    environment: &Arc<Environment>,
    route: &Route,
    (session, known): (Arc<Session>, Known),
    done: Done,
) {
    let dial = Dial::start(environment, (route.clone(), Some(known.clone())), None, done);
    dial.try_transport((session, known.view), 0, Tried::none(route));
}

impl Dial {
    fn start(
        environment: &Arc<Environment>,
        (route, known): (Route, Option<Known>),
        seat: Option<Seat>,
        done: Done,
    ) -> Arc<Self> {
        // A deadline past the end of the clock becomes an hour: nobody dials for longer.
        let (now, long) = (Instant::now(), Duration::from_secs(3600));
        let until = now.checked_add(route.options.deadline).unwrap_or(now + long);
        let dial = Arc::new(Self {
            environment: Arc::clone(environment),
            route,
            known,
            until,
            done: Mutex::new(Some(done)),
            seat: Mutex::new(seat),
            timer: OnceLock::new(),
            addresses: Mutex::default(),
            waiting: Mutex::default(),
        });
        let timed: Arc<dyn Timed> = Arc::<Self>::clone(&dial);
        let _ = dial.timer.set(environment.io.timers().insert(until, Arc::downgrade(&timed)));
        dial
    }

    fn resolve(self: &Arc<Self>) {
        if let Ok(literal) = self.route.address.parse() {
            self.set_addresses([literal].into());
            return;
        }
        let dial = Arc::clone(self);
        let resolver = std::thread::Builder::new().name("towline-resolve".into());
        let spawned = resolver.spawn(move || match dial.route.address.to_socket_addrs() {
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
        if self.is_done() {
            return;
        }
        let next = self.addresses.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let Some(socket) = next else { return self.fail(otherwise) };
        let state = Arc::new(PeerState::default());
        let (dial, ours) = (Arc::clone(self), Arc::clone(&state));
        let opened = Box::new(move |outcome| dial.handle_control(outcome, socket, ours));
        open_control(&self.environment, (socket, self.until), opened, state);
    }

    fn handle_control(
        self: &Arc<Self>,
        outcome: Result<Dialled, SessionError>,
        socket: SocketAddr,
        state: Arc<PeerState>,
    ) {
        let Dialled { link, card } = match outcome {
            Ok(dialled) => dialled,
            Err(SessionError::Lost(reason)) => return self.try_next_address(self.unreachable(&reason)),
            Err(error) => return self.fail(self.explain(error)),
        };
        let Some(seat) = self.seat.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let met = AgentCard::from_wire(card).map_err(ConnectError::from).and_then(|card| self.meet(card));
        match met {
            Ok((card, view)) => {
                state.introduce(&link, &view);
                let session = Arc::new(Session { card, socket, link, state, _seat: seat });
                self.try_transport((session, view), 0, Tried::none(&self.route));
            }
            Err(error) => {
                // The place is free before the caller is told.
                drop(seat);
                self.fail(error);
            }
        }
    }

    /// Checks a card that came, and puts it where the peer's card is kept.
    fn meet(&self, card: AgentCard) -> Result<(Arc<AgentCard>, Arc<View>), ConnectError> {
        self.route.check(&card)?;
        self.environment.refused.check(&card.agent, &self.route.options.contract, Instant::now())?;
        let card = Arc::new(card);
        let view = match &self.known {
            Some(Known { view, .. }) => {
                // Not newer: nothing has changed while there was no session.
                view.accept(&card).map_err(|error| ConnectError::Card { reason: error.to_string() })?;
                Arc::clone(view)
            }
            None => View::new(Arc::clone(&card)),
        };
        Ok((card, view))
    }

    fn try_transport(
        self: &Arc<Self>,
        (session, view): (Arc<Session>, Arc<View>),
        index: usize,
        mut tried: Tried,
    ) {
        if self.is_done() {
            return;
        }
        let next = self.route.candidates.get(index).filter(|_| !self.is_late());
        let Some(transport) = next.cloned() else { return self.give_up(session, tried) };
        session.state.open();
        let watch = PathWatch::new(&session.state);
        let events = Arc::<PathWatch>::clone(&watch);
        let (card, insists) = (view.newest(), self.route.options.transport != TransportChoice::Auto);
        let (socket, revision) = (session.socket, card.revision);
        let peer = PeerAddress { card, socket, until: self.until, insists, events };
        let (dial, kind, address) = (Arc::clone(self), transport.kind(), peer.clone());
        let by_key = !transport.capabilities().checked_by_owner;
        let follower = by_key.then(|| Arc::clone(&transport));
        let opened = move |path: Result<Arc<dyn Path>, PathError>| match path {
            Ok(path) => {
                let follows =
                    follower.map(|transport| FollowingPath::new(&transport, address, Arc::clone(&path)));
                let path = Opened { transport: kind, path, follows, watch };
                dial.finish((session, view), path, tried);
            }
            Err(PathError::Restarted { found }) => {
                let (agent, expected) = (session.card.agent.clone(), session.card.boot_epoch);
                // Its place is free before the caller is told.
                drop(session);
                dial.fail(ConnectError::PeerRestarted { agent, expected, found });
            }
            Err(PathError::Opening(_)) if insists => {
                dial.wait_for_news(Waiting { met: (session, view), index, tried }, revision);
            }
            Err(error) => {
                let reason = error.to_string();
                tracing::info!(peer = %session.card.agent, transport = %kind, reason, "transport passed over");
                tried.lost |= matches!(error, PathError::Down(_));
                tried.passed_over.push((kind, reason));
                dial.try_transport((session, view), index + 1, tried);
            }
        };
        transport.connect(&peer, Box::new(opened));
    }

    /// Tries again when the peer has a newer card than that of `revision`, or is lost.
    fn wait_for_news(self: &Arc<Self>, waiting: Waiting, revision: u64) {
        let state = Arc::clone(&waiting.met.0.state);
        *self.waiting() = Some(waiting);
        let dial = Arc::clone(self);
        state.await_news(revision, Box::new(move || dial.resume()));
    }

    fn resume(self: &Arc<Self>) {
        let Some(Waiting { met, index, tried }) = self.waiting().take() else { return };
        match ended(&met.0) {
            Some(_) => self.give_up(met.0, tried),
            None => self.try_transport(met, index, tried),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Option<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it without a path.
    fn give_up(&self, session: Arc<Session>, tried: Tried) {
        let (reasons, ended) = (Reasons(tried.passed_over), ended(&session));
        // Its place is free before the caller is told.
        drop(session);
        if self.is_late() {
            return self.handle_deadline();
        }
        if ended.is_none() && !tried.lost {
            return self.fail(ConnectError::NoTransport { reasons });
        }
        let control = ended.map(|why| format!("control: {why}; ")).unwrap_or_default();
        self.fail(self.unreachable(&format!("lost while its path opened: {control}{reasons}")));
    }

    fn finish(&self, met: (Arc<Session>, Arc<View>), opened: Opened, tried: Tried) {
        if ended(&met.0).is_some() {
            opened.path.close();
            return self.give_up(met.0, tried);
        }
        let contract = &self.route.options.contract;
        let violation = contract.admits(opened.transport, &opened.path.evidence()).err();
        if let Some(violation) = &violation {
            self.environment.counters.contract_violations.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %met.0.card.agent, %violation, "contract violated");
            if contract.on_violation == OnViolation::Refuse {
                opened.path.close();
                drop(met);
                return self.fail(violation.clone().into());
            }
        }
        match self.take_done() {
            Some(done) => {
                let passed_over = self.route.passed_over(opened.transport, tried.passed_over);
                self.deliver(met, (opened, Reasons(passed_over)), violation, done);
            }
            None => opened.path.close(),
        }
    }

    fn deliver(
        &self,
        (session, view): (Arc<Session>, Arc<View>),
        (opened, passed_over): (Opened, Reasons),
        violation: Option<ContractViolation>,
        done: Done,
    ) {
        let Opened { transport, path, follows, watch } = opened;
        let path = follows.as_ref().map_or(path, |follows| Arc::<FollowingPath>::clone(follows));
        let pair = match &self.known {
            Some(Known { pair, .. }) => {
                pair.handle_reconnect(violation);
                Arc::clone(pair)
            }
            None => Arc::new(Pair::new(self.route.options.contract.clone(), violation)),
        };
        let (here, there) = (&self.environment.place, place::of(&session.card));
        tracing::info!(
            peer = %session.card.agent, %transport, evidence = %path.evidence(),
            here = place::describe(here), there = place::describe(&there), relation = ?here.relation(&there),
            "connected"
        );
        let connection = Arc::new(PeerShared {
            environment: Arc::clone(&self.environment),
            transport,
            path: Arc::clone(&path),
            passed_over,
            pair,
            session,
        });
        connection.session.state.attach(&path, &watch, follows.as_ref());
        done(Ok((connection, view)));
    }

    /// Whether the deadline has passed. The timer that says so may be late: a transport that gave up at the same deadline, on
    /// another thread, is then first.
    fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    fn is_done(&self) -> bool {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn take_done(&self) -> Option<Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn fail(&self, error: ConnectError) {
        // The place is free before the caller is told.
        self.seat.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(done) = self.take_done() {
            done(Err(error));
        }
    }

    fn explain(&self, error: SessionError) -> ConnectError {
        let address = self.route.address.clone();
        match error {
            SessionError::Lost(reason) => ConnectError::Unreachable { address, reason },
            SessionError::Auth(reason) | SessionError::Protocol(reason) => {
                ConnectError::Auth { address, reason }
            }
            SessionError::Deadline => {
                ConnectError::Deadline { address, deadline: self.route.options.deadline }
            }
            SessionError::Closed(reason) => ConnectError::Closed { reason },
            // Said on data sessions only: this one asks who the agent is.
            SessionError::Restarted(_) => ConnectError::Auth { address, reason: error.to_string() },
        }
    }

    fn unreachable(&self, reason: &dyn ToString) -> ConnectError {
        ConnectError::Unreachable { address: self.route.address.clone(), reason: reason.to_string() }
    }
}

/// Why the control session ended, if it did, and not from here.
fn ended(session: &Session) -> Option<String> {
    session.state.down().and_then(|(why, side)| (side == Side::Theirs).then_some(why))
}

impl Timed for Dial {
    fn handle_deadline(&self) {
        // It refers to the session, which refers to this.
        drop(self.waiting().take());
        self.fail(self.explain(SessionError::Deadline));
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        if let Some(key) = self.timer.take() {
            self.environment.io.timers().cancel(key);
        }
        // Left by all who were to go on with it: the agent stopped.
        if let Some(done) = self.take_done() {
            done(Err(ConnectError::Closed { reason: "the agent stopped" }));
        }
    }
}
