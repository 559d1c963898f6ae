//! What each transfer came to, for whoever keeps a record of it; `lines.rs` writes one as JSON lines.
//!
//! **Cost.** Without a sink, one check at the end of a transfer. With one, a copy of the receipt or the error (some ten small
//! allocations, about 1 µs) and whatever the sink does, before the caller has its outcome.

mod lines;

use std::fmt::Debug;

use towline_wire::id::{AgentName, LeaseId, RegionId};
use towline_wire::receipt::{Op, Receipt, TransportKind};

pub use lines::{JsonLines, JsonLinesStats};

use crate::error::TransferError;

/// Hears of each transfer of an agent that ends, well or not: as many as
/// [`AgentStats`](crate::AgentStats) counts in `transfers_done` and `transfers_failed`. What is refused when it is posted is no
/// transfer: its caller has the error.
pub trait Telemetry: Debug + Send + Sync {
    /// A transfer ended, and its caller is told next. Called on the thread that ended it, which copies, serves peers, or is the
    /// caller's own: return at once, never block, and leave the agent's transfers alone, as their locks may be held.
    fn handle_transfer(&self, ended: EndedTransfer);
}

/// A transfer that ended.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct EndedTransfer {
    /// Direction.
    pub op: Op,
    /// The agent that asked.
    pub local_agent: AgentName,
    /// The agent whose memory was to be read or written.
    pub remote_agent: AgentName,
    /// Its region.
    pub region: RegionId,
    /// The lease to read under, if the request named one.
    pub lease: Option<LeaseId>,
    /// Which wire; none was chosen if the peer had still to connect.
    pub transport: Option<TransportKind>,
    /// Bytes asked for.
    pub bytes: u64,
    /// Bytes that were in place when it ended. After an error they mean nothing.
    pub moved_bytes: u64,
    /// From the call to the end. Where the peer had to connect first: from then on, or until that failed.
    pub seconds: f64,
    /// Its receipt, or why there is none.
    pub outcome: Result<Receipt, TransferError>,
}
