//! The way into the engine's thread: new jobs, and a bell for everything else that may let it go on.
//!
//! The bell stays rung until it is heard, so an idle engine can sleep without a timeout and miss nothing: no polling,
//! no CPU time while nothing happens.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::job::SubmitError;
use super::sequence::SequenceState;
use super::stats::Counters;

/// Jobs on their way in.
#[derive(Default)]
pub(super) struct Inbox {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    jobs: Vec<SequenceState>,
    rung: bool,
    closed: bool,
}

/// Whether to wait when there is nothing to hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Sequences run: go on with them.
    Look,
    /// Nothing can run: sleep until something happens.
    Sleep,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job, unless `queue_max` wait already.
    pub(super) fn submit(
        &self,
        job: SequenceState,
        queue_max: usize,
        counters: &Counters,
    ) -> Result<(), SubmitError> {
        let mut state = self.state();
        let waiting = counters.waiting();
        let refused = match (state.closed, waiting >= queue_max) {
            (true, _) => SubmitError::Stopped,
            (_, true) => SubmitError::Busy { waiting },
            _ => {
                counters.waits();
                state.jobs.push(job);
                state.rung = true;
                drop(state);
                self.bell.notify_one();
                return Ok(());
            }
        };
        // First the lock, then the job: its blocks ring the bell when they are given back.
        drop(state);
        drop(job);
        Err(refused)
    }

    /// Wakes the engine.
    pub(super) fn ring(&self) {
        self.state().rung = true;
        self.bell.notify_one();
    }

    /// Takes no more jobs and wakes the engine; it then ends. Jobs that were not heard yet are dropped.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.rung = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        self.bell.notify_one();
        drop(jobs);
    }

    /// Whether the engine has ended, or was told to.
    pub(super) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// The jobs that arrived since the last call, in order; `None` when the engine shall end.
    pub(super) fn take(&self, patience: Patience) -> Option<Vec<SequenceState>> {
        let mut state = self.state();
        while patience == Patience::Sleep && !state.rung {
            state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.rung = false;
        if state.closed { None } else { Some(std::mem::take(&mut state.jobs)) }
    }
}
