//! One connection to a peer: an authenticated control session, and a path for data over it.
//!
//! Both are up, or the connection is down: losing either closes the other, and every outstanding transfer fails at
//! once. A connection that is down stays down. The path alone may be closed by [`Session::rest`], for a peer that is
//! idle; another one is then opened over the same session.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use towline_wire::card::AgentCard;
use towline_wire::control::v1;
use towline_wire::receipt::{Op, Rail, TransportKind};

use super::environment::Environment;
use super::follow::FollowingPath;
use super::pair::Pair;
use super::stats::Seat;
use super::view::View;
use crate::control::{Link, LinkEvents};
use crate::error::{Reasons, SessionError, TransferError};
use crate::transport::{Path, PathError, PathEvents};

/// The control session. Dropping the last handle closes it.
pub(super) struct Session {
    /// The card that it opened with: who the peer is. What it offers now is the [`View`]'s.
    pub(super) card: Arc<AgentCard>,
    pub(super) socket: SocketAddr,
    pub(super) link: Arc<Link>,
    pub(super) state: Arc<PeerState>,
    pub(super) _seat: Seat,
}

impl Session {
    /// Forgets the path, which the caller is to close, and keeps the session. The caller knows that no transfer is
    /// under way.
    pub(super) fn rest(&self) -> Option<Arc<dyn Path>> {
        self.state.detach()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.state.go_down("the peer was dropped here", Side::Ours);
    }
}

/// A session with its path: what transfers are posted to.
pub(crate) struct PeerShared {
    /// Dropped first: the last handle to a session closes the path, which must still be there.
    pub(super) session: Arc<Session>,
    pub(super) environment: Arc<Environment>,
    pub(super) transport: TransportKind,
    pub(super) path: Arc<dyn Path>,
    pub(super) passed_over: Reasons,
    pub(super) pair: Arc<Pair>,
}

impl PeerShared {
    /// The error for a transfer whose path is gone.
    pub(super) fn lost(&self, reason: &str) -> TransferError {
        match self.session.state.down() {
            Some((_, Side::Contract)) if let Some(violation) = self.pair.violation() => {
                TransferError::ContractViolation(Box::new(violation))
            }
            Some((reason, side)) => lost(&self.session.card, (&reason, side)),
            None => lost(&self.session.card, (reason, Side::Theirs)),
        }
    }

    /// Writes a transfer that ended into the pair's book, and acts when the pair begins to break its contract.
    pub(super) fn conclude(&self, op: Op, rails: Option<&[Rail]>) {
        let now = Instant::now();
        let Some(violation) = self.pair.handle_end(now, op, rails) else { return };
        self.environment.counters.contract_violations.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(peer = %self.session.card.agent, %violation, "contract violated");
        if self.pair.refuses() {
            self.environment.refused.remember(&self.session.card.agent, &violation, now);
            self.session.state.go_down(&violation.to_string(), Side::Contract);
        }
    }
}

