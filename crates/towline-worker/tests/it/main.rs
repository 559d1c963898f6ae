//! What the engine promises, tested from outside: exact kernels, batch-invariant steps, agreement with an independent
//! forward pass and with llama.cpp's tokenizer, and files that lie.
#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, but not in the functions they share")]

mod attention;
mod engine;
mod engine_life;
mod engine_memory;
mod engine_progress;
mod engine_rig;
mod handoff;
mod http;
mod invariance;
mod kernels;
mod loader;
mod ranks;
mod reference;
#[path = "../../../../tests/skips.rs"]
mod skips;
mod support;
mod tokenizer;
