//! The KV transfer engine: registered memory, and one-sided reads and writes of paged blocks between agents.
//!
//! **What it is.** An [`Agent`] registers [`Memory`], publishes a card, connects to peers over the best transport
//! that reaches them, and posts transfers of block lists. Each transfer ends with a receipt (which wire, how many
//! bytes, counted where they moved) or with a typed error, within its deadline. Two transports are built in: `shm`
//! maps the peer's memory, or has the kernel copy it, `tcp` goes anywhere.
//!
//! **What it may not do.** No async runtime (callers await, poll or wait: [`Pending`]); no environment, no flags, no
//! printing; no knowledge of models, tokens or HTTP. `unsafe` lives in `region/` alone. An idle agent uses no CPU.
//!
//! **Threads.** `towline-io` waits for control sessions and deadlines; it and `towline-io-N` share the data streams;
//! `towline-copy-N` copy over shared memory; `towline-linger` waits, when an agent stops, for who still reads foreign memory;
//! `towline-lines` writes a record of transfers, if one is wanted. Callbacks of [`Owner`] run on the io threads.
//!
//! **Words.**
//! - *transport*: a way to move bytes; *path*: one peer over one transport.
//! - *slice*: up to 2 MiB of one transfer, the unit that a transport is given; a window of them is in flight.
//! - *drain*: the outstanding slices of a transfer that failed or was cancelled come to their end; until then the
//!   local memory and the caller's `hold` are kept. After a *grace* the path is closed by force.
//! - *session*: one authenticated connection, for control or for data.

#![warn(missing_docs)]

mod agent;
mod control;
mod error;
mod io;
mod pending;
pub mod region;
mod sync;
mod telemetry;
pub mod transport;

pub use agent::{
    Agent, AgentConfig, AgentStats, ConnectOptions, HeldLease, Limits, Owner, Peer, Prepared, Region,
    RegionOptions, RegionRole, ShmConfig, Totals, Transfer, TransferRequest, TransportChoice,
    TransportStatus, TransportTraffic,
};
pub use error::{ConnectError, ControlError, Reasons, StartError, TransferError};
pub use pending::Pending;
pub use region::{Access, Memory, MemoryOptions, Pages, RangeError, RegisterError};
pub use telemetry::{EndedTransfer, JsonLines, JsonLinesStats, Telemetry};
pub use transport::ucx::UcxConfig;
