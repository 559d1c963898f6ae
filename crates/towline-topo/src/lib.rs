//! One machine, read once, as data.
//!
//! **What it is.** Where this process runs, which RDMA ports the machine has and in what state, and which of the
//! kernel's counters tell how many bytes a port moved. A contract is checked against it, and a receipt may cite it.
//!
//! **What it may not do.** No sockets, no FFI, no `unsafe`, no printing, no waiting, and no other crate of Towline.
//! Files are read through [`system::System`] only, so that a recorded machine reads like the live one. Nothing is
//! guessed: what could not be read or understood is a [`gap::Gap`], and a field without a value has one.
//!
//! **Words.**
//! - *system*: the door to a machine's files, live or recorded; everything behind it has a bound.
//! - *gap*: what is not known, and why not.
//! - *place*: where a process runs, so that two agents can tell what they share.
//! - *port*: one port of an RDMA device, as the kernel shows it.
//! - *counter*: a number of the kernel that grows with the bytes a port sent or received.
//! - *snapshot*: all of it at one moment, with its gaps.

#![forbid(unsafe_code)]

pub mod counters;
pub mod gap;
pub mod id_set;
pub mod label;
pub mod place;
pub mod rdma;
mod reader;
pub mod snapshot;
pub mod system;
