//! The threads that wait for sockets and deadlines: `towline-io`, and `towline-io-N` that carry data streams only.
//!
//! **Cost.** An idle agent sleeps in `epoll_wait` without a timeout: no periodic wake-up. A wake-up handles whatever
//! is ready; a session that could go on for long yields after a few MiB so that others get their turn. Handing a slice
//! over from another thread costs one lock and, if the thread sleeps, one `eventfd` write (2 µs together). While answers
//! come quickly the thread looks around before it sleeps ([`Spin`]).
//!
//! A [`Session`] is a state machine over one socket, on one thread. Others talk to it through a [`Mailbox`]: they push,
//! the reactor pokes the session, the session takes. Nothing outside the thread touches a session, so none has locks
//! inside.

mod ahead;
mod channel;
mod inbox;
mod mailbox;
mod reactor;
mod socket;
mod spin;
mod timers;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

pub(crate) use channel::{Channel, Role};
pub(crate) use mailbox::{Mailbox, ReaderIndex, Refusal};
pub(crate) use reactor::Reactor;
pub(crate) use socket::Socket;
pub(crate) use spin::{Spin, look_around};
pub(crate) use timers::{Timed, TimerKey, Timers};

use crate::error::SessionError;
use inbox::Inbox;

/// Names a session; never reused in an agent's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SessionId(usize);

/// Why a session is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its socket is ready, or it has just begun, or it asked for another turn.
    Ready,
    /// Its mailbox has something.
    Poke,
    /// Its deadline has passed.
    Deadline,
}

/// What a session wants next.
pub(crate) enum Flow {
    /// To be driven when something happens. Reads and writes went on until the socket would block.
    Wait,
    /// Another turn, after the others.
    Again,
    /// To be replaced by the session that its handshake led to, on the same socket and id.
    Become(Box<dyn Session>),
    /// As `Become`, on another thread.
    Move(Box<dyn Session>, Arc<Io>),
}

/// A state machine over one socket.
pub(crate) trait Session: Send {
    /// What the reactor registers; `None` only from one that gave its socket away and then failed.
    fn source(&mut self) -> Option<&mut dyn mio::event::Source>;

    /// Does what can be done without blocking.
    ///
    /// # Errors
    /// [`SessionError`] ends the session.
    fn drive(&mut self, cause: Cause) -> Result<Flow, SessionError>;

    /// When to be driven with [`Cause::Deadline`], if nothing else happens.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// The end: close the socket, then tell whoever waits. Not called when a session becomes another.
    fn handle_closed(self: Box<Self>, why: SessionError);
}

/// The handle to the thread, shared by everything of an agent.
pub(crate) struct Io {
    inbox: Inbox<Box<dyn Session>>,
    timers: Timers,
    next: AtomicUsize,
}

impl Io {
    fn new(waker: &Arc<mio::Waker>) -> Self {
        Self {
            inbox: Inbox::new(Arc::clone(waker)),
            timers: Timers::new(Arc::clone(waker)),
            next: AtomicUsize::new(reactor::FIRST_SESSION),
        }
    }

    /// An id for a session whose mailbox is made before it.
    pub(crate) fn reserve(&self) -> SessionId {
        SessionId(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Hands a session over. After a stop it is closed at once.
    pub(crate) fn spawn(&self, session: Box<dyn Session>) {
        self.spawn_at(self.reserve(), session);
    }

    /// As [`Io::spawn`], under a reserved id.
    pub(crate) fn spawn_at(&self, id: SessionId, session: Box<dyn Session>) {
        if let Err(session) = self.inbox.hand_over(id, session) {
            session.handle_closed(SessionError::Closed("the agent stopped"));
        }
    }

    /// Has a session driven with [`Cause::Poke`].
    pub(crate) fn poke(&self, id: SessionId) {
        self.inbox.poke(id);
    }

    /// The deadlines.
    pub(crate) fn timers(&self) -> &Timers {
        &self.timers
    }

    /// Has every session closed and the thread end.
    pub(crate) fn stop(&self) {
        self.inbox.stop();
    }

    #[cfg(test)]
    pub(crate) fn take_pokes(&self) -> Vec<SessionId> {
        self.inbox.take().map(|mail| mail.poked).unwrap_or_default()
    }
}
