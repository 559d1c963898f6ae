//! One post of a transfer: slices, window, deadline, cancel, drain.
//!
//! **Cost.** For each slice (2 MiB) one lock taken twice, and its runs cut when its turn comes (5 µs for 512 pages,
//! unless they were cut ahead); one allocation a transfer, one timer entry, and a wake-up of the io thread only when its
//! next deadline moves forward.
//!
//! ```text
//!            pump: post slices while the window has room
//!   Active ──────────────────────────────────────────────> all complete ──> drained, outcome = receipt
//!     │ first failure, deadline, cancel, drop: outcome = error at once, no more slices
//!     v
//!   Draining ── outstanding slices complete ──> drained: memory and hold released
//!     │ grace passed
//!     v
//!   path closed ── its slices complete, as nothing can touch the memory any more ──> drained
//! ```

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use towline_wire::control::{Body, v1};
use towline_wire::frame::Status;
use towline_wire::receipt::{RECEIPT_SCHEMA, Rail, Receipt, Timings};

use super::peer::{PeerShared, Side};
use super::plan::{Plan, Slices};
use super::stats::Seat;
use crate::error::TransferError;
use crate::io::{Timed, TimerKey};
use crate::pending::{Completer, Pending, pending};
use crate::region::Memory;
use crate::telemetry::EndedTransfer;
use crate::transport::{Moved, PathError, Slice, SliceParts, SliceSink};

/// Slices of one transfer in flight: 16 MiB, more than what any path here holds between request and reply, and what
/// a cancel waits for at most.
const WINDOW: usize = 8;

/// Rails told apart in a receipt; what lies beyond is counted with the last.
const RAILS_MAX: usize = 64;

/// How long a transfer that ended may take to drain before its path is closed by force: a healthy path moves the
/// window in a few ms; one that does not in 1 s is stuck.
const GRACE: Duration = Duration::from_secs(1);

/// What is kept until the transport let go.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) local: Arc<Memory>,
    pub(crate) _hold: Option<Arc<dyn Any + Send + Sync>>,
}

/// See the head of this file.
pub(crate) struct Job {
    /// Itself, for the slices and timers that refer to it.
    me: Weak<Self>,
    peer: Arc<PeerShared>,
    plan: Arc<Plan>,
    started: Instant,
    wanted: AtomicBool,
    outcome: Completer<Result<Receipt, TransferError>>,
    state: Mutex<State>,
}

struct State {
    slices: Slices,
    outstanding: usize,
    /// Bytes on each rail of the path.
    moved: Vec<u64>,
    pumping: bool,
    ended: bool,
    drained: bool,
    held: Option<Held>,
    /// What the job waits for: its deadline, and once it has ended the grace.
    timer: Option<(Instant, TimerKey)>,
    post: Option<Duration>,
    seat: Option<Seat>,
}

impl State {
    /// Bytes in place.
    fn moved(&self) -> u64 {
        self.moved.iter().sum()
    }
}

type Outcome = Result<Receipt, TransferError>;

