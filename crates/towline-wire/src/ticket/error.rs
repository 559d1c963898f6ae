//! Why a ticket is refused.

use thiserror::Error;

use super::TICKET_SCHEMA;
use crate::layout::LayoutError;
use crate::parts::PartsError;
use crate::shard::ShardError;

/// Why a ticket is refused. Unless said otherwise, the owner is broken.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TicketError {
    /// It was altered, or sealed under another key: prefill and decode must share the cluster key.
    #[error("the ticket's seal is broken: it was altered, or prefill holds another cluster key")]
    Seal,
    /// Run the same release on both sides.
    #[error("the ticket has schema {found}, this build reads {TICKET_SCHEMA}")]
    Schema {
        /// The ticket's schema.
        found: u32,
    },
    /// It belongs to another deployment.
    #[error("the ticket is for {found:?}")]
    Audience {
        /// The ticket's audience.
        found: String,
    },
    /// Ask prefill again.
    #[error("the ticket is past its end")]
    Expired,
    /// Its ranks do not make an engine, or its layout is not theirs.
    #[error("the ticket's ranks: {0}")]
    Sharding(#[from] ShardError),
    /// Its layout breaks its bounds.
    #[error("the ticket's layout: {0}")]
    Layout(#[from] LayoutError),
    /// Its parts are not its layers.
    #[error("the ticket's parts: {0}")]
    Parts(#[from] PartsError),
    /// It lists more or fewer ranks than the engine has.
    #[error("the ticket lists {found} ranks, the engine has {ranks}")]
    Ranks {
        /// Ranks listed.
        found: usize,
        /// Ranks there must be.
        ranks: usize,
    },
    /// One rank is wrong.
    #[error("rank {rank} of the ticket: {what}")]
    Rank {
        /// The rank's number.
        rank: u32,
        /// What is wrong.
        what: &'static str,
    },
    /// It names more than a ticket may.
    #[error("the ticket has more than {max} {what}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The bound.
        max: u64,
    },
}
