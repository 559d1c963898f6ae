//! What is known of a peer's card, and who waits for news of it.
//!
//! A card's revision grows within its boot epoch, and a view never goes back. Two states are kept: the *newest* card that
//! came, and the one *published*, which the path can serve.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towline_wire::card::AgentCard;

use crate::error::{ControlError, SessionError};
use crate::pending::{Completer, Pending, pending, ready};

/// Most that wait for news of one peer: each waits for the same.
const WATCHERS_MAX: usize = 64;

type News = Result<Arc<AgentCard>, ControlError>;

/// See the head of this file.
pub(super) struct View(Mutex<State>);

struct State {
    newest: Arc<AgentCard>,
    published: Arc<AgentCard>,
    /// Each with the revision it knows.
    watchers: Vec<(u64, Completer<News>)>,
}

impl View {
    pub(super) fn new(card: Arc<AgentCard>) -> Arc<Self> {
        let state = State { newest: Arc::clone(&card), published: card, watchers: Vec::new() };
        Arc::new(Self(Mutex::new(state)))
    }

    /// The newest card that the path can serve.
    pub(super) fn card(&self) -> Arc<AgentCard> {
        Arc::clone(&self.lock().published)
    }

    /// The newest card that came.
    pub(super) fn newest(&self) -> Arc<AgentCard> {
        Arc::clone(&self.lock().newest)
    }

    /// Takes a card that came, if it is newer than what came before.
    ///
    /// # Errors
    /// [`SessionError::Protocol`] when it is another agent's or incarnation's.
    pub(super) fn accept(&self, card: &Arc<AgentCard>) -> Result<bool, SessionError> {
        let mut state = self.lock();
        if (&card.agent, card.boot_epoch) != (&state.newest.agent, state.newest.boot_epoch) {
            return Err(SessionError::Protocol("the card of another agent, or incarnation of it".into()));
        }
        let newer = card.revision > state.newest.revision;
        if newer {
            state.newest = Arc::clone(card);
        }
        Ok(newer)
    }

    /// Shows a card to callers, and to those who wait for it.
    pub(super) fn publish(&self, card: Arc<AgentCard>) {
        let mut state = self.lock();
        if card.revision <= state.published.revision {
            return;
        }
        state.published = Arc::clone(&card);
        let (told, waiting) =
            std::mem::take(&mut state.watchers).into_iter().partition(|(known, _)| *known < card.revision);
        state.watchers = waiting;
        drop(state);
        let told: Vec<_> = told;
        for (_, watcher) in told {
            watcher.complete(Ok(Arc::clone(&card)));
        }
    }

    /// Answers once a card with a higher revision than `known` is published.
    pub(super) fn watch(&self, known: u64) -> Pending<News> {
        let mut state = self.lock();
        if state.published.revision > known {
            return ready(Ok(Arc::clone(&state.published)));
        }
        // Those who gave up make room.
        state.watchers.retain(|(_, watcher)| watcher.is_wanted());
        if state.watchers.len() >= WATCHERS_MAX {
            return ready(Err(ControlError::Full { reason: "64 wait for news of this peer already" }));
        }
        let (watcher, news) =
            pending(|| Err(ControlError::Unreachable { reason: "the peer was dropped".into() }));
        state.watchers.push((known, watcher));
        news
    }

    /// Whether anybody waits.
    pub(super) fn is_watched(&self) -> bool {
        self.lock().watchers.iter().any(|(_, watcher)| watcher.is_wanted())
    }

    /// No news will come over this connection.
    pub(super) fn handle_down(&self, reason: &str) {
        let watchers = std::mem::take(&mut self.lock().watchers);
        for (_, watcher) in watchers {
            watcher.complete(Err(ControlError::Unreachable { reason: reason.into() }));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use towline_wire::card::Fingerprint;
    use towline_wire::id::{AgentName, BootEpoch, EngineId};

    use super::*;

    /// A card that offers nothing.
    pub(in crate::agent) fn card(revision: u64) -> Arc<AgentCard> {
        Arc::new(AgentCard {
            agent: AgentName::new("p").unwrap(),
            engine: EngineId::from_bytes([1; 16]),
            boot_epoch: BootEpoch(1),
            endpoints: vec![],
            regions: vec![],
            fingerprint: Fingerprint::default(),
            fence_region: None,
            kv_region: None,
            revision,
            place: String::new(),
        })
    }

    #[test]
    fn a_view_never_goes_back_nor_to_another_agent() {
        let view = View::new(card(5));
        assert_eq!(view.accept(&card(5)), Ok(false));
        assert_eq!(view.accept(&card(7)), Ok(true));
        assert_eq!(view.accept(&card(6)), Ok(false));
        assert_eq!((view.card().revision, view.newest().revision), (5, 7), "published when it can be served");
        view.publish(card(7));
        view.publish(card(6));
        assert_eq!(view.card().revision, 7);
        let mut restarted = AgentCard::clone(&card(9));
        restarted.boot_epoch = BootEpoch(2);
        assert!(view.accept(&Arc::new(restarted)).is_err());
    }

    #[test]
    fn who_waits_is_told_once_there_is_something_newer() {
        let view = View::new(card(1));
        let (mut first, mut second) = (view.watch(1), view.watch(3));
        assert!(view.is_watched());
        view.publish(card(2));
        assert_eq!(first.try_take().map(|news| news.unwrap().revision), Some(2));
        assert!(second.try_take().is_none());
        assert_eq!(view.watch(1).try_take().map(|news| news.unwrap().revision), Some(2), "at once");
        view.handle_down("gone");
        assert!(second.try_take().unwrap().is_err());
        let waiting: Vec<_> = (0..=WATCHERS_MAX).map(|_| view.watch(2)).collect();
        assert!(waiting.last().unwrap().is_done(), "one more than may wait");
        drop(waiting);
        assert!(!view.is_watched() && !view.watch(2).is_done(), "those who gave up made room");
    }
}
