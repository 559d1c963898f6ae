//! What holds for the whole repository and for the whole binary: layers and lists that no compiler checks, the command
//! line as a user meets it, and deployments of real processes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by a panic and explains itself by printing"
)]

mod bench;
mod cli;
mod e2e;
mod hygiene;
mod layering;
mod process;
#[path = "../../../../tests/skips.rs"]
mod skips;
mod tree;
mod unsafe_list;
