//! Any number of requests with one end.

use std::cell::Cell;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use super::UcxError;
use super::abi::{
    MEMORY_TYPE_HOST, OP_ATTR_CALLBACK, OP_ATTR_MEMH, OP_ATTR_MEMORY_TYPE, OP_ATTR_USER_DATA, RawStatus,
    RequestParam, StatusPtr,
};
use super::context::Mapped;
use super::endpoint::{Endpoint, RemoteKey};
use super::status::Begun;
use super::worker::Ended;

/// Is told what became of a batch, or of an endpoint, by [`Worker::progress`](super::Worker::progress).
pub type Finished = Box<dyn FnOnce(Result<(), UcxError>)>;

/// Requests of one endpoint, between one local and one remote memory if there are any. When it is dropped nothing more joins; when all
/// that joined are over, and so nothing touches the local memory any more, it ends, with the first error if there was one.
#[derive(Debug)]
pub struct Batch(pub(super) Rc<State>);

/// What requests that are in flight refer to.
pub(super) struct State {
    pub(super) endpoint: Endpoint,
    pub(super) memories: Option<(Arc<Mapped>, RemoteKey)>,
    /// Requests in flight, and one for the batch itself.
    left: Cell<usize>,
    failed: Cell<Option<(&'static str, RawStatus)>>,
    finished: Cell<Option<Finished>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("left", &self.left)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl Batch {
    /// One without memories, which can only [flush](Batch::flush).
    pub fn of(endpoint: &Endpoint, finished: Finished) -> Self {
        Self::new(endpoint, None, finished)
    }

    /// One that reads and writes.
    pub fn between(local: Arc<Mapped>, remote: RemoteKey, finished: Finished) -> Self {
        let endpoint = remote.endpoint().clone();
        Self::new(&endpoint, Some((local, remote)), finished)
    }

    fn new(endpoint: &Endpoint, memories: Option<(Arc<Mapped>, RemoteKey)>, finished: Finished) -> Self {
        Self(Rc::new(State {
            endpoint: endpoint.clone(),
            memories,
            left: Cell::new(1),
            failed: Cell::new(None),
            finished: Cell::new(Some(finished)),
        }))
    }

    /// Whether a request has failed: the others go on, and more would be in vain.
    pub fn has_failed(&self) -> bool {
        self.0.failed.get().is_some()
    }

    /// Fails it without a request.
    pub(super) fn fail(&self, call: &'static str, status: RawStatus) {
        self.0.note(call, status);
    }

    /// Has a request join that `begin` makes with the parameters it is given.
    ///
    /// # Safety
    /// `begin` calls a function of UCX's, which uses the batch's memories only, with these parameters.
    pub(super) unsafe fn join(&self, call: &'static str, begin: impl FnOnce(&RequestParam) -> StatusPtr) {
        self.0.left.set(self.0.left.get() + 1);
        let mine = Rc::into_raw(Rc::clone(&self.0));
        let (memory_attr, memh) = match &self.0.memories {
            Some((local, _)) => (OP_ATTR_MEMORY_TYPE | OP_ATTR_MEMH, local.handle()),
            None => (0, std::ptr::null_mut()),
        };
        let param = RequestParam {
            op_attr_mask: OP_ATTR_CALLBACK | OP_ATTR_USER_DATA | memory_attr,
            flags: 0,
            request: std::ptr::null_mut(),
            cb: Some(handle_end),
            datatype: 0,
            user_data: mine.cast_mut().cast(),
            reply_buffer: std::ptr::null_mut(),
            memory_type: MEMORY_TYPE_HOST,
            recv_info: std::ptr::null_mut(),
            memh,
        };
        match Begun::from_pointer(begin(&param)) {
            Begun::InFlight(_) => {}
            Begun::Done(status) => {
                // SAFETY: made above, and not given to UCX, which won't call back.
                let mine = unsafe { Rc::from_raw(mine) };
                mine.end(call, status);
            }
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        Rc::clone(&self.0).end("", 0);
    }
}

impl State {
    fn note(&self, call: &'static str, status: RawStatus) {
        if status != 0 && self.failed.get().is_none() {
            self.failed.set(Some((call, status)));
        }
    }

    fn end(self: Rc<Self>, call: &'static str, status: RawStatus) {
        self.note(call, status);
        self.left.set(self.left.get() - 1);
        if self.left.get() > 0 {
            return;
        }
        let worker = Rc::clone(self.endpoint.worker());
        let words = worker.context.ucx.words;
        let outcome = self.failed.get().map_or(Ok(()), |(call, status)| Err(words.error(call, status)));
        if let Some(finished) = self.finished.take() {
            worker.finished.borrow_mut().push_back(Ended { finished, outcome, batch: Some(self) });
        }
    }
}

/// # Safety
/// As UCX calls it for a request of [`Batch::join`].
unsafe extern "C" fn handle_end(request: *mut c_void, status: RawStatus, batch: *mut c_void) {
    // SAFETY: given away by `join`, and called once.
    let state = unsafe { Rc::from_raw(batch.cast_const().cast::<State>()) };
    // SAFETY: the request is over, and nobody else knows it.
    unsafe { (state.endpoint.ucx().table.ucp_request_free)(request) };
    state.end("request", status);
}
