//! Transfers as callers see them.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use towline_wire::blocks::BlockList;
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, Receipt};

use super::handle::{Handle, Now};
use super::job::{Held, Job};
use super::plan::Plan;
use super::waiting::{Outcome, Posted, Waiting};
use crate::error::TransferError;
use crate::pending::Pending;
use crate::region::Memory;
use crate::transport::Lease;

/// What to move.
#[derive(Clone)]
pub struct TransferRequest {
    /// Read (remote to local) or write.
    pub op: Op,
    /// Memory of this side; it needs no registration.
    pub local: Arc<Memory>,
    /// Which blocks of it.
    pub local_blocks: BlockList,
    /// The peer's region.
    pub remote_region: RegionId,
    /// Which blocks of it; as many bytes as the local ones, in blocks of any size.
    pub remote_blocks: BlockList,
    /// The lease to read under, if the region is leased.
    pub lease: Lease,
    /// Time until the caller has its answer, from posting.
    pub deadline: Duration,
    /// Kept until the transport let go of the local memory: on success until the answer, after an error until the
    /// drain. The place for whatever keeps the local blocks from being reused.
    pub hold: Option<Arc<dyn Any + Send + Sync>>,
    /// Delivered to the peer's [`Owner`](crate::Owner) after the data, on success only; at most 16 KiB.
    pub notify: Option<Vec<u8>>,
}

impl std::fmt::Debug for TransferRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {} bytes, region {}", self.op, self.remote_blocks.bytes(), self.remote_region)
    }
}

/// A transfer under way. Await it, poll it or wait for it; dropping it cancels it. Whatever ends it, the local memory
/// and the request's `hold` stay until nothing can touch them any more.
#[must_use = "dropping a transfer cancels it"]
pub struct Transfer(Mutex<Stage>);

enum Stage {
    /// The peer connects first.
    Waiting(Arc<Waiting>, Pending<Outcome>),
    Posted(Posted),
    /// It ended without being posted; the error, until it is taken.
    Over(Option<TransferError>),
}

impl Stage {
    fn of(outcome: Outcome) -> Self {
        outcome.map_or_else(|error| Self::Over(Some(error)), Self::Posted)
    }
}

impl Transfer {
    pub(super) fn post(peer: &Arc<Handle>, plan: &Arc<Plan>, held: Held) -> Result<Self, TransferError> {
        let stage = match peer.now() {
            Now::Up(connection) => Stage::Posted(Posted::new(&connection, plan, held)?),
            Now::Over(error) => return Err(peer.explain(error)),
            Now::Away => {
                let (waiting, posted) = Waiting::start(peer, plan, held)?;
                Stage::Waiting(waiting, posted)
            }
        };
        Ok(Self(Mutex::new(stage)))
    }

    /// The outcome, if it is there and was not taken yet. Never blocks.
    pub fn try_result(&mut self) -> Option<Result<Receipt, TransferError>> {
        match &mut *self.stage() {
            Stage::Waiting(..) => None,
            Stage::Posted(posted) => posted.outcome.try_take(),
            Stage::Over(error) => error.take().map(Err),
        }
    }

    /// Blocks the calling thread for the outcome, at most `timeout`; `None` when there is none by then, or it was
    /// taken before. The transfer goes on.
    pub fn wait(&mut self, timeout: Duration) -> Option<Result<Receipt, TransferError>> {
        let began = Instant::now();
        let stage = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Stage::Waiting(_, posted) = stage {
            *stage = Stage::of(posted.wait(timeout)?);
        }
        match stage {
            Stage::Posted(posted) => posted.outcome.wait(timeout.saturating_sub(began.elapsed())),
            Stage::Over(error) => error.take().map(Err),
            Stage::Waiting(..) => None,
        }
    }

    /// Whether the outcome has come.
    pub fn is_done(&self) -> bool {
        match &*self.stage() {
            Stage::Waiting(..) => false,
            Stage::Posted(posted) => posted.outcome.is_done(),
            Stage::Over(_) => true,
        }
    }

