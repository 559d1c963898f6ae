//! The HTTP front over real sockets on loopback, with a scripted engine and handoff, and over the real engine.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod answers;
mod bounds;
mod client;
mod engine;
mod fakes;
mod legs;
mod log;
mod requests;
mod streams;
mod workers;
