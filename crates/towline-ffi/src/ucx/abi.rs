//! What `ucp/api/ucp.h` and its kin say, as far as it is used, in the order of their fields.
//!
//! UCX keeps the beginning of its structures from version to version; a mask of fields says how much of one is there, and what is not
//! in the mask is neither read nor written. So a structure as of 1.13 does for every later one. The exception is `EpAttr`, whose
//! list of transports came with 1.14: it is only asked for from there on. A status is one byte, as its C enum is packed.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`.
pub(crate) type RawStatus = i8;
/// `ucs_status_ptr_t`: null, a status in the last 100 addresses, or a request.
pub(crate) type StatusPtr = *mut c_void;

/// A thing of the library's.
macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub(crate) struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque!(Config Context Worker Ep Mem Rkey Address);

/// `ucp_params_t`.
#[repr(C)]
pub(crate) struct Params {
    pub(crate) field_mask: u64,
    pub(crate) features: u64,
    pub(crate) request_size: usize,
    pub(crate) request_init: *mut c_void,
    pub(crate) request_cleanup: *mut c_void,
    pub(crate) tag_sender_mask: u64,
    pub(crate) mt_workers_shared: c_int,
    pub(crate) estimated_num_eps: usize,
    pub(crate) estimated_num_ppn: usize,
    pub(crate) name: *const c_char,
}

pub(crate) const PARAM_FEATURES: u64 = 1;
pub(crate) const PARAM_MT_WORKERS_SHARED: u64 = 1 << 5;
pub(crate) const PARAM_NAME: u64 = 1 << 8;
pub(crate) const FEATURE_RMA: u64 = 1 << 1;
pub(crate) const FEATURE_WAKEUP: u64 = 1 << 4;

/// `ucp_lib_attr_t`.
#[repr(C)]
pub(crate) struct LibAttr {
    pub(crate) field_mask: u64,
    pub(crate) max_thread_level: c_int,
}

pub(crate) const LIB_ATTR_MAX_THREAD_LEVEL: u64 = 1;
pub(crate) const THREAD_MODE_SERIALIZED: c_int = 1;
pub(crate) const THREAD_MODE_MULTI: c_int = 2;

/// `ucp_worker_params_t`.
#[repr(C)]
pub(crate) struct WorkerParams {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: c_int,
    pub(crate) cpu_mask: [u64; 16],
    pub(crate) events: c_uint,
    pub(crate) user_data: *mut c_void,
    pub(crate) event_fd: c_int,
    pub(crate) flags: u64,
    pub(crate) name: *const c_char,
    pub(crate) am_alignment: usize,
    pub(crate) client_id: u64,
}

pub(crate) const WORKER_PARAM_THREAD_MODE: u64 = 1;

/// `ucp_ep_params_t`.
#[repr(C)]
pub(crate) struct EpParams {
    pub(crate) field_mask: u64,
    pub(crate) address: *const Address,
    pub(crate) err_mode: c_int,
    pub(crate) err_handler: ErrHandler,
    pub(crate) user_data: *mut c_void,
    pub(crate) flags: c_uint,
    pub(crate) sockaddr: SockAddr,
    pub(crate) conn_request: *mut c_void,
    pub(crate) name: *const c_char,
    pub(crate) local_sockaddr: SockAddr,
}

/// `ucp_err_handler_t`.
#[repr(C)]
pub(crate) struct ErrHandler {
    pub(crate) cb: Option<unsafe extern "C" fn(*mut c_void, *mut Ep, RawStatus)>,
    pub(crate) arg: *mut c_void,
}

/// `ucs_sock_addr_t`.
#[repr(C)]
pub(crate) struct SockAddr {
    pub(crate) addr: *const c_void,
    pub(crate) addrlen: u32,
}

pub(crate) const EP_PARAM_REMOTE_ADDRESS: u64 = 1;
pub(crate) const EP_PARAM_ERR_HANDLING_MODE: u64 = 1 << 1;
pub(crate) const EP_PARAM_ERR_HANDLER: u64 = 1 << 2;
pub(crate) const ERR_HANDLING_MODE_NONE: c_int = 0;
pub(crate) const ERR_HANDLING_MODE_PEER: c_int = 1;
pub(crate) const EP_CLOSE_FLAG_FORCE: u32 = 1;

/// `ucp_mem_map_params_t`.
#[repr(C)]
pub(crate) struct MemMapParams {
    pub(crate) field_mask: u64,
    pub(crate) address: *mut c_void,
    pub(crate) length: usize,
    pub(crate) flags: c_uint,
    pub(crate) prot: c_uint,
    pub(crate) memory_type: c_int,
}

