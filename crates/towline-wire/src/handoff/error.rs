//! Why a handoff failed, whose fault that is, and where trying again can help.

use std::time::Duration;

use thiserror::Error;

use crate::digest::DigestMismatch;
use crate::fault::{Fault, Retry};
use crate::fence::FenceError;

/// Why a handoff failed. What the reader may have received is thrown away in every case.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HandoffError {
    /// The owner can't be reached, or the way broke: another prefill worker, or computing locally, may help.
    #[error("prefill cannot be reached: {detail}")]
    Unreachable {
        /// What failed.
        detail: String,
    },
    /// The owner was restarted since it granted the lease; its KV is gone.
    #[error("prefill was restarted since it computed this KV")]
    PeerRestarted,
    /// The engines differ; pairing them is a configuration error.
    #[error("incompatible {field}: {detail}")]
    Incompatible {
        /// The field that differs.
        field: &'static str,
        /// Both sides' values.
        detail: String,
    },
    /// The path is not what the contract requires.
    #[error("contract violation: {detail}")]
    ContractViolation {
        /// Required, found, evidence, remedy.
        detail: String,
    },
    /// The deadline passed.
    #[error("the KV did not arrive within {after:?}")]
    Stalled {
        /// The deadline.
        after: Duration,
    },
    /// The lease was over when the data had arrived; the data may be torn.
    #[error("the KV expired: {detail}")]
    Expired {
        /// What the fence slot showed.
        detail: FenceError,
    },
    /// The owner refused the read: its lease is over.
    #[error("prefill refused the read: its lease is over")]
    LeaseOver,
    /// The data is not what the owner computed.
    #[error("digest mismatch: {0}")]
    DigestMismatch(DigestMismatch),
    /// The caller gave up.
    #[error("cancelled")]
    Cancelled,
    /// The ticket and the request don't belong together, or the ticket can't be served here.
    #[error("{detail}")]
    Invalid {
        /// What is wrong.
        detail: String,
    },
}

impl HandoffError {
    /// Whose fault it is.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Cancelled
            | Self::Incompatible { .. }
            | Self::ContractViolation { .. }
            | Self::Invalid { .. } => Fault::Caller,
            _ => Fault::Peer,
        }
    }

    /// Where trying again can help.
    pub fn retry(&self) -> Retry {
        match self {
            Self::Cancelled | Self::Incompatible { .. } | Self::Invalid { .. } => Retry::Never,
            _ => Retry::Elsewhere,
        }
    }

    /// A stable word for metrics and error codes.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "unreachable",
            Self::PeerRestarted => "peer_restarted",
            Self::Incompatible { .. } => "incompatible",
            Self::ContractViolation { .. } => "contract_violation",
            Self::Stalled { .. } => "stalled",
            Self::Expired { .. } | Self::LeaseOver => "expired",
            Self::DigestMismatch(_) => "digest_mismatch",
            Self::Cancelled => "cancelled",
            Self::Invalid { .. } => "invalid",
        }
    }
}
