//! An endpoint: one peer, seen from one worker.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};

use super::abi::{
    EP_CLOSE_FLAG_FORCE, EP_PARAM_ERR_HANDLER, EP_PARAM_ERR_HANDLING_MODE, EP_PARAM_REMOTE_ADDRESS,
    ERR_HANDLING_MODE_NONE, ERR_HANDLING_MODE_PEER, Ep, EpParams, ErrHandler, OP_ATTR_FLAGS, RawStatus,
    RequestParam, Rkey, SockAddr, StatusPtr,
};
use super::api::Table;
use super::batch::{Batch, Finished};
use super::context::{INVALID_PARAM, Mapped, filled};
use super::status::{Begun, is_in_progress};
use super::worker::{Ended, Inner, Worker};
use super::{Ucx, UcxError};

/// `UCS_ERR_CANCELED`, for what is asked of an endpoint that was closed.
const CANCELED: i8 = -16;

/// What happens when the peer dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorHandling {
    /// Requests fail, and the endpoint says so. Leaves out transports that can't tell: sysv, posix.
    Peer,
    /// Nothing: requests may hang. Somebody else must watch the peer, and close the endpoint.
    None,
}

/// A peer. Closed when the last that refers to it is gone.
#[derive(Clone, Debug)]
pub struct Endpoint(pub(super) Rc<Open>);

#[derive(Debug)]
pub(super) struct Open {
    worker: Rc<Inner>,
    handle: NonNull<Ep>,
    /// What the library's handler refers to, kept until it has let go; nothing once it was closed.
    health: RefCell<Option<Box<Health>>>,
    closed: Cell<bool>,
}

/// Whom to tell that the peer died.
struct Health {
    worker: Weak<Inner>,
    failed: Cell<Option<Finished>>,
}

impl std::fmt::Debug for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Health").finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Begins to connect to the worker that has this address; what is asked for meanwhile waits. `failed` is told once, when the peer
    /// can't be reached or is lost; it isn't told of a close.
    ///
    /// # Errors
    /// UCX's: no transport that the settings leave reaches such an address.
    pub fn connect(
        worker: &Worker,
        address: &[u8],
        errors: ErrorHandling,
        failed: Finished,
    ) -> Result<Self, UcxError> {
        let ucx = worker.ucx();
        let health = Box::new(Health { worker: Rc::downgrade(&worker.0), failed: Cell::new(Some(failed)) });
        // An address is a list that says its own end: UCX would read on where it was cut.
        let address = [address, &[0; 16]].concat();
        let none = || SockAddr { addr: std::ptr::null(), addrlen: 0 };
        let params = EpParams {
            field_mask: EP_PARAM_REMOTE_ADDRESS | EP_PARAM_ERR_HANDLING_MODE | EP_PARAM_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: match errors {
                ErrorHandling::Peer => ERR_HANDLING_MODE_PEER,
                ErrorHandling::None => ERR_HANDLING_MODE_NONE,
            },
            err_handler: ErrHandler {
                cb: Some(handle_failure),
                arg: std::ptr::from_ref(&*health).cast_mut().cast(),
            },
            user_data: std::ptr::null_mut(),
            flags: 0,
            sockaddr: none(),
            conn_request: std::ptr::null_mut(),
            name: std::ptr::null(),
            local_sockaddr: none(),
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: a worker of this thread's; the structure and the address are read during the call; the handler's argument stays
        // until the endpoint is closed.
        let status = unsafe {
            (ucx.table.ucp_ep_create)(worker.0.handle.as_ptr(), &raw const params, &raw mut handle)
        };
        ucx.words.check("ucp_ep_create", status)?;
        let handle = filled(ucx, "ucp_ep_create", handle)?;
        Ok(Self(Rc::new(Open {
            worker: Rc::clone(&worker.0),
            handle,
            health: RefCell::new(Some(health)),
            closed: Cell::new(false),
        })))
    }

    /// Takes a peer's key for one of its memories.
    ///
    /// # Errors
    /// UCX's: no transport of this endpoint can use it.
    pub fn unpack(&self, key: &[u8]) -> Result<RemoteKey, UcxError> {
        let ucx = self.ucx();
        let endpoint = self.0.handle().ok_or_else(|| ucx.words.error("ucp_ep_rkey_unpack", CANCELED))?;
        let key = [key, &[0; 16]].concat();
        let mut handle = std::ptr::null_mut();
        // SAFETY: an endpoint of this thread's; the key is read during the call.
        let status =
            unsafe { (ucx.table.ucp_ep_rkey_unpack)(endpoint, key.as_ptr().cast(), &raw mut handle) };
        ucx.words.check("ucp_ep_rkey_unpack", status)?;
        let handle = filled(ucx, "ucp_ep_rkey_unpack", handle)?;
        Ok(RemoteKey(Rc::new(Unpacked { endpoint: self.clone(), handle })))
    }

    /// Closes it by force: what is in flight ends as cancelled when nothing touches its memory any more, what is asked for later fails.
    /// The peer isn't told.
    pub fn close(&self) {
        self.0.close();
    }

    pub(super) fn worker(&self) -> &Rc<Inner> {
        &self.0.worker
    }

    pub(super) fn ucx(&self) -> &Ucx {
        &self.0.worker.context.ucx
    }
}

impl Open {
    /// The library's, unless it was closed.
    pub(super) fn handle(&self) -> Option<*mut Ep> {
        (!self.closed.get()).then_some(self.handle.as_ptr())
    }

