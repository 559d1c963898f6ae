//! A context: its options, and the memory that is mapped in it.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::abi::{
    self, FEATURE_RMA, FEATURE_WAKEUP, MEM_MAP_PARAM_ADDRESS, MEM_MAP_PARAM_LENGTH,
    MEM_MAP_PARAM_MEMORY_TYPE, MEM_MAP_PARAM_PROT, MEM_PROT_LOCAL_READ, MEM_PROT_LOCAL_WRITE,
    MEM_PROT_REMOTE_READ, MEM_PROT_REMOTE_WRITE, MEMORY_TYPE_HOST, MemMapParams, PARAM_FEATURES,
    PARAM_MT_WORKERS_SHARED, PARAM_NAME, Params,
};
use super::{Ucx, UcxError};
use crate::library::c_string;
use crate::pinned::Pinned;

/// `UCS_ERR_INVALID_PARAM`, for what is refused before UCX sees it.
pub(super) const INVALID_PARAM: i8 = -5;

/// The options of one context: what `UCX_*` variables and configuration files say, and what is set on top.
#[derive(Debug)]
pub struct Settings {
    ucx: Arc<Ucx>,
    config: NonNull<abi::Config>,
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// UCX's: a variable has a value that it doesn't know.
    pub fn read(ucx: &Arc<Ucx>) -> Result<Self, UcxError> {
        let mut config = std::ptr::null_mut();
        // SAFETY: null stands for no prefix and no further file; `config` is this call's.
        let status =
            unsafe { (ucx.table.ucp_config_read)(std::ptr::null(), std::ptr::null(), &raw mut config) };
        ucx.words.check("ucp_config_read", status)?;
        let config = filled(ucx, "ucp_config_read", config)?;
        Ok(Self { ucx: Arc::clone(ucx), config })
    }

    /// Sets an option, which has its name without `UCX_`. One that UCX doesn't know it keeps, for a transport that may know it.
    ///
    /// # Errors
    /// UCX's: no such value.
    pub fn set(&mut self, option: &str, value: &str) -> Result<(), UcxError> {
        let text =
            |text| c_string(text).map_err(|_| self.ucx.words.error("ucp_config_modify", INVALID_PARAM));
        let (option, value) = (text(option)?, text(value)?);
        // SAFETY: the options are this value's alone, and the texts end with zeros.
        let status = unsafe {
            (self.ucx.table.ucp_config_modify)(self.config.as_ptr(), option.as_ptr(), value.as_ptr())
        };
        self.ucx.words.check("ucp_config_modify", status)
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        // SAFETY: read above, released once.
        unsafe { (self.ucx.table.ucp_config_release)(self.config.as_ptr()) };
    }
}

/// UCX, set up for reads and writes of remote memory, with devices chosen by its settings. For any thread.
#[derive(Debug)]
pub struct Context {
    pub(super) ucx: Arc<Ucx>,
    pub(super) handle: NonNull<abi::Context>,
}

