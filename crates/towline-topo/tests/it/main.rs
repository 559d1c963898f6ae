//! The crate from outside: recorded machines, each ± one change, read through the door that the live one has.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by a panic and explains itself by printing; its helpers too"
)]

mod arbitrary;
mod counters;
mod live;
mod machine;
mod mutations;
mod ports;
mod recordings;
#[path = "../../../../tests/skips.rs"]
mod skips;