    fn close(&self) {
        if self.closed.replace(true) {
            return;
        }
        let (ucx, param) = (&self.worker.context.ucx, close_by_force());
        // SAFETY: an endpoint of this thread's, closed once, and never used again, as `handle` sees to.
        let begun = unsafe { (ucx.table.ucp_ep_close_nbx)(self.handle.as_ptr(), &raw const param) };
        if let (Begun::InFlight(request), Some(health)) =
            (Begun::from_pointer(begun), self.health.borrow_mut().take())
        {
            self.worker.closing.borrow_mut().push(Closing { request, _health: health });
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.close();
    }
}

fn close_by_force() -> RequestParam {
    RequestParam {
        op_attr_mask: OP_ATTR_FLAGS,
        flags: EP_CLOSE_FLAG_FORCE,
        request: std::ptr::null_mut(),
        cb: None,
        datatype: 0,
        user_data: std::ptr::null_mut(),
        reply_buffer: std::ptr::null_mut(),
        memory_type: 0,
        recv_info: std::ptr::null_mut(),
        memh: std::ptr::null_mut(),
    }
}

/// An endpoint that was closed and isn't gone.
#[derive(Debug)]
pub(super) struct Closing {
    request: StatusPtr,
    _health: Box<Health>,
}

impl Closing {
    /// Whether it is gone now; then its request is freed, and it must not be asked again.
    pub(super) fn is_closed(&self, ucx: &Ucx) -> bool {
        // SAFETY: a request of this thread's that wasn't freed.
        if is_in_progress(unsafe { (ucx.table.ucp_request_check_status)(self.request) }) {
            return false;
        }
        // SAFETY: as above; it is over.
        unsafe { (ucx.table.ucp_request_free)(self.request) };
        true
    }
}

/// # Safety
/// As UCX calls it for an endpoint of [`Endpoint::connect`].
unsafe extern "C" fn handle_failure(health: *mut c_void, _: *mut Ep, status: RawStatus) {
    // SAFETY: kept until UCX has closed the endpoint, and after that it doesn't call.
    let health = unsafe { &*health.cast_const().cast::<Health>() };
    if let (Some(worker), Some(failed)) = (health.worker.upgrade(), health.failed.take()) {
        let error = worker.context.ucx.words.error("endpoint", status);
        worker.finished.borrow_mut().push_back(Ended { finished: failed, outcome: Err(error), batch: None });
    }
}

/// A key to a peer's memory, for one endpoint.
#[derive(Clone, Debug)]
pub struct RemoteKey(Rc<Unpacked>);

impl RemoteKey {
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }
}

#[derive(Debug)]
struct Unpacked {
    endpoint: Endpoint,
    handle: NonNull<Rkey>,
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        // SAFETY: unpacked once, destroyed once, before its endpoint; requests that use it hold it.
        unsafe { (self.endpoint.ucx().table.ucp_rkey_destroy)(self.handle.as_ptr()) };
    }
}

/// What one request moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where, in the local memory.
    pub local_offset: usize,
    /// Where, in the address space of the peer.
    pub remote_address: u64,
    /// Bytes.
    pub len: usize,
}

impl Batch {
    /// Reads a piece. Bytes are in place when the batch has ended.
    pub fn get(&self, piece: Piece) {
        const CALL: &str = "ucp_get_nbx";
        let Some((ep, key, to)) = self.ends(CALL, piece, |local| local.memory().is_writable()) else {
            return;
        };
        let begin = |param: &RequestParam| {
            // SAFETY: the range is inside the batch's local memory, which may be written; endpoint and key are the batch's.
            unsafe { (self.table().ucp_get_nbx)(ep, to.cast(), piece.len, piece.remote_address, key, param) }
        };
        // SAFETY: as above.
        unsafe { self.join(CALL, begin) };
    }

    /// Writes a piece. The local bytes aren't used any more when the batch has ended; they are in place at the peer when a batch has
    /// ended in which [`Batch::flush`] came after.
    pub fn put(&self, piece: Piece) {
        const CALL: &str = "ucp_put_nbx";
        let Some((ep, key, from)) = self.ends(CALL, piece, |_| true) else { return };
        let begin = |param: &RequestParam| {
            // SAFETY: the range is inside the batch's local memory; endpoint and key are the batch's.
            unsafe {
                (self.table().ucp_put_nbx)(ep, from.cast(), piece.len, piece.remote_address, key, param)
            }
        };
        // SAFETY: as above.
        unsafe { self.join(CALL, begin) };
    }

    /// Ends when all that was asked of the endpoint before is done at the peer, and the peer has answered.
    pub fn flush(&self) {
        const CALL: &str = "ucp_ep_flush_nbx";
        let Some(ep) = self.0.endpoint.0.handle() else { return self.fail(CALL, CANCELED) };
        let begin = |param: &RequestParam| {
            // SAFETY: an endpoint of this thread's.
            unsafe { (self.table().ucp_ep_flush_nbx)(ep, param) }
        };
        // SAFETY: it uses no memory.
        unsafe { self.join(CALL, begin) };
    }

    /// What a request of a piece needs; without it the batch fails.
    fn ends(
        &self,
        call: &'static str,
        piece: Piece,
        fits: impl FnOnce(&Mapped) -> bool,
    ) -> Option<(*mut Ep, *mut Rkey, *mut u8)> {
        let Some(ep) = self.0.endpoint.0.handle() else {
            self.fail(call, CANCELED);
            return None;
        };
        let memories = self.0.memories.as_ref().filter(|(local, _)| fits(local));
        let ends = memories.and_then(|(local, remote)| {
            Some((ep, remote.0.handle.as_ptr(), local.at(piece.local_offset, piece.len)?))
        });
        if ends.is_none() {
            self.fail(call, INVALID_PARAM);
        }
        ends
    }

    fn table(&self) -> &Table {
        &self.0.endpoint.ucx().table
    }
}
