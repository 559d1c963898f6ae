//! A transfer whose peer connects first, and what is posted then.
//!
//! The time to connect counts: the caller has its answer at the request's deadline, wherever the transfer is by then. While
//! it waits nothing can touch the local memory, so that is given back together with the answer.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use towline_wire::receipt::Receipt;

use super::handle::Handle;
use super::job::{Held, Job};
use super::peer::PeerShared;
use super::plan::Plan;
use super::stats::Seat;
use crate::error::{ConnectError, TransferError};
use crate::io::{Timed, TimerKey};
use crate::pending::{Completer, Pending, pending};
use crate::telemetry::EndedTransfer;

/// A transfer that was posted; dropping it cancels it.
pub(super) struct Posted {
    pub(super) outcome: Pending<Result<Receipt, TransferError>>,
    pub(super) job: Arc<Job>,
}

impl Posted {
    pub(super) fn new(
        connection: &Arc<PeerShared>,
        plan: &Arc<Plan>,
        held: Held,
    ) -> Result<Self, TransferError> {
        let (job, outcome) = Job::post(connection, plan, held)?;
        Ok(Self { outcome, job })
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        self.job.cancel();
    }
}

/// What a wait ends with.
pub(super) type Outcome = Result<Posted, TransferError>;

/// See the head of this file.
pub(super) struct Waiting {
    peer: Arc<Handle>,
    plan: Arc<Plan>,
    started: Instant,
    outcome: Completer<Outcome>,
    state: Mutex<State>,
}

struct State {
    /// Taken by whoever ends the wait.
    held: Option<(Held, Seat)>,
    timer: Option<TimerKey>,
    /// What came of it.
    job: Weak<Job>,
}

impl Waiting {
    /// Wakes the peer.
    ///
    /// # Errors
    /// [`TransferError::Busy`].
    pub(super) fn start(
        peer: &Arc<Handle>,
        plan: &Arc<Plan>,
        held: Held,
    ) -> Result<(Arc<Self>, Pending<Outcome>), TransferError> {
        let environment = &peer.environment;
        let limit = environment.limits.transfers;
        let seat = Seat::take(&environment.counters.transfers, limit).ok_or(TransferError::Busy { limit })?;
        let (outcome, posted) =
            pending(|| Err(TransferError::Closed { reason: "the agent dropped it".into() }));
        let waiting = Arc::new(Self {
            peer: Arc::clone(peer),
            plan: Arc::clone(plan),
            started: Instant::now(),
            outcome,
            state: Mutex::new(State { held: Some((held, seat)), timer: None, job: Weak::new() }),
        });
        // A deadline past the end of the clock is none; then the connect's ends the wait.
        if let Some(when) = waiting.started.checked_add(plan.deadline) {
            let timed: Arc<dyn Timed> = Arc::<Self>::clone(&waiting);
            waiting.lock().timer = Some(environment.io.timers().insert(when, Arc::downgrade(&timed)));
        }
        let one = Arc::clone(&waiting);
        peer.wake(Box::new(move |connection| one.handle_connection(connection)));
        Ok((waiting, posted))
    }

    fn handle_connection(&self, connection: Result<Arc<PeerShared>, ConnectError>) {
        let Some((held, seat)) = self.take() else { return };
        // The job takes its own place.
        drop(seat);
        let posted = connection
            .map_err(|error| self.peer.explain(error))
            .and_then(|connection| self.post(&connection, held));
        match &posted {
            Ok(posted) => self.lock().job = Arc::downgrade(&posted.job),
            Err(error) => self.handle_failure(error),
        }
        self.outcome.complete(posted);
    }

    fn post(&self, connection: &Arc<PeerShared>, held: Held) -> Result<Posted, TransferError> {
        // A region that is gone by now is refused by the path.
        let mut plan = Arc::clone(&self.plan);
        Arc::make_mut(&mut plan).deadline = self.plan.deadline.saturating_sub(self.started.elapsed());
        Posted::new(connection, &plan, held)
    }

    /// Ends the wait with `error`; false when it had ended.
    pub(super) fn end(&self, error: TransferError) -> bool {
        let Some(held) = self.take() else { return false };
        // Given back before the caller is told.
        drop(held);
        self.handle_failure(&error);
        self.outcome.complete(Err(error));
        true
    }

    /// Whether the wait, or what was posted after it, can still touch the local memory.
    pub(super) fn is_active(&self) -> bool {
        let state = self.lock();
        state.held.is_some() || state.job.upgrade().is_some_and(|job| !job.is_drained())
    }

    fn take(&self) -> Option<(Held, Seat)> {
        let mut state = self.lock();
        if let Some(key) = state.timer.take() {
            self.peer.environment.io.timers().cancel(key);
        }
        state.held.take()
    }

    /// Counts it, and tells who keeps a record.
    fn handle_failure(&self, error: &TransferError) {
        let (environment, plan) = (&self.peer.environment, &self.plan);
        environment.counters.transfers_failed.fetch_add(1, Ordering::Relaxed);
        let Some(telemetry) = &environment.telemetry else { return };
        telemetry.handle_transfer(EndedTransfer {
            op: plan.op,
            local_agent: environment.identity.agent.clone(),
            remote_agent: self.peer.view.card().agent.clone(),
            region: plan.region,
            lease: plan.lease.map(|(lease, _)| lease),
            transport: None,
            bytes: plan.bytes,
            moved_bytes: 0,
            seconds: (plan.prepare + self.started.elapsed()).as_secs_f64(),
            outcome: Err(error.clone()),
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timed for Waiting {
    fn handle_deadline(&self) {
        let (total, deadline) = (self.plan.bytes, self.plan.deadline);
        self.end(TransferError::Stalled { moved: 0, total, deadline });
    }
}
