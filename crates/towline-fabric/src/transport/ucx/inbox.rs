//! What the transport's thread is asked to do.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::transport::{Opened, PeerAddress, Slice};

/// Names a path; never reused in a transport's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PathId(pub(super) u64);

/// One thing to do.
pub(super) enum Order {
    /// Open a path.
    Connect { peer: PeerAddress, opened: Opened },
    /// Move a slice over it.
    Post(PathId, Slice),
    /// End it: what is in flight ends as well.
    Close(PathId),
    /// Nobody will post to it any more: what is in flight goes on.
    Forget(PathId),
}

/// A queue with a file to sleep on. Bounded by its callers: an agent's transfers have 8 slices each in flight, and its connects are
/// bounded as well.
pub(super) struct Inbox {
    event: OwnedFd,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    orders: VecDeque<Order>,
    asleep: bool,
    closed: bool,
}

impl Inbox {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, state: Mutex::default() })
    }

    /// Hands an order over, or gives it back when the thread is to end.
    pub(super) fn push(&self, order: Order) -> Result<(), Order> {
        let mut state = self.lock();
        if state.closed {
            return Err(order);
        }
        state.orders.push_back(order);
        self.wake(state);
        Ok(())
    }

    /// Has the thread end, once it has done what was asked for before.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        self.wake(state);
    }

    /// The oldest order.
    pub(super) fn take(&self) -> Option<Order> {
        self.lock().orders.pop_front()
    }

    /// Whether there is something to do for the thread.
    pub(super) fn has_news(&self) -> bool {
        let state = self.lock();
        state.closed || !state.orders.is_empty()
    }

    /// Whether the thread is to end.
    pub(super) fn is_closed(&self) -> bool {
        let state = self.lock();
        state.closed && state.orders.is_empty()
    }

    /// The file to sleep on, unless there is something to do.
    pub(super) fn sleep(&self) -> Option<BorrowedFd<'_>> {
        let mut state = self.lock();
        if state.closed || !state.orders.is_empty() {
            return None;
        }
        state.asleep = true;
        Some(self.event.as_fd())
    }

    /// The thread is awake again.
    pub(super) fn awake(&self) {
        self.lock().asleep = false;
        // Nothing to read is fine: something else woke it.
        _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        if std::mem::take(&mut state.asleep) {
            drop(state);
            // A counter that is full wakes as well.
            _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
