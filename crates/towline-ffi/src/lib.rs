//! Foreign libraries, opened at run time, behind safe types.
//!
//! Nothing here is linked: a machine without UCX or libfabric runs Towline all the same, and is told what is missing. `library` finds
//! and opens a file; `pinned` is memory that a library may reach until it says it is done; `ucx` is a library.
//!
//! *Architecture invariant:* what is not `unsafe` here can't break memory: a request holds what it touches until the library has
//! called back, handles end in the order that the library wants, and what belongs to one thread stays there.
//!
//! *Architecture invariant:* mechanism only. Which options are set, what a peer may do, when to give up: the fabric's.
//!
//! **Layouts** are written by hand from the libraries' public headers, in `abi.rs`, and asserted; where the headers are installed a C
//! program prints the same numbers, and a test compares (`tests/it/layout.rs`).
#![expect(unsafe_code, reason = "calls foreign functions")]

pub mod library;
pub mod pinned;
pub mod ucx;

mod signals;
