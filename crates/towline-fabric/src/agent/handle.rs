//! What a [`Peer`](super::Peer) stands on: a connection that comes when it is needed, and goes when nobody uses it.
//!
//! ```text
//!   Resting ── wake: dial ───────────> Dialling ──> Up ── path idle ──> Linked ── session idle ──> Resting
//!   Linked  ── wake: another path ──────^
//!   any ── closed here; the peer was restarted, or breaks the contract ──> Over
//! ```
//! A connection that is *lost* stays `Up` and down: whoever has the peer learns that it was lost, and connects again.
//! Only what was put to rest here wakes by itself, and only to the incarnation that was known before.
//!
//! **Cost.** A transfer of a connected peer takes one lock more than the connection itself. A peer at rest is this
//! struct and its card; one timer a peer, touched when it connects and when it fires, not by transfers.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use towline_wire::card::AgentCard;
use towline_wire::control::{Body, HEARTBEAT_LEASES_MAX, v1};
use towline_wire::receipt::{Evidence, EvidenceClass, TransportKind};

use super::connect::{self, Known, Route};
use super::connection::{PeerShared, Session, Side, lost};
use super::environment::Environment;
use super::lease::{HeldLeases, PERIOD_MIN};
use super::pair::Pair;
use super::view::View;
use crate::control::Link;
use crate::error::{ConnectError, ControlError, Reasons, TransferError};
use crate::io::{Timed, TimerKey};

/// What may wait for one peer to connect: as many as an agent has transfers, by default.
const WAITERS_MAX: usize = 4096;

/// Why a peer that was closed here is down.
const CLOSED: &str = "closed here";

/// Called once with the connection, or why there is none.
pub(super) type Waiter = Box<dyn FnOnce(Result<Arc<PeerShared>, ConnectError>) + Send>;

/// See the head of this file.
pub(super) struct Handle {
    me: Weak<Self>,
    pub(super) environment: Arc<Environment>,
    route: Route,
    pub(super) view: Arc<View>,
    pub(super) pair: Arc<Pair>,
    pub(super) leases: HeldLeases,
    state: Mutex<State>,
}

struct State {
    standing: Standing,
    /// When it was last put to use.
    used: Instant,
    timer: Option<TimerKey>,
    /// How it was reached last.
    reached: Option<Reached>,
}

enum Standing {
    Resting,
    Dialling(Vec<Waiter>),
    Up(Arc<PeerShared>),
    Linked(Arc<Session>),
    Over(ConnectError),
}

/// How a peer is reached.
#[derive(Clone, Debug)]
pub(super) struct Reached {
    pub(super) transport: TransportKind,
    pub(super) evidence: Evidence,
    pub(super) passed_over: Reasons,
}

/// Where a peer stands for who wants to use it.
pub(super) enum Now {
    Up(Arc<PeerShared>),
    /// It connects when woken.
    Away,
    Over(ConnectError),
}

impl Handle {
    /// A peer that is known by its card, and at rest.
    pub(super) fn new(environment: &Arc<Environment>, mut route: Route, card: Arc<AgentCard>) -> Arc<Self> {
        (route.options.agent, route.options.boot_epoch) = (Some(card.agent.clone()), Some(card.boot_epoch));
        let pair = Arc::new(Pair::new(route.options.contract.clone(), None));
        Self::with(environment, route, Known { view: View::new(card), pair })
    }

    /// A peer that was just connected to.
    pub(super) fn of(connection: Arc<PeerShared>, mut route: Route, view: Arc<View>) -> Arc<Self> {
        let card = &connection.session.card;
        (route.options.agent, route.options.boot_epoch) = (Some(card.agent.clone()), Some(card.boot_epoch));
        let known = Known { view, pair: Arc::clone(&connection.pair) };
        let handle = Self::with(&connection.environment, route, known);
        handle.stand_up(&mut handle.lock(), connection);
        handle
    }