    /// Whether nothing touches the local memory any more. After success it is at once, after an error when the
    /// outstanding slices have drained or the path was closed.
    pub fn is_drained(&self) -> bool {
        match &*self.stage() {
            Stage::Waiting(..) => false,
            Stage::Posted(posted) => posted.job.is_drained(),
            Stage::Over(_) => true,
        }
    }

    /// Ends it with [`TransferError::Cancelled`], unless it has ended. No further slice is started.
    pub fn cancel(&self) {
        let mut stage = self.stage();
        if let Stage::Waiting(waiting, posted) = &mut *stage {
            waiting.end(TransferError::Cancelled);
            // It may have been posted just before; then that is cancelled.
            match posted.try_take() {
                Some(outcome) => *stage = Stage::of(outcome),
                None => return,
            }
        }
        if let Stage::Posted(posted) = &*stage {
            posted.job.cancel();
        }
    }

    /// Where it is now.
    fn stage(&self) -> MutexGuard<'_, Stage> {
        let mut stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Stage::Waiting(_, posted) = &mut *stage
            && let Some(outcome) = posted.try_take()
        {
            *stage = Stage::of(outcome);
        }
        stage
    }
}

impl Future for Transfer {
    type Output = Result<Receipt, TransferError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let stage = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Stage::Waiting(_, posted) = stage {
            match Pin::new(posted).poll(context) {
                Poll::Ready(outcome) => *stage = Stage::of(outcome),
                Poll::Pending => return Poll::Pending,
            }
        }
        match stage {
            Stage::Posted(posted) => Pin::new(&mut posted.outcome).poll(context),
            Stage::Over(error) => error.take().map_or(Poll::Pending, |error| Poll::Ready(Err(error))),
            Stage::Waiting(..) => Poll::Pending,
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Transfer(done: {}, drained: {})", self.is_done(), self.is_drained())
    }
}

/// A request whose lists are checked and merged, to be posted again and again.
pub struct Prepared {
    peer: Arc<Handle>,
    plan: Arc<Plan>,
    held: Held,
    last: Mutex<Last>,
}

/// The last post of a prepared transfer.
enum Last {
    None,
    Posted(Weak<Job>),
    Waiting(Arc<Waiting>),
}

impl Last {
    fn is_active(&self) -> bool {
        match self {
            Self::None => false,
            Self::Posted(job) => job.upgrade().is_some_and(|job| !job.is_drained()),
            Self::Waiting(waiting) => waiting.is_active(),
        }
    }
}

impl Prepared {
    pub(super) fn new(peer: &Arc<Handle>, request: TransferRequest) -> Result<Self, TransferError> {
        let planned = Plan::new(request, &peer.view.card());
        let (plan, held) = planned.map_err(|error| peer.or_down(error))?;
        let plan = Arc::new(plan.cut_ahead());
        Ok(Self { peer: Arc::clone(peer), plan, held, last: Mutex::new(Last::None) })
    }

    /// Posts it.
    ///
    /// # Errors
    /// [`TransferError::Active`] until the last post has ended and drained; [`TransferError::UnknownRegion`] when the
    /// region was deregistered since; else as [`Peer::transfer`](crate::Peer).
    pub fn post(&self) -> Result<Transfer, TransferError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_active() {
            return Err(TransferError::Active);
        }
        let region = self.plan.region;
        if self.peer.view.card().region(region).is_none() {
            return Err(self.peer.or_down(TransferError::UnknownRegion { region }));
        }
        let transfer = Transfer::post(&self.peer, &self.plan, self.held.clone())?;
        *last = match &*transfer.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Stage::Posted(posted) => Last::Posted(Arc::downgrade(&posted.job)),
            Stage::Waiting(waiting, _) => Last::Waiting(Arc::clone(waiting)),
            Stage::Over(_) => Last::None,
        };
        Ok(transfer)
    }

    /// Bytes that each post moves.
    pub fn bytes(&self) -> u64 {
        self.plan.bytes
    }

    /// Pieces left after merging.
    pub fn descriptors_merged(&self) -> u64 {
        self.plan.pieces_ahead().unwrap_or_default()
    }
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Prepared({:?}, {} bytes)", self.plan.op, self.plan.bytes)
    }
}
