//! Transfers as callers see them.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use towline_wire::blocks::BlockList;
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, Receipt};

use super::job::{Held, Job};
use super::peer::PeerShared;
use super::plan::Plan;
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
pub struct Transfer {
    pending: Pending<Result<Receipt, TransferError>>,
    job: Arc<Job>,
}

impl Transfer {
    pub(super) fn post(peer: &Arc<PeerShared>, plan: &Arc<Plan>, held: Held) -> Result<Self, TransferError> {
        let (job, pending) = Job::post(peer, plan, held)?;
        Ok(Self { pending, job })
    }

    /// The outcome, if it is there and was not taken yet. Never blocks.
    pub fn try_result(&mut self) -> Option<Result<Receipt, TransferError>> {
        self.pending.try_take()
    }

    /// Blocks the calling thread for the outcome, at most `timeout`; `None` when there is none by then, or it was
    /// taken before. The transfer goes on.
    pub fn wait(&mut self, timeout: Duration) -> Option<Result<Receipt, TransferError>> {
        self.pending.wait(timeout)
    }

    /// Whether the outcome has come.
    pub fn is_done(&self) -> bool {
        self.pending.is_done()
    }

    /// Whether nothing touches the local memory any more. After success it is at once, after an error when the
    /// outstanding slices have drained or the path was closed.
    pub fn is_drained(&self) -> bool {
        self.job.is_drained()
    }

    /// Ends it with [`TransferError::Cancelled`], unless it has ended. No further slice is started.
    pub fn cancel(&self) {
        self.job.cancel();
    }
}

impl Future for Transfer {
    type Output = Result<Receipt, TransferError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.pending).poll(context)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.job.cancel();
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Transfer(done: {}, drained: {})", self.is_done(), self.is_drained())
    }
}

/// A request whose lists are checked and merged, to be posted again and again.
pub struct Prepared {
    peer: Arc<PeerShared>,
    plan: Arc<Plan>,
    held: Held,
    last: Mutex<Weak<Job>>,
}

impl Prepared {
    pub(super) fn new(peer: &Arc<PeerShared>, request: TransferRequest) -> Result<Self, TransferError> {
        let (plan, held) = Plan::new(request, &peer.card)?;
        let plan = Arc::new(plan.cut_ahead());
        Ok(Self { peer: Arc::clone(peer), plan, held, last: Mutex::new(Weak::new()) })
    }

    /// Posts it.
    ///
    /// # Errors
    /// [`TransferError::Active`] until the last post has ended and drained; else as [`Peer::transfer`](crate::Peer).
    pub fn post(&self) -> Result<Transfer, TransferError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.upgrade().is_some_and(|job| !job.is_drained()) {
            return Err(TransferError::Active);
        }
        let transfer = Transfer::post(&self.peer, &self.plan, self.held.clone())?;
        *last = Arc::downgrade(&transfer.job);
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
