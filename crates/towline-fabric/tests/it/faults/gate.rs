//! Stops an agent's only copy thread between two pieces of work, for as long as the test wants.
//!
//! A transfer's waker is called by the thread that completed it. Here the waker doesn't return until the gate is opened:
//! so the thread that copied a small transfer stands still, and what was queued behind it waits. No hook in the
//! agent is needed, and where in the queue the thread stops is where that transfer was posted.

use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Instant;

use towline_fabric::Transfer;

use crate::support::PATIENCE;

/// A small transfer whose completion stops the thread that brings it. Dropped, it opens.
pub(super) struct Gate {
    stop: Arc<Stop>,
    _transfer: Transfer,
}

#[derive(Default)]
struct Stop {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    reached: bool,
    open: bool,
}

impl Wake for Stop {
    fn wake(self: Arc<Self>) {
        let mut state = self.state.lock().unwrap();
        state.reached = true;
        self.news.notify_all();
        while !state.open {
            state = self.news.wait(state).unwrap();
        }
    }
}

impl Gate {
    /// Of a transfer that another thread will copy; `None` when it has been copied already.
    pub(super) fn at(mut transfer: Transfer) -> Option<Self> {
        let stop = Arc::new(Stop::default());
        let waker = Waker::from(Arc::clone(&stop));
        let poll = Future::poll(Pin::new(&mut transfer), &mut Context::from_waker(&waker));
        poll.is_pending().then_some(Self { stop, _transfer: transfer })
    }

    /// Waits until the thread stands here.
    pub(super) fn wait_reached(&self) {
        let until = Instant::now() + PATIENCE;
        let mut state = self.stop.state.lock().unwrap();
        while !state.reached {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the copy thread never came to the gate");
            state = self.stop.news.wait_timeout(state, left).unwrap().0;
        }
    }

    /// Lets the thread go on.
    pub(super) fn open(&self) {
        self.stop.state.lock().unwrap().open = true;
        self.stop.news.notify_all();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}
