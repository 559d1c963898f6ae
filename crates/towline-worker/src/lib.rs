//! Towline's embedded engine: Llama-family models over a paged KV cache that can travel.
//!
//! **What it is.** The compute half: [`model`] loads a GGUF file and runs batches of any mix of prompts and single tokens
//! over blocks of registered memory; [`text`] turns text into tokens and back, and conversations into prompts;
//! [`sample`] picks tokens; [`kernel`] is the arithmetic.
//!
//! **What it may not do.** Print, exit, read the environment or choose its own limits; `unsafe` lives in [`kernel`] alone.
//!
//! **What it promises.** A token's result is bitwise the same whatever shares its step, however its prompt was cut and
//! wherever its blocks lie. A handoff can therefore be checked token for token.
//!
//! **Words.** *Step*: one run over a batch. *Row*: one token of a step. *Block table*: a sequence's cache blocks, in order
//! of position. *Fingerprint*: what two workers must share before one may use the other's cache.

pub mod engine;
pub mod handoff;
pub mod http;
pub mod kernel;
pub mod metrics;
pub mod model;
pub mod pool;
pub mod sample;
pub mod serve;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;