pub(crate) const MEM_MAP_PARAM_ADDRESS: u64 = 1;
pub(crate) const MEM_MAP_PARAM_LENGTH: u64 = 1 << 1;
pub(crate) const MEM_MAP_PARAM_PROT: u64 = 1 << 3;
pub(crate) const MEM_MAP_PARAM_MEMORY_TYPE: u64 = 1 << 4;
pub(crate) const MEM_PROT_LOCAL_READ: c_uint = 1;
pub(crate) const MEM_PROT_LOCAL_WRITE: c_uint = 1 << 1;
pub(crate) const MEM_PROT_REMOTE_READ: c_uint = 1 << 8;
pub(crate) const MEM_PROT_REMOTE_WRITE: c_uint = 1 << 9;
pub(crate) const MEMORY_TYPE_HOST: c_int = 0;

/// `ucp_request_param_t`.
#[repr(C)]
pub(crate) struct RequestParam {
    pub(crate) op_attr_mask: u32,
    pub(crate) flags: u32,
    pub(crate) request: *mut c_void,
    pub(crate) cb: Option<unsafe extern "C" fn(*mut c_void, RawStatus, *mut c_void)>,
    pub(crate) datatype: u64,
    pub(crate) user_data: *mut c_void,
    pub(crate) reply_buffer: *mut c_void,
    pub(crate) memory_type: c_int,
    pub(crate) recv_info: *mut c_void,
    pub(crate) memh: *mut Mem,
}

pub(crate) const OP_ATTR_CALLBACK: u32 = 1 << 1;
pub(crate) const OP_ATTR_USER_DATA: u32 = 1 << 2;
pub(crate) const OP_ATTR_FLAGS: u32 = 1 << 4;
pub(crate) const OP_ATTR_MEMORY_TYPE: u32 = 1 << 6;
pub(crate) const OP_ATTR_MEMH: u32 = 1 << 8;

/// `ucp_ep_attr_t` from 1.14 on.
#[repr(C)]
pub(crate) struct EpAttr {
    pub(crate) field_mask: u64,
    pub(crate) name: [c_char; 32],
    pub(crate) local_sockaddr: [u64; 16],
    pub(crate) remote_sockaddr: [u64; 16],
    pub(crate) transports: Transports,
    pub(crate) user_data: *mut c_void,
}

/// `ucp_transports_t`.
#[repr(C)]
pub(crate) struct Transports {
    pub(crate) entries: *mut TransportEntry,
    pub(crate) num_entries: c_uint,
    pub(crate) entry_size: usize,
}

/// `ucp_transport_entry_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TransportEntry {
    pub(crate) transport_name: *const c_char,
    pub(crate) device_name: *const c_char,
}

pub(crate) const EP_ATTR_TRANSPORTS: u64 = 1 << 3;

/// A structure's size and the places of its fields, by their names in C: what a test compares with the headers.
pub type Layout = (&'static str, usize, &'static [(&'static str, usize)]);

macro_rules! layouts {
    ($($c:literal = $rust:ty { $($field:ident),* })*) => {
        /// The layouts above.
        pub const LAYOUTS: &[Layout] = &[$(
            ($c, size_of::<$rust>(), &[$((stringify!($field), std::mem::offset_of!($rust, $field))),*])
        ),*];
    };
}

layouts! {
    "ucp_params_t" = Params {
        field_mask, features, request_size, request_init, request_cleanup, tag_sender_mask, mt_workers_shared, estimated_num_eps,
        estimated_num_ppn, name
    }
    "ucp_lib_attr_t" = LibAttr { field_mask, max_thread_level }
    "ucp_worker_params_t" = WorkerParams {
        field_mask, thread_mode, cpu_mask, events, user_data, event_fd, flags, name, am_alignment, client_id
    }
    "ucp_ep_params_t" = EpParams {
        field_mask, address, err_mode, err_handler, user_data, flags, sockaddr, conn_request, name, local_sockaddr
    }
    "ucp_err_handler_t" = ErrHandler { cb, arg }
    "ucs_sock_addr_t" = SockAddr { addr, addrlen }
    "ucp_mem_map_params_t" = MemMapParams { field_mask, address, length, flags, prot, memory_type }
    "ucp_request_param_t" = RequestParam {
        op_attr_mask, flags, request, cb, datatype, user_data, reply_buffer, memory_type, recv_info, memh
    }
}

const _: () = {
    assert!(size_of::<RawStatus>() == 1 && size_of::<usize>() == 8);
    assert!(size_of::<Params>() == 80 && size_of::<WorkerParams>() == 200 && size_of::<EpParams>() == 104);
    assert!(size_of::<MemMapParams>() == 40 && size_of::<RequestParam>() == 72 && size_of::<EpAttr>() == 328);
};