// SAFETY: it is made with `mt_workers_shared`, by a library that says that it supports several threads.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the devices. Takes 10 to 100 ms.
    ///
    /// # Errors
    /// UCX's: no device is left by the settings, memory or files run out.
    pub fn new(settings: &Settings, name: &str) -> Result<Arc<Self>, UcxError> {
        let ucx = &settings.ucx;
        let name = c_string(name).map_err(|_| ucx.words.error("ucp_init", INVALID_PARAM))?;
        let params = Params {
            field_mask: PARAM_FEATURES | PARAM_MT_WORKERS_SHARED | PARAM_NAME,
            features: FEATURE_RMA | FEATURE_WAKEUP,
            request_size: 0,
            request_init: std::ptr::null_mut(),
            request_cleanup: std::ptr::null_mut(),
            tag_sender_mask: 0,
            mt_workers_shared: 1,
            estimated_num_eps: 0,
            estimated_num_ppn: 0,
            name: name.as_ptr(),
        };
        let mut handle = std::ptr::null_mut();
        let (major, minor) = (super::OLDEST.major, super::OLDEST.minor);
        // SAFETY: the structure is as of the version that is named, and read during the call; so are the settings.
        let status = unsafe {
            (ucx.table.ucp_init_version)(
                major,
                minor,
                &raw const params,
                settings.config.as_ptr(),
                &raw mut handle,
            )
        };
        ucx.words.check("ucp_init", status)?;
        let handle = filled(ucx, "ucp_init", handle)?;
        Ok(Arc::new(Self { ucx: Arc::clone(ucx), handle }))
    }

    /// Maps memory: the devices may reach it, and peers who have the key as `reach` says. Takes time with its size: its pages are pinned.
    ///
    /// # Errors
    /// UCX's: the limit of locked memory (`ulimit -l`), a device that runs out of registrations.
    pub fn map(self: &Arc<Self>, memory: Arc<dyn Pinned>, reach: Reach) -> Result<Mapped, UcxError> {
        let remote = match reach {
            Reach::Local => 0,
            Reach::PeersRead => MEM_PROT_REMOTE_READ,
            Reach::PeersWrite => MEM_PROT_REMOTE_READ | MEM_PROT_REMOTE_WRITE,
        };
        let local = if memory.is_writable() {
            MEM_PROT_LOCAL_READ | MEM_PROT_LOCAL_WRITE
        } else {
            MEM_PROT_LOCAL_READ
        };
        let params = MemMapParams {
            field_mask: MEM_MAP_PARAM_ADDRESS
                | MEM_MAP_PARAM_LENGTH
                | MEM_MAP_PARAM_PROT
                | MEM_MAP_PARAM_MEMORY_TYPE,
            address: memory.base().as_ptr().cast(),
            length: memory.len_bytes(),
            flags: 0,
            prot: local | remote,
            memory_type: MEMORY_TYPE_HOST,
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the structure is read during the call; the memory stays as long as the mapping.
        let status =
            unsafe { (self.ucx.table.ucp_mem_map)(self.handle.as_ptr(), &raw const params, &raw mut handle) };
        self.ucx.words.check("ucp_mem_map", status)?;
        let handle = filled(&self.ucx, "ucp_mem_map", handle)?;
        Ok(Mapped { context: Arc::clone(self), handle, memory })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: workers and mappings hold the context, so none is left.
        unsafe { (self.ucx.table.ucp_cleanup)(self.handle.as_ptr()) };
    }
}

/// Who may reach mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// This process's own requests.
    Local,
    /// Peers read it.
    PeersRead,
    /// Peers read and write it.
    PeersWrite,
}

/// Memory that is mapped. Dropping it takes the key back from peers: what they ask for afterwards fails.
pub struct Mapped {
    context: Arc<Context>,
    handle: NonNull<abi::Mem>,
    memory: Arc<dyn Pinned>,
}

// SAFETY: the handle is used by calls that the context's threading allows.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// What peers need to reach it: some ten to some hundred bytes.
    ///
    /// # Errors
    /// UCX's, when memory runs out.
    pub fn key(&self) -> Result<Vec<u8>, UcxError> {
        let (table, words) = (&self.context.ucx.table, self.context.ucx.words);
        let (mut buffer, mut len): (*mut c_void, usize) = (std::ptr::null_mut(), 0);
        // SAFETY: a mapping of this context, and two variables of this call's.
        let status = unsafe {
            (table.ucp_rkey_pack)(
                self.context.handle.as_ptr(),
                self.handle.as_ptr(),
                &raw mut buffer,
                &raw mut len,
            )
        };
        words.check("ucp_rkey_pack", status)?;
        // SAFETY: UCX has filled so many bytes.
        let key = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) }.to_vec();
        // SAFETY: UCX's buffer, released once.
        unsafe { (table.ucp_rkey_buffer_release)(buffer) };
        Ok(key)
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<dyn Pinned> {
        &self.memory
    }

    pub(super) fn handle(&self) -> *mut abi::Mem {
        self.handle.as_ptr()
    }

    /// The address of `len` bytes from `offset` on, if they are inside.
    pub(super) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.memory.len_bytes());
        inside.then(|| self.memory.base().as_ptr().wrapping_add(offset))
    }
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapped").field("len_bytes", &self.memory.len_bytes()).finish_non_exhaustive()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let ucx = &self.context.ucx;
        // SAFETY: a mapping of this context that no request uses: each holds it.
        let status = unsafe { (ucx.table.ucp_mem_unmap)(self.context.handle.as_ptr(), self.handle.as_ptr()) };
        debug_assert_eq!(status, 0, "{}", ucx.words.error("ucp_mem_unmap", status));
    }
}

/// What a call that succeeded has filled in.
///
/// # Errors
/// That it hasn't.
pub(super) fn filled<T>(ucx: &Ucx, call: &'static str, handle: *mut T) -> Result<NonNull<T>, UcxError> {
    NonNull::new(handle).ok_or_else(|| ucx.words.error(call, INVALID_PARAM))
}