/// The error for a peer that is down.
pub(super) fn lost(card: &AgentCard, (reason, side): (&str, Side)) -> TransferError {
    match side {
        Side::Ours | Side::Contract => TransferError::Closed { reason: reason.into() },
        Side::Theirs => TransferError::Unreachable { agent: card.agent.clone(), reason: reason.into() },
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

/// Whether a connection is up; ties its session, its path and what is known of the card together.
#[derive(Default)]
pub(crate) struct PeerState {
    down: Mutex<Option<(String, Side)>>,
    parts: Mutex<Parts>,
}

#[derive(Default)]
struct Parts {
    link: Option<Weak<Link>>,
    path: Option<(Weak<dyn Path>, Weak<PathWatch>)>,
    /// A path is being opened, and will catch up with the card: callers see a change when it has.
    opening: bool,
    /// Set with the first card.
    view: Option<Arc<View>>,
    /// The path, if it must follow the card.
    follows: Option<Weak<FollowingPath>>,
    /// Who waits for a newer card, or the end.
    news: Option<News>,
}

/// Is called once.
type News = Box<dyn FnOnce() + Send>;

impl PeerState {
    /// Names the session, and where its card is kept.
    pub(super) fn introduce(&self, link: &Arc<Link>, view: &Arc<View>) {
        let mut parts = self.parts();
        (parts.link, parts.view) = (Some(Arc::downgrade(link)), Some(Arc::clone(view)));
    }

    /// Notes that a path is being opened.
    pub(super) fn open(&self) {
        self.parts().opening = true;
    }

    /// Calls `news` once a card newer than that of `revision` has come, or the connection has gone down.
    pub(super) fn await_news(&self, revision: u64, news: News) {
        let mut parts = self.parts();
        if self.down().is_none() && parts.view.as_ref().is_none_or(|view| view.newest().revision <= revision)
        {
            parts.news = Some(news);
            return;
        }
        drop(parts);
        news();
    }

    /// Names the path, opened for the state of the card `of`. If the connection has gone down already, it is closed now;
    /// if the card has changed since, the path catches up.
    pub(super) fn attach(
        &self,
        path: &Arc<dyn Path>,
        watch: &Arc<PathWatch>,
        follows: Option<&Arc<FollowingPath>>,
    ) {
        let mut parts = self.parts();
        parts.path = Some((Arc::downgrade(path), Arc::downgrade(watch)));
        parts.follows = follows.map(Arc::downgrade);
        parts.opening = false;
        let view = parts.view.clone();
        drop(parts);
        if self.down().is_some() {
            path.close();
        }
        match (follows, view) {
            (Some(path), Some(view)) => path.follow(view.newest(), &view),
            (None, Some(view)) => view.publish(view.newest()),
            (_, None) => {}
        }
    }

    /// Forgets the path, whose end is then no news.
    fn detach(&self) -> Option<Arc<dyn Path>> {
        let mut parts = self.parts();
        parts.follows = None;
        let (path, watch) = parts.path.take()?;
        if let Some(watch) = watch.upgrade() {
            watch.muted.store(true, Ordering::Release);
        }
        path.upgrade()
    }

    /// Why it is down, and who ended it.
    pub(super) fn down(&self) -> Option<(String, Side)> {
        self.down.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn down_reason(&self) -> Option<String> {
        self.down().map(|(reason, _)| reason)
    }

    /// Marks the connection as down, for the first reason given, and closes session and path.
    pub(crate) fn go_down(&self, reason: &str, side: Side) {
        let mut down = self.down.lock().unwrap_or_else(PoisonError::into_inner);
        if down.is_some() {
            return;
        }
        *down = Some((reason.into(), side));
        drop(down);
        let mut parts = self.parts();
        let path = parts.path.as_ref().and_then(|(path, _)| path.upgrade());
        let link = parts.link.as_ref().and_then(Weak::upgrade);
        let (view, news) = (parts.view.clone(), parts.news.take());
        drop(parts);
        if let Some(path) = path {
            path.close();
        }
        if let Some(link) = link {
            link.close();
        }
        if let Some(view) = view {
            view.handle_down(reason);
        }
        if let Some(news) = news {
            news();
        }
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LinkEvents for PeerState {
    /// The path follows first, so that a card that callers see is one that they can use.
    fn handle_card(&self, card: v1::Card) -> Result<(), SessionError> {
        let parts = self.parts();
        let (view, follows) = (parts.view.clone(), parts.follows.as_ref().and_then(Weak::upgrade));
        let opening = parts.opening;
        drop(parts);
        // The first card comes as an answer, before any news.
        let Some(view) = view else { return Err(SessionError::Protocol("news before the card".into())) };
        let card = AgentCard::from_wire(card).map_err(|error| SessionError::Protocol(error.to_string()))?;
        let card = Arc::new(card);
        if !view.accept(&card)? {
            return Ok(());
        }
        tracing::debug!(peer = %card.agent, revision = card.revision, regions = card.regions.len(), "card changed");
        let news = self.parts().news.take();
        if let Some(news) = news {
            news();
        }
        match follows {
            _ if opening => {}
            Some(path) => path.follow(card, &view),
            None => view.publish(card),
        }
        Ok(())
    }

    fn handle_ended(&self, why: &SessionError) {
        let side = if matches!(why, SessionError::Closed(_)) { Side::Ours } else { Side::Theirs };
        self.go_down(&why.to_string(), side);
    }
}

/// What one path tells: heard until the path is put to rest.
pub(super) struct PathWatch {
    pub(super) state: Arc<PeerState>,
    muted: AtomicBool,
}

impl PathWatch {
    pub(super) fn new(state: &Arc<PeerState>) -> Arc<Self> {
        Arc::new(Self { state: Arc::clone(state), muted: AtomicBool::new(false) })
    }
}

impl PathEvents for PathWatch {
    fn handle_down(&self, reason: &PathError) {
        if self.muted.load(Ordering::Acquire) {
            return;
        }
        let side = if matches!(reason, PathError::Closed(_)) { Side::Ours } else { Side::Theirs };
        self.state.go_down(&reason.to_string(), side);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use towline_wire::receipt::{Evidence, EvidenceClass};

    use super::super::view::tests::card;
    use super::*;
    use crate::transport::Slice;

    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Path for Counting {
        fn evidence(&self) -> Evidence {
            Evidence { class: EvidenceClass::None, source: String::new() }
        }

        fn rails(&self) -> Vec<String> {
            Vec::new()
        }

        fn post(&self, _slice: Slice) {}

        fn close(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn state() -> (Arc<PeerState>, Arc<View>) {
        let (state, view) = (Arc::new(PeerState::default()), View::new(card(1)));
        state.parts().view = Some(Arc::clone(&view));
        (state, view)
    }

    #[test]
    fn news_that_comes_while_the_path_opens_is_shown_once_the_path_has_caught_up() {
        let (state, view) = state();
        state.open();
        state.handle_card(card(2).to_wire()).unwrap();
        assert_eq!((view.card().revision, view.newest().revision), (1, 2));
        let path: Arc<dyn Path> = Arc::new(Counting::default());
        state.attach(&path, &PathWatch::new(&state), None);
        assert_eq!(view.card().revision, 2);
        state.handle_card(card(3).to_wire()).unwrap();
        assert_eq!(view.card().revision, 3);
    }

    #[test]
    fn a_path_put_to_rest_ends_unheard_and_one_in_use_takes_the_connection_along() {
        let (state, view) = state();
        let counting = Arc::new(Counting::default());
        let path: Arc<dyn Path> = Arc::<Counting>::clone(&counting);
        let first = PathWatch::new(&state);
        state.attach(&path, &first, None);
        assert!(state.detach().is_some() && state.detach().is_none());
        first.handle_down(&PathError::Down("at rest".into()));
        assert_eq!(state.down_reason(), None);
        let second = PathWatch::new(&state);
        state.attach(&path, &second, None);
        let mut news = view.watch(1);
        second.handle_down(&PathError::Down("cut".into()));
        assert_eq!(state.down(), Some(("cut".into(), Side::Theirs)));
        assert!(counting.0.load(Ordering::Relaxed) == 1 && news.try_take().unwrap().is_err());
        // One that comes too late is closed at once.
        state.attach(&path, &PathWatch::new(&state), None);
        assert_eq!(counting.0.load(Ordering::Relaxed), 2);
    }
}
