//! Tests against the libraries that are installed; each says when it has none.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]
#![allow(unsafe_code, reason = "tests make memory that libraries reach")]

mod layout;
mod memory;
#[path = "../../../../tests/skips.rs"]
mod skips;
mod ucx;
