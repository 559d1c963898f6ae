//! Deadlines, ordered; the reactor sleeps until the next one.
//!
//! Setting one from another thread wakes the reactor only when it is earlier than what it sleeps for: transfers with
//! equal deadlines cost no wake-ups. Ending in time takes the entry out, so the book holds what is pending and no more.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use super::SessionId;
use crate::sync::{Mutex, MutexGuard};

/// Something with a deadline that is no session.
pub(crate) trait Timed: Send + Sync {
    /// The deadline passed and was not cancelled.
    fn handle_deadline(&self);
}

/// Names a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TimerKey(Instant, u64);

/// Whom to tell.
pub(super) enum Target {
    Session(SessionId),
    Timed(Weak<dyn Timed>),
}

/// Every deadline of an agent.
pub(crate) struct Timers {
    book: Mutex<Book>,
    waker: Arc<mio::Waker>,
}

#[derive(Default)]
struct Book {
    entries: BTreeMap<TimerKey, Target>,
    last: u64,
    /// Until when the reactor sleeps, if it does: `Some(None)` is for ever.
    asleep: Option<Option<Instant>>,
}

impl Timers {
    pub(super) fn new(waker: Arc<mio::Waker>) -> Self {
        Self { book: Mutex::new(Book::default()), waker }
    }

    /// Has `target` told at `when`.
    pub(crate) fn insert(&self, when: Instant, target: Weak<dyn Timed>) -> TimerKey {
        self.insert_target(when, Target::Timed(target))
    }

    pub(super) fn insert_target(&self, when: Instant, target: Target) -> TimerKey {
        let mut book = self.lock();
        book.last += 1;
        let key = TimerKey(when, book.last);
        book.entries.insert(key, target);
        let too_late = book.asleep.is_some_and(|until| until.is_none_or(|until| when < until));
        if too_late {
            book.asleep = None;
            drop(book);
            if let Err(error) = self.waker.wake() {
                tracing::error!(%error, "the io thread could not be woken");
            }
        }
        key
    }

    /// Takes a deadline back. No matter when it has fired already.
    pub(crate) fn cancel(&self, key: TimerKey) {
        let _target = self.lock().entries.remove(&key);
    }

    /// The next target that is due at `now`.
    pub(super) fn pop_due(&self, now: Instant) -> Option<Target> {
        let mut book = self.lock();
        let first = book.entries.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    /// Notes that the reactor goes to sleep; answers until when.
    pub(super) fn sleep(&self) -> Option<Instant> {
        let mut book = self.lock();
        let next = book.entries.first_key_value().map(|(key, _)| key.0);
        book.asleep = Some(next);
        next
    }

    /// Notes that the reactor is awake.
    pub(super) fn awake(&self) {
        self.lock().asleep = None;
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn deadlines_come_in_order_and_cancelled_ones_never() {
        let poll = mio::Poll::new().unwrap();
        let timers = Timers::new(Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap()));
        let now = Instant::now();
        let after = |ms| now + Duration::from_millis(ms);
        timers.insert_target(after(20), Target::Session(SessionId(2)));
        timers.insert_target(after(10), Target::Session(SessionId(1)));
        let gone = timers.insert_target(after(5), Target::Session(SessionId(0)));
        timers.cancel(gone);
        assert_eq!(timers.sleep(), Some(after(10)));
        assert!(timers.pop_due(now).is_none());
        let due: Vec<_> = std::iter::from_fn(|| match timers.pop_due(after(30))? {
            Target::Session(id) => Some(id.0),
            Target::Timed(_) => None,
        })
        .collect();
        assert_eq!(due, [1, 2]);
    }
}
