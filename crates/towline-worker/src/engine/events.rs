//! The way from the engine's thread to whoever waits for an answer, with async or without.
//!
//! A job has at most `max_tokens + 1` events, so the queue needs no other bound, and the engine never waits for a slow
//! reader. One lock and one wake-up an event; no runtime is assumed.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use thiserror::Error;

use super::inbox::Inbox;
use super::job::{EngineError, Event};

/// A submitted job's events. Dropping it cancels the job: the engine gives back all it holds at the next step.
pub struct JobHandle {
    id: String,
    channel: Arc<Channel>,
    inbox: Arc<Inbox>,
}

/// The engine's end of a job's events.
pub(super) struct Sink {
    channel: Arc<Channel>,
}

#[derive(Default)]
struct Channel {
    state: Mutex<State>,
    arrived: Condvar,
    cancelled: AtomicBool,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    ended: bool,
    reader: Option<Waker>,
}

/// Both ends for one job; `inbox` is rung when the reader goes away.
pub(super) fn channel(id: String, inbox: Arc<Inbox>) -> (Sink, JobHandle) {
    let channel = Arc::<Channel>::default();
    (Sink { channel: Arc::clone(&channel) }, JobHandle { id, channel, inbox })
}

impl Channel {
    fn state(&self) -> MutexGuard<'_, State> {
        // A queue and two flags are consistent whenever they can be seen.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, event: Event) {
        let mut state = self.state();
        if state.ended {
            return;
        }
        state.ended = matches!(event, Event::Finished(_) | Event::Failed(_));
        state.events.push_back(event);
        let reader = state.reader.take();
        drop(state);
        self.arrived.notify_one();
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl Sink {
    /// Passes an event on. After the last one, others are ignored.
    pub(super) fn send(&self, event: Event) {
        self.channel.send(event);
    }

    /// Whether nobody waits for the answer any more.
    pub(super) fn is_cancelled(&self) -> bool {
        self.channel.cancelled.load(Ordering::Acquire)
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        // A reader must not wait for ever on a job that was lost with the engine.
        self.channel.send(Event::Failed(EngineError::Stopped));
    }
}

impl JobHandle {
    /// The job's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The next event; `None` after the last one. Safe to drop and call again.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`JobHandle::next`], for hand-written futures and streams.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.channel.state();
        match state.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if state.ended => Poll::Ready(None),
            None => {
                state.reader = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// As [`JobHandle::next`], for callers without async.
    ///
    /// # Errors
    /// [`NoEvent`] when none came within `timeout`; ask again.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<Event>, NoEvent> {
        let empty = |state: &mut State| state.events.is_empty() && !state.ended;
        let waited = self.channel.arrived.wait_timeout_while(self.channel.state(), timeout, empty);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.events.pop_front() {
            None if !state.ended => Err(NoEvent { timeout }),
            event => Ok(event),
        }
    }
}

impl std::fmt::Debug for JobHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobHandle").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for JobHandle {
    fn drop(&mut self) {
        self.channel.cancelled.store(true, Ordering::Release);
        let events = std::mem::take(&mut self.channel.state().events);
        drop(events); // without the lock: they may hold blocks
        self.inbox.ring();
    }
}

/// No event came in time.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("no event of the engine within {timeout:?}")]
pub struct NoEvent {
    /// How long was waited.
    pub timeout: Duration,
}