impl Job {
    /// Starts it; returns when the first window is posted.
    ///
    /// # Errors
    /// [`TransferError::Closed`], [`TransferError::Busy`].
    pub(super) fn post(
        peer: &Arc<PeerShared>,
        plan: &Arc<Plan>,
        held: Held,
    ) -> Result<(Arc<Self>, Pending<Outcome>), TransferError> {
        if let Some(reason) = peer.session.state.down_reason() {
            return Err(peer.lost(&reason));
        }
        let limit = peer.environment.limits.transfers;
        let seat =
            Seat::take(&peer.environment.counters.transfers, limit).ok_or(TransferError::Busy { limit })?;
        let (outcome, pending) =
            pending(|| Err(TransferError::Closed { reason: "the agent dropped it".into() }));
        let state = State {
            slices: Slices::new(plan),
            outstanding: 0,
            moved: Vec::new(),
            pumping: false,
            ended: false,
            drained: false,
            held: Some(held),
            timer: None,
            post: None,
            seat: Some(seat),
        };
        let job = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            peer: Arc::clone(peer),
            plan: Arc::clone(plan),
            started: Instant::now(),
            wanted: AtomicBool::new(true),
            outcome,
            state: Mutex::new(state),
        });
        peer.pair.handle_start(job.started);
        job.arm(&mut job.lock(), plan.deadline);
        job.pump();
        job.lock().post = Some(job.started.elapsed());
        Ok((job, pending))
    }

    /// Ends it for the caller, if it has not ended.
    pub(super) fn cancel(&self) {
        let state = self.lock();
        if !state.ended {
            self.end(state, TransferError::Cancelled);
        }
    }

    /// Whether nothing touches the local memory any more.
    pub(super) fn is_drained(&self) -> bool {
        self.lock().drained
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arm(&self, state: &mut State, after: Duration) {
        let timers = self.peer.environment.io.timers();
        if let Some((_, key)) = state.timer.take() {
            timers.cancel(key);
        }
        // A deadline past the end of the clock is none.
        let Some(when) = Instant::now().checked_add(after) else { return };
        let timed: Weak<dyn Timed> = self.me.clone();
        state.timer = Some((when, timers.insert(when, timed)));
    }

    /// Posts slices while the window has room. Whoever is in here also does the work that completions, arriving
    /// meanwhile on this or another thread, leave behind.
    fn pump(&self) {
        let mut state = self.lock();
        if state.pumping {
            return;
        }
        state.pumping = true;
        while let Some(slice) = self.next_slice(&mut state) {
            drop(state);
            self.peer.path.post(slice);
            state = self.lock();
        }
        state.pumping = false;
        if state.outstanding == 0 && !state.drained && (state.ended || state.slices.is_done()) {
            self.drain(state);
        }
    }

    fn next_slice(&self, state: &mut State) -> Option<Slice> {
        if state.ended || state.outstanding == WINDOW {
            return None;
        }
        let sink: Arc<dyn SliceSink> = self.me.upgrade()?;
        let local = Arc::clone(&state.held.as_ref()?.local);
        let runs = state.slices.take()?;
        let parts = SliceParts {
            op: self.plan.op,
            region: self.plan.region,
            lease: self.plan.lease,
            runs,
            part_of_bytes: self.plan.bytes,
            local,
        };
        state.outstanding += 1;
        Some(Slice::new(parts, sink))
    }

    /// The caller gets `error`; what is outstanding drains under the grace timer.
    fn end(&self, mut state: MutexGuard<'_, State>, error: TransferError) {
        state.ended = true;
        self.wanted.store(false, Ordering::Release);
        let moved = state.moved();
        self.peer.environment.counters.transfers_failed.fetch_add(1, Ordering::Relaxed);
        if state.outstanding == 0 && !state.pumping {
            // Released before the caller is told.
            self.release(state);
        } else {
            self.arm(&mut state, GRACE);
            drop(state);
        }
        self.peer.conclude(self.plan.op, None);
        self.complete(moved, Err(error));
    }

    /// Everything outstanding has come back.
    fn drain(&self, mut state: MutexGuard<'_, State>) {
        if state.ended {
            self.release(state);
            return;
        }
        state.ended = true;
        let moved = state.moved();
        let outcome = self.judge(&state, moved);
        self.release(state);
        let outcome = outcome.and_then(|receipt| self.notify().map(|()| receipt));
        self.peer.conclude(self.plan.op, outcome.as_ref().ok().map(|receipt| receipt.rails.as_slice()));
        let outcome = outcome.map(|mut receipt| {
            receipt.violation = self.peer.pair.violation().map(|violation| violation.to_string());
            receipt
        });
        let counters = &self.peer.environment.counters;
        let counter = if outcome.is_ok() { &counters.transfers_done } else { &counters.transfers_failed };
        counter.fetch_add(1, Ordering::Relaxed);
        self.complete(moved, outcome);
    }

    /// Tells who keeps a record, if anybody does, and then the caller.
    fn complete(&self, moved_bytes: u64, outcome: Outcome) {
        let (plan, peer) = (&self.plan, &self.peer);
        if let Some(telemetry) = &peer.environment.telemetry {
            let seconds = match &outcome {
                Ok(receipt) => receipt.seconds,
                Err(_) => (plan.prepare + self.started.elapsed()).as_secs_f64(),
            };
            telemetry.handle_transfer(EndedTransfer {
                op: plan.op,
                local_agent: peer.environment.identity.agent.clone(),
                remote_agent: peer.session.card.agent.clone(),
                region: plan.region,
                lease: plan.lease.map(|(lease, _)| lease),
                transport: Some(peer.transport),
                bytes: plan.bytes,
                moved_bytes,
                seconds,
                outcome: outcome.clone(),
            });
        }
        self.outcome.complete(outcome);
    }

    /// Lets go of the memory and of what the caller wanted held.
    fn release(&self, mut state: MutexGuard<'_, State>) {
        state.drained = true;
        let (held, seat) = (state.held.take(), state.seat.take());
        if let Some((_, key)) = state.timer.take() {
            self.peer.environment.io.timers().cancel(key);
        }
        drop(state);
        drop((held, seat));
    }

    fn notify(&self) -> Result<(), TransferError> {
        let Some(payload) = self.plan.notify.clone() else { return Ok(()) };
        let sent = self.peer.session.link.send(Body::Notify(v1::Notify { payload }));
        sent.map_err(|error| self.peer.lost(&error.to_string()))
    }

    fn judge(&self, state: &State, moved: u64) -> Outcome {
        let (plan, peer) = (&self.plan, &self.peer);
        if moved != plan.bytes {
            return Err(TransferError::Miscounted { asked: plan.bytes, counted: moved });
        }
        let rails = peer.path.rails().into_iter().zip(&state.moved);
        let wire = self.started.elapsed();
        let post = state.post.unwrap_or(wire);
        let seconds = (plan.prepare + wire).as_secs_f64();
        let evidence = peer.path.evidence_of(plan.region);
        #[expect(clippy::cast_precision_loss, reason = "a rate; 2^53 bytes are exact")]
        let rate = if seconds > 0.0 { moved as f64 / seconds / 1e9 } else { 0.0 };
        Ok(Receipt {
            schema: RECEIPT_SCHEMA,
            transport: peer.transport,
            op: plan.op,
            local_agent: peer.environment.identity.agent.to_string(),
            remote_agent: peer.session.card.agent.to_string(),
            bytes: moved,
            blocks: plan.blocks(),
            descriptors: plan.descriptors(),
            descriptors_merged: state.slices.pieces(),
            staged: false,
            rails: rails
                .filter(|(_, bytes)| **bytes > 0)
                .map(|(name, bytes)| Rail { name, bytes: *bytes })
                .collect(),
            seconds,
            gb_per_s: rate,
            timings: Timings {
                prepare_s: plan.prepare.as_secs_f64(),
                post_s: (plan.prepare + post).as_secs_f64(),
                wire_s: wire.as_secs_f64(),
                ..Timings::default()
            },
            violation: None,
            lease: plan.lease.map(|(lease, _)| lease),
            verified_by: evidence.source.clone(),
            evidence,
        })
    }

    fn translate(&self, error: PathError) -> TransferError {
        let region = self.plan.region;
        let refused = match error {
            PathError::Refused(status) => status,
            PathError::Unwanted => return TransferError::Cancelled,
            other => return self.peer.lost(&other.to_string()),
        };
        match (refused, self.plan.lease) {
            (Status::LeaseExpired, Some((lease, _))) => TransferError::Expired { lease },
            (Status::LeaseExpired | Status::LeaseRequired, _) => TransferError::LeaseRequired { region },
            (Status::OutOfRange, _) => TransferError::OutOfRange {
                detail: format!("found when region {region} was read or written"),
            },
            (Status::NotWritable, _) => {
                TransferError::NotWritable { what: format!("the peer's region {region}") }
            }
            (Status::UnknownRegion | Status::Ok, _) => TransferError::UnknownRegion { region },
        }
    }
}

