//! A worker: what moves bytes, on one thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use super::abi::{self, THREAD_MODE_SERIALIZED, WORKER_PARAM_THREAD_MODE, WorkerParams};
use super::batch::{Finished, State};
use super::context::{Context, filled};
use super::endpoint::Closing;
use super::{Ucx, UcxError, Version};

/// `UCS_ERR_BUSY`: there is something to progress.
const BUSY: i8 = -15;

/// How often a worker that ends is progressed, at most, until nothing moves and its endpoints are closed: 1,000 calls are some ms.
const LAST_CALLS: usize = 1000;

/// Before it, UCX aborts the process when a worker is destroyed that still had to answer a peer's connect (an assertion that
/// openucx/ucx#8175 took out), and nobody can know whether it had. Such a worker is left as it is: its sockets stay open until the
/// process ends, and so does its context.
const DESTROYS_SAFELY_SINCE: Version = Version { major: 1, minor: 14, release: 0 };

/// See the head of the module. Made and used on one thread: it is neither `Send` nor `Sync`. Drop what stands on it before.
#[derive(Debug)]
pub struct Worker(pub(super) Rc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) context: Arc<Context>,
    pub(super) handle: NonNull<abi::Worker>,
    /// What came to its end and wasn't told yet: never told from inside UCX.
    pub(super) finished: RefCell<VecDeque<Ended>>,
    /// Endpoints that were closed, and that UCX hasn't let go of.
    pub(super) closing: RefCell<Vec<Closing>>,
}

/// Who is to be told of an end, which one, and what must not be let go of inside UCX.
pub(super) struct Ended {
    pub(super) finished: Finished,
    pub(super) outcome: Result<(), UcxError>,
    pub(super) batch: Option<Rc<State>>,
}

impl std::fmt::Debug for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ended").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

impl Worker {
    /// Opens the devices' queues.
    ///
    /// # Errors
    /// UCX's.
    pub fn new(context: &Arc<Context>) -> Result<Self, UcxError> {
        let ucx = &context.ucx;
        let params = WorkerParams {
            field_mask: WORKER_PARAM_THREAD_MODE,
            thread_mode: THREAD_MODE_SERIALIZED,
            cpu_mask: [0; 16],
            events: 0,
            user_data: std::ptr::null_mut(),
            event_fd: -1,
            flags: 0,
            name: std::ptr::null(),
            am_alignment: 0,
            client_id: 0,
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the structure is read during the call, as far as its mask says.
        let status = unsafe {
            (ucx.table.ucp_worker_create)(context.handle.as_ptr(), &raw const params, &raw mut handle)
        };
        ucx.words.check("ucp_worker_create", status)?;
        let handle = filled(ucx, "ucp_worker_create", handle)?;
        let (finished, closing) = (RefCell::default(), RefCell::default());
        Ok(Self(Rc::new(Inner { context: Arc::clone(context), handle, finished, closing })))
    }

    /// What peers need to connect: some hundred bytes, more with each device.
    ///
    /// # Errors
    /// UCX's.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (ucx, worker) = (self.ucx(), self.0.handle.as_ptr());
        let (mut address, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: a worker of this thread's, and two variables of this call's.
        let status = unsafe { (ucx.table.ucp_worker_get_address)(worker, &raw mut address, &raw mut len) };
        ucx.words.check("ucp_worker_get_address", status)?;
        // SAFETY: UCX has filled so many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) }.to_vec();
        // SAFETY: UCX's buffer, released once.
        unsafe { (ucx.table.ucp_worker_release_address)(worker, address) };
        Ok(bytes)
    }

    /// Readable when there is something to progress, if [`Worker::arm`] agreed before.
    ///
    /// # Errors
    /// UCX's: a transport in use can't wake anybody.
    pub fn event_fd(&self) -> Result<BorrowedFd<'_>, UcxError> {
        let mut fd = -1;
        // SAFETY: a worker of this thread's, and a number of this call's.
        let status = unsafe { (self.ucx().table.ucp_worker_get_efd)(self.0.handle.as_ptr(), &raw mut fd) };
        self.ucx().words.check("ucp_worker_get_efd", status)?;
        // SAFETY: it is the worker's, and open as long as the worker is there.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Whether the thread may sleep on the event file now. If not, progress first.
    ///
    /// # Errors
    /// UCX's.
    pub fn arm(&self) -> Result<bool, UcxError> {
        if !self.0.finished.borrow().is_empty() {
            return Ok(false);
        }
        // SAFETY: a worker of this thread's.
        let status = unsafe { (self.ucx().table.ucp_worker_arm)(self.0.handle.as_ptr()) };
        if status == BUSY {
            return Ok(false);
        }
        self.ucx().words.check("ucp_worker_arm", status).map(|()| true)
    }

    /// Moves what can be moved, then tells what came to its end. Gives how much happened; 0 is nothing.
    pub fn progress(&self) -> usize {
        let moved = self.0.progress();
        let mut told = 0;
        loop {
            // The borrow ends here: who is told may ask for more.
            let ended = self.0.finished.borrow_mut().pop_front();
            let Some(Ended { finished, outcome, batch }) = ended else { break moved + told };
            drop(batch);
            finished(outcome);
            told += 1;
        }
    }

    pub(super) fn ucx(&self) -> &Ucx {
        &self.0.context.ucx
    }
}

impl Drop for Worker {
    /// What came to its end refers to the worker, until it is told.
    fn drop(&mut self) {
        while self.progress() > 0 {}
    }
}

impl Inner {
    fn progress(&self) -> usize {
        // SAFETY: a worker of this thread's.
        let moved = unsafe { (self.context.ucx.table.ucp_worker_progress)(self.handle.as_ptr()) };
        let mut closing = self.closing.borrow_mut();
        closing.retain(|endpoint| !endpoint.is_closed(&self.context.ucx));
        moved as usize
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for _ in 0..LAST_CALLS {
            if self.progress() == 0 && self.closing.get_mut().is_empty() {
                break;
            }
        }
        if self.context.ucx.version() < DESTROYS_SAFELY_SINCE {
            // Never counted down, so that the context stays.
            _ = Arc::into_raw(Arc::clone(&self.context));
            return;
        }
        // SAFETY: endpoints and batches hold the worker, so none is in use; the handlers of those that still close are kept until after.
        unsafe { (self.context.ucx.table.ucp_worker_destroy)(self.handle.as_ptr()) };
    }
}
