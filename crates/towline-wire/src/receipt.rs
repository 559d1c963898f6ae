//! The receipt of a transfer: which wire carried the bytes, how many, how fast, and what shows it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::LeaseId;

/// Schema number of a receipt in JSON.
pub const RECEIPT_SCHEMA: u32 = 1;

/// The transports of the vocabulary. A build offers those that its registry lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// The peer's memory on the same host: mapped, or copied by the kernel between the two processes.
    Shm,
    /// TCP streams.
    Tcp,
    /// UCX.
    Ucx,
    /// libfabric.
    Libfabric,
}

impl TransportKind {
    /// The word used in flags, cards, metrics and receipts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
            Self::Libfabric => "libfabric",
        }
    }

    /// The transport of that word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Shm, Self::Tcp, Self::Ucx, Self::Libfabric].into_iter().find(|kind| kind.as_str() == word)
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How strongly a claim about the path is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvidenceClass {
    /// Nothing supports it.
    None,
    /// The library could use this path.
    LibraryCapability,
    /// Counters of the device account for the bytes.
    Counters,
    /// What moved the bytes says so itself: our own mapping or socket, or the library asked about this transfer.
    LibraryExact,
}

/// What supports a claim about the path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// How strongly.
    pub class: EvidenceClass,
    /// Where from: `mapping`, `cma` (the kernel copied between two processes and says how much), `socket`, `library`,
    /// `counters`; of a path that reaches its regions in both of the first ways, `mapping+cma`; `claim` of a transport that
    /// nobody checked.
    pub source: String,
}

impl Evidence {
    /// Whether the claim counts as proven: by the mover itself or by counters.
    pub fn proves(&self) -> bool {
        self.class >= EvidenceClass::Counters
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} from {}", self.class, self.source)
    }
}

/// Read or write, from the initiator's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Remote to local.
    Read,
    /// Local to remote.
    Write,
}

/// One device's share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rail {
    /// Device or stream, local side to remote side.
    pub name: String,
    /// Bytes it carried, counted where they were moved.
    pub bytes: u64,
}

/// Where the time went, in seconds from the call; where the peer had to be connected first, from when it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// Planning: lists checked and merged.
    pub prepare_s: f64,
    /// Until the call returned.
    pub post_s: f64,
    /// From posting to the last byte in place.
    pub wire_s: f64,
    /// Fence read and digests, after the data; 0 where the caller checks neither.
    pub verify_s: f64,
}

/// What a transfer did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// [`RECEIPT_SCHEMA`].
    pub schema: u32,
    /// Which wire.
    pub transport: TransportKind,
    /// Direction.
    pub op: Op,
    /// The agent that asked.
    pub local_agent: String,
    /// The agent whose memory was read or written.
    pub remote_agent: String,
    /// Bytes moved, counted at the transport.
    pub bytes: u64,
    /// KV blocks moved.
    pub blocks: u64,
    /// Pieces named by the lists.
    pub descriptors: u64,
    /// Pieces left after merging.
    pub descriptors_merged: u64,
    /// Whether the bytes went through a bounce buffer.
    pub staged: bool,
    /// Each device's share.
    pub rails: Vec<Rail>,
    /// From the call to completion, in seconds; where the peer had to be connected first, from when it was.
    pub seconds: f64,
    /// `bytes / seconds / 10⁹`.
    pub gb_per_s: f64,
    /// Where the time went.
    pub timings: Timings,
    /// The lease under which it was read, if one.
    pub lease: Option<LeaseId>,
    /// How the pair breaks its contract, where the contract says to go on with an alarm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub violation: Option<String>,
    /// What supports `transport` and `bytes`.
    pub evidence: Evidence,
    /// The evidence's source in one word, for people and scripts: `mapping`, `cma`, `socket`, `library`, `counters`, `claim`.
    pub verified_by: String,
}
