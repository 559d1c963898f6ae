//! Stands in for `src/io/mod.rs`: an io thread as the mailbox and the deadlines know it, and no sockets.

mod deadlines;
#[allow(dead_code, reason = "the fabric's file; the models call a part of it")]
#[path = "../../../src/io/inbox.rs"]
mod inbox;
mod letters;
mod mail;
#[allow(dead_code, reason = "the fabric's file; the models call a part of it")]
#[path = "../../../src/io/mailbox.rs"]
mod mailbox;
#[allow(dead_code, reason = "the fabric's file; the models call a part of it")]
#[path = "../../../src/io/timers.rs"]
mod timers;

pub(crate) use deadlines::MODELS as DEADLINES;
pub(crate) use letters::MODELS as LETTERS;
pub(crate) use mail::MODELS as MAIL;

use std::io;
use std::sync::PoisonError;
use std::time::Duration;

use loom::sync::{Mutex, MutexGuard, Notify};

/// One look: what the models are about is whether the thread that goes on to sleep is woken.
pub(crate) fn look_around(_at_most: Duration, mut look: impl FnMut() -> bool) -> bool {
    look()
}

/// Names a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionId(usize);

/// An eventfd that one epoll instance watches for edges: a write ends the sleep that is on, or the next one. Sleep may
/// also end by itself, as it does when a socket is ready.
pub(crate) struct Waker(Notify);

impl Waker {
    fn new() -> Self {
        Self(Notify::new())
    }

    /// Writes.
    pub(crate) fn wake(&self) -> io::Result<()> {
        self.0.notify();
        Ok(())
    }

    /// Sleeps, for ever if need be.
    fn sleep(&self) {
        self.0.wait();
    }
}

/// The handle to one io thread. The promise that the mailbox builds on: after a poke, the session is driven once more.
pub(crate) struct Io {
    poked: Mutex<Vec<SessionId>>,
    waker: Waker,
}

impl Io {
    fn new() -> Self {
        Self { poked: Mutex::new(Vec::new()), waker: Waker::new() }
    }

    /// Has a session driven.
    pub(crate) fn poke(&self, id: SessionId) {
        self.lock().push(id);
        let _ = self.waker.wake();
    }

    /// For the thread: sleeps until there are pokes, and takes them.
    fn poked(&self) -> Vec<SessionId> {
        loop {
            let poked = std::mem::take(&mut *self.lock());
            if !poked.is_empty() {
                return poked;
            }
            self.waker.sleep();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SessionId>> {
        self.poked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