impl SliceSink for Job {
    fn handle_slice(&self, outcome: Result<Moved, PathError>) {
        let mut state = self.lock();
        state.outstanding -= 1;
        match outcome {
            Ok(Moved { bytes, rail }) => {
                let rail = rail.min(RAILS_MAX - 1);
                if state.moved.len() <= rail {
                    state.moved.resize(rail + 1, 0);
                }
                state.moved[rail] += bytes;
                self.peer.environment.counters.traffic(self.peer.transport).count(self.plan.op, bytes);
            }
            Err(error) if !state.ended => {
                let error = self.translate(error);
                self.end(state, error);
                return;
            }
            Err(_) => {}
        }
        drop(state);
        self.pump();
    }

    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }
}

impl Timed for Job {
    fn handle_deadline(&self) {
        let mut state = self.lock();
        // A deadline that fired while it was being replaced by the grace must not be taken for the grace.
        if state.drained || state.timer.is_none_or(|(when, _)| when > Instant::now()) {
            return;
        }
        state.timer = None;
        if state.ended {
            drop(state);
            self.peer.environment.counters.forced_closes.fetch_add(1, Ordering::Relaxed);
            self.peer.session.state.go_down("a transfer that ended did not drain", Side::Theirs);
            return;
        }
        let error = TransferError::Stalled {
            moved: state.moved(),
            total: self.plan.bytes,
            deadline: self.plan.deadline,
        };
        self.end(state, error);
    }
}
