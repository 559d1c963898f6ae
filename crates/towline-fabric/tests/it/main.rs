//! The fabric from outside: agents, peers, transfers and faults over loopback and shared memory.

#![expect(clippy::unwrap_used, reason = "in a test's helpers too, what fails should stop the test")]
#![expect(clippy::print_stderr, reason = "a test that is skipped says so")]

mod cards;
mod chaos;
mod child;
mod conformance;
mod connect;
mod contract;
mod drain;
mod faults;
mod file;
mod foreign;
mod idle;
mod lazy;
mod many;
mod netns;
mod pages;
mod parity;
mod raw;
mod refresh;
mod resources;
#[path = "../../../../tests/skips.rs"]
mod skips;
mod strangers;
mod streams;
mod support;
mod telemetry;
mod ucx;
