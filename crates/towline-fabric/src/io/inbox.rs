//! What other threads have for an io thread: new sessions, sessions to drive, the end.
//!
//! **Cost.** One lock; and one `eventfd` write, but only while the thread sleeps and nobody has woken it yet.

use std::sync::{Arc, PoisonError};

use super::SessionId;
use crate::sync::{Mutex, MutexGuard};

/// Bounded: sessions by the limits on peers and sessions, pokes by one for each session whose mailbox was empty.
pub(super) struct Inbox<S> {
    queue: Mutex<Queue<S>>,
    waker: Arc<mio::Waker>,
}

struct Queue<S> {
    sessions: Vec<(SessionId, S)>,
    poked: Vec<SessionId>,
    stopped: bool,
    /// Whether the thread sleeps, or is about to, and nobody has woken it yet.
    asleep: bool,
}

/// What the thread takes at its next turn.
pub(super) struct Mail<S> {
    pub(super) sessions: Vec<(SessionId, S)>,
    pub(super) poked: Vec<SessionId>,
}

impl<S> Inbox<S> {
    /// For the thread that `waker` wakes.
    pub(super) fn new(waker: Arc<mio::Waker>) -> Self {
        let queue = Queue { sessions: Vec::new(), poked: Vec::new(), stopped: false, asleep: false };
        Self { queue: Mutex::new(queue), waker }
    }

    /// Hands a session over; after a stop it comes back.
    pub(super) fn hand_over(&self, id: SessionId, session: S) -> Result<(), S> {
        let mut queue = self.lock();
        if queue.stopped {
            return Err(session);
        }
        queue.sessions.push((id, session));
        self.wake(queue);
        Ok(())
    }

    /// Has a session driven.
    pub(super) fn poke(&self, id: SessionId) {
        let mut queue = self.lock();
        queue.poked.push(id);
        self.wake(queue);
    }

    /// Has the thread end, and later sessions come back.
    pub(super) fn stop(&self) {
        let mut queue = self.lock();
        queue.stopped = true;
        self.wake(queue);
    }

    /// For the thread: what came since the last time; `None` after a stop.
    pub(super) fn take(&self) -> Option<Mail<S>> {
        let mut queue = self.lock();
        queue.asleep = false;
        (!queue.stopped).then(|| queue.empty())
    }

    /// For the thread, at its end: later sessions come back, and this is what was not taken.
    pub(super) fn close(&self) -> Mail<S> {
        let mut queue = self.lock();
        queue.stopped = true;
        queue.empty()
    }

    /// Whether the thread has nothing to take and is not to end.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// For the thread, before it sleeps: whoever has something for it from now on wakes it. False when somebody has
    /// something already.
    pub(super) fn fall_asleep(&self) -> bool {
        let mut queue = self.lock();
        queue.asleep = queue.is_empty();
        queue.asleep
    }

    fn wake(&self, mut queue: MutexGuard<'_, Queue<S>>) {
        let asleep = std::mem::take(&mut queue.asleep);
        drop(queue);
        if asleep && let Err(error) = self.waker.wake() {
            tracing::error!(%error, "the io thread could not be woken");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<S>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S> Queue<S> {
    fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.poked.is_empty() && !self.stopped
    }

    fn empty(&mut self) -> Mail<S> {
        Mail { sessions: std::mem::take(&mut self.sessions), poked: std::mem::take(&mut self.poked) }
    }
}