    fn with(environment: &Arc<Environment>, route: Route, known: Known) -> Arc<Self> {
        let Known { view, pair } = known;
        let state = State { standing: Standing::Resting, used: Instant::now(), timer: None, reached: None };
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            environment: Arc::clone(environment),
            route,
            view,
            pair,
            leases: HeldLeases::default(),
            state: Mutex::new(state),
        })
    }

    /// Where it stands. Asking counts as use.
    pub(super) fn now(&self) -> Now {
        let mut state = self.lock();
        state.used = Instant::now();
        match &state.standing {
            Standing::Up(connection) => Now::Up(Arc::clone(connection)),
            Standing::Linked(session) if let Some(down) = session.state.down() => {
                Now::Over(self.down_error(down))
            }
            Standing::Over(error) => Now::Over(error.clone()),
            Standing::Linked(_) | Standing::Resting | Standing::Dialling(_) => Now::Away,
        }
    }

    /// Has `waiter` called with the connection, which is made if there is none.
    pub(super) fn wake(&self, waiter: Waiter) {
        let mut state = self.lock();
        state.used = Instant::now();
        let session = match &mut state.standing {
            Standing::Dialling(waiters) if waiters.len() < WAITERS_MAX => return waiters.push(waiter),
            Standing::Dialling(_) => {
                drop(state);
                return waiter(Err(ConnectError::Closed { reason: "4096 wait for this peer to connect" }));
            }
            Standing::Up(connection) => {
                let connection = Arc::clone(connection);
                drop(state);
                return match connection.session.state.down() {
                    Some(down) => waiter(Err(self.down_error(down))),
                    None => waiter(Ok(connection)),
                };
            }
            Standing::Over(error) => {
                let error = error.clone();
                drop(state);
                return waiter(Err(error));
            }
            Standing::Linked(session) => match session.state.down() {
                Some(down) => {
                    drop(state);
                    return waiter(Err(self.down_error(down)));
                }
                None => Some(Arc::clone(session)),
            },
            Standing::Resting => None,
        };
        state.standing = Standing::Dialling(vec![waiter]);
        drop(state);
        let me = Weak::clone(&self.me);
        let done = move |outcome: Result<(Arc<PeerShared>, Arc<View>), ConnectError>| {
            if let Some(handle) = me.upgrade() {
                handle.settle(outcome.map(|(connection, _)| connection));
            }
        };
        let known = Known { view: Arc::clone(&self.view), pair: Arc::clone(&self.pair) };
        match session {
            Some(session) => {
                connect::reopen(&self.environment, &self.route, (session, known), Box::new(done))
            }
            None => connect::dial(&self.environment, self.route.clone(), Some(known), Box::new(done)),
        }
    }

    /// The end of a dial. One that was closed meanwhile drops what came.
    fn settle(&self, outcome: Result<Arc<PeerShared>, ConnectError>) {
        let mut state = self.lock();
        let Standing::Dialling(waiters) = &mut state.standing else { return };
        let waiters = std::mem::take(waiters);
        match &outcome {
            Ok(connection) => self.stand_up(&mut state, Arc::clone(connection)),
            Err(error) if is_final(error) => state.standing = Standing::Over(error.clone()),
            Err(_) => state.standing = Standing::Resting,
        }
        drop(state);
        if let Err(error) = &outcome {
            self.view.handle_down(&error.to_string());
        }
        for waiter in waiters {
            waiter(outcome.clone());
        }
    }

    fn stand_up(&self, state: &mut State, connection: Arc<PeerShared>) {
        state.reached = Some(Reached {
            transport: connection.transport,
            evidence: connection.path.evidence(),
            passed_over: connection.passed_over.clone(),
        });
        state.standing = Standing::Up(connection);
        state.used = Instant::now();
        self.arm(state, self.environment.limits.path_idle);
    }

    fn arm(&self, state: &mut State, idle: Duration) {
        let timers = self.environment.io.timers();
        if let Some(key) = state.timer.take() {
            timers.cancel(key);
        }
        // A time past the end of the clock never comes.
        let Some(when) = state.used.checked_add(idle.max(PERIOD_MIN)) else { return };
        let timed: Weak<dyn Timed> = self.me.clone();
        state.timer = Some(timers.insert(when, timed));
    }

    /// The control session, if there is one.
    fn link(&self) -> Option<Arc<Link>> {
        let mut state = self.lock();
        state.used = Instant::now();
        match &state.standing {
            Standing::Up(connection) => Some(Arc::clone(&connection.session.link)),
            Standing::Linked(session) => Some(Arc::clone(&session.link)),
            Standing::Resting | Standing::Dialling(_) | Standing::Over(_) => None,
        }
    }

    /// Does something with the control session, which is made if there is none.
    pub(super) fn with_link(&self, action: impl FnOnce(Result<&Link, ControlError>) + Send + 'static) {
        if let Some(link) = self.link() {
            return action(Ok(&link));
        }
        self.wake(Box::new(move |outcome| match outcome {
            Ok(connection) => action(Ok(&connection.session.link)),
            Err(error) => action(Err(ControlError::Unreachable { reason: error.to_string() })),
        }));
    }

    /// Sends a message that has no answer; over a session to come if there is none now.
    pub(super) fn send(&self, body: Body) -> Result<(), ControlError> {
        if let Some(link) = self.link() {
            return link.send(body);
        }
        if let Some((reason, _)) = self.down() {
            return Err(ControlError::Unreachable { reason });
        }
        self.with_link(move |link| {
            // Nobody waits for an answer; a peer that can't be reached shows elsewhere.
            let _ = link.and_then(|link| link.send(body));
        });
        Ok(())
    }

    /// Tells the owner about the leases held. False when there is nothing more to tell.
    pub(super) fn beat(&self) -> bool {
        let leases = self.leases.all();
        if leases.is_empty() || self.down().is_some() {
            return false;
        }
        for leases in leases.chunks(HEARTBEAT_LEASES_MAX) {
            let leases = leases.iter().map(|lease| lease.0).collect();
            if self.send(Body::Heartbeat(v1::Heartbeat { leases })).is_ok() {
                self.environment.counters.heartbeats.fetch_add(1, Ordering::Relaxed);
            }
        }
        true
    }

    /// Ends it for good.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        if matches!(state.standing, Standing::Over(_)) {
            return;
        }
        let over = Standing::Over(ConnectError::Closed { reason: CLOSED });
        match std::mem::replace(&mut state.standing, over) {
            // It stays, with the first reason why it is down.
            Standing::Up(connection) => {
                state.standing = Standing::Up(Arc::clone(&connection));
                drop(state);
                connection.session.state.go_down(CLOSED, Side::Ours);
            }
            Standing::Linked(session) => {
                drop(state);
                session.state.go_down(CLOSED, Side::Ours);
            }
            Standing::Dialling(waiters) => {
                drop(state);
                for waiter in waiters {
                    waiter(Err(ConnectError::Closed { reason: CLOSED }));
                }
            }
            Standing::Resting | Standing::Over(_) => drop(state),
        }
        self.view.handle_down(CLOSED);
    }

    /// Why it cannot be used any more, if that is so.
    pub(super) fn down(&self) -> Option<(String, Side)> {
        match &self.lock().standing {
            Standing::Up(connection) => connection.session.state.down(),
            Standing::Linked(session) => session.state.down(),
            Standing::Over(ConnectError::Closed { reason }) => Some(((*reason).into(), Side::Ours)),
            Standing::Over(error) => Some((error.to_string(), Side::Ours)),
            Standing::Resting | Standing::Dialling(_) => None,
        }
    }

    /// How it is reached, or was when it was last; before that, how it would be tried first.
    pub(super) fn reached(&self) -> Reached {
        let state = self.lock();
        if let Some(reached) = &state.reached {
            return reached.clone();
        }
        let evidence = Evidence { class: EvidenceClass::None, source: "not connected yet".into() };
        let passed_over = Reasons(self.route.ruled_out.clone());
        let first = self.route.candidates.first().map(|transport| transport.kind());
        Reached { transport: first.unwrap_or(TransportKind::Tcp), evidence, passed_over }
    }

    /// The evidence of the path as it is now.
    pub(super) fn evidence(&self) -> Evidence {
        if let Standing::Up(connection) = &self.lock().standing {
            return connection.path.evidence();
        }
        self.reached().evidence
    }

    /// The error for a transfer when there is no connection.
    pub(super) fn explain(&self, error: ConnectError) -> TransferError {
        let card = self.view.card();
        match error {
            ConnectError::PeerRestarted { agent, .. } => TransferError::PeerRestarted { agent },
            ConnectError::ContractViolation(violation) => TransferError::ContractViolation(violation),
            ConnectError::Closed { reason } => lost(&card, (reason, Side::Ours)),
            ConnectError::Unreachable { reason, .. } => lost(&card, (&reason, Side::Theirs)),
            other => lost(&card, (&other.to_string(), Side::Theirs)),
        }
    }

    /// The error for a connection that is down: it stays so.
    fn down_error(&self, (reason, side): (String, Side)) -> ConnectError {
        match (side, self.pair.violation()) {
            (Side::Theirs, _) => ConnectError::Unreachable { address: self.route.address.clone(), reason },
            (Side::Contract, Some(violation)) => violation.into(),
            (Side::Ours | Side::Contract, _) => ConnectError::Closed { reason: CLOSED },
        }
    }

    /// `error` of a request, unless the peer is down: then that is what matters.
    pub(super) fn or_down(&self, error: TransferError) -> TransferError {
        match self.now() {
            Now::Over(over) => self.explain(over),
            Now::Up(connection) if connection.session.state.down().is_some() => connection.lost(""),
            Now::Up(_) | Now::Away => error,
        }
    }

    fn is_busy(&self) -> bool {
        self.pair.is_busy() || !self.leases.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether another attempt must end alike.
fn is_final(error: &ConnectError) -> bool {
    matches!(
        error,
        ConnectError::PeerRestarted { .. }
            | ConnectError::WrongAgent { .. }
            | ConnectError::Incompatible(_)
            | ConnectError::ContractViolation(_)
    )
}

impl Timed for Handle {
    /// Puts to rest what was not used for long enough.
    fn handle_deadline(&self) {
        let mut state = self.lock();
        let (limits, now) = (&self.environment.limits, Instant::now());
        let (idle, busy) = match &state.standing {
            Standing::Up(connection) if connection.session.state.down().is_none() => {
                (limits.path_idle, self.is_busy())
            }
            Standing::Linked(_) => (limits.session_idle, self.is_busy() || self.view.is_watched()),
            _ => return,
        };
        if busy {
            state.used = now;
        }
        if state.used.checked_add(idle.max(PERIOD_MIN)).is_none_or(|until| now < until) {
            return self.arm(&mut state, idle);
        }
        match std::mem::replace(&mut state.standing, Standing::Resting) {
            Standing::Up(connection) => {
                state.standing = Standing::Linked(Arc::clone(&connection.session));
                state.used = now;
                self.arm(&mut state, limits.session_idle);
                // Forgotten under the lock, so that who wakes the peer now finds no path; closed after it.
                let path = connection.session.rest();
                drop(state);
                self.environment.counters.paths_rested.fetch_add(1, Ordering::Relaxed);
                if let Some(path) = path {
                    path.close();
                }
            }
            Standing::Linked(session) => {
                drop(state);
                self.environment.counters.sessions_rested.fetch_add(1, Ordering::Relaxed);
                drop(session);
            }
            other => state.standing = other,
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(key) = self.lock().timer.take() {
            self.environment.io.timers().cancel(key);
        }
    }
}
