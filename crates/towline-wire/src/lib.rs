//! Every byte that crosses a process boundary in Towline, as pure data.
//!
//! **What it is.** Ids, KV layouts and how ranks share them, block lists, re-sharding plans, leases and fences,
//! receipts, contracts, cards, tickets, the frames of the data path, the control messages, and the state machine of a
//! handoff.
//!
//! **What it may not do.** No I/O, no clock, no randomness, no `unsafe`: time and nonces are arguments. The
//! manifest holds the line (nothing here can open a socket).
//!
//! **Words.**
//! - *region*: memory that peers may address, by id and offset.
//! - *block list*: which KV blocks of a region, compactly: bases × indices.
//! - *lease*: the promise of an owner to leave blocks alone until released or expired.
//! - *fence slot*: where a reader checks, after its data, that the promise was kept.
//! - *receipt*: which wire carried how many bytes, how fast, and on what evidence.
//! - *contract*: what the KV path must be; *rail*: one device's share of a path.
//! - *ticket*: an owner's signed permission to read the blocks of one request.
//! - *part*: some layers of a lease's KV; parts become ready, and are read, in order.
//! - *rank*: one process of an engine, with its share of heads and layers.
//! - *handoff*: all of it together, for one request.

#![forbid(unsafe_code)]

pub mod auth;
pub mod blocks;
pub mod card;
pub mod carried_card;
pub mod contract;
pub mod control;
pub mod digest;
pub mod engine_card;
pub mod engine_lease;
pub mod fault;
pub mod fence;
pub mod frame;
pub mod handoff;
pub mod id;
pub mod kv_params;
pub mod layout;
pub mod lease;
pub mod openai;
pub mod parts;
pub mod prefix;
pub mod receipt;
pub mod reshard;
pub mod shard;
pub mod ticket;
