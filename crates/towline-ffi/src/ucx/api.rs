//! The functions of `libucp` that are used, and the one of `libucs` that puts a status in words.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::abi::{
    Address, Config, Context, Ep, EpAttr, EpParams, LibAttr, Mem, MemMapParams, Params, RawStatus,
    RequestParam, Rkey, StatusPtr, Worker, WorkerParams,
};
use crate::library::{Library, LibraryError};

macro_rules! table {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// Their addresses, for good: a library is never unloaded.
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct Table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Table {
            /// Looks all of them up.
            ///
            /// # Errors
            /// [`LibraryError::NoSymbol`] at the first that is missing.
            pub(crate) fn load(library: &Library) -> Result<Self, LibraryError> {
                let name = |name: &'static [u8]| std::ffi::CStr::from_bytes_with_nul(name).unwrap_or(c"");
                Ok(Self {$(
                    // SAFETY: the type is the one of its declaration in the library's header.
                    $name: unsafe { library.function(name(concat!(stringify!($name), "\0").as_bytes())) }?,
                )*})
            }
        }
    };
}

table! {
    ucp_lib_query: fn(*mut LibAttr) -> RawStatus;
    ucp_config_read: fn(*const c_char, *const c_char, *mut *mut Config) -> RawStatus;
    ucp_config_modify: fn(*mut Config, *const c_char, *const c_char) -> RawStatus;
    ucp_config_release: fn(*mut Config);
    ucp_init_version: fn(c_uint, c_uint, *const Params, *const Config, *mut *mut Context) -> RawStatus;
    ucp_cleanup: fn(*mut Context);
    ucp_mem_map: fn(*mut Context, *const MemMapParams, *mut *mut Mem) -> RawStatus;
    ucp_mem_unmap: fn(*mut Context, *mut Mem) -> RawStatus;
    ucp_rkey_pack: fn(*mut Context, *mut Mem, *mut *mut c_void, *mut usize) -> RawStatus;
    ucp_rkey_buffer_release: fn(*mut c_void);
    ucp_worker_create: fn(*mut Context, *const WorkerParams, *mut *mut Worker) -> RawStatus;
    ucp_worker_destroy: fn(*mut Worker);
    ucp_worker_get_address: fn(*mut Worker, *mut *mut Address, *mut usize) -> RawStatus;
    ucp_worker_release_address: fn(*mut Worker, *mut Address);
    ucp_worker_get_efd: fn(*mut Worker, *mut c_int) -> RawStatus;
    ucp_worker_arm: fn(*mut Worker) -> RawStatus;
    ucp_worker_progress: fn(*mut Worker) -> c_uint;
    ucp_ep_create: fn(*mut Worker, *const EpParams, *mut *mut Ep) -> RawStatus;
    ucp_ep_close_nbx: fn(*mut Ep, *const RequestParam) -> StatusPtr;
    ucp_ep_flush_nbx: fn(*mut Ep, *const RequestParam) -> StatusPtr;
    ucp_ep_query: fn(*mut Ep, *mut EpAttr) -> RawStatus;
    ucp_ep_print_info: fn(*mut Ep, *mut libc::FILE);
    ucp_ep_rkey_unpack: fn(*mut Ep, *const c_void, *mut *mut Rkey) -> RawStatus;
    ucp_rkey_destroy: fn(*mut Rkey);
    ucp_get_nbx: fn(*mut Ep, *mut c_void, usize, u64, *mut Rkey, *const RequestParam) -> StatusPtr;
    ucp_put_nbx: fn(*mut Ep, *const c_void, usize, u64, *mut Rkey, *const RequestParam) -> StatusPtr;
    ucp_request_free: fn(*mut c_void);
    ucp_request_check_status: fn(*mut c_void) -> RawStatus;
}

/// `ucs_status_string`.
pub(crate) type StatusString = unsafe extern "C" fn(RawStatus) -> *const c_char;
