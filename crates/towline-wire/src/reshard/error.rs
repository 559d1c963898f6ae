//! Why there is no plan, naming side, rank, group, layer or part.

use std::fmt;

use thiserror::Error;

use crate::layout::LayoutError;
use crate::shard::ShardError;

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The one that has the KV.
    Source,
    /// The one that wants it.
    Destination,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// Why there is no plan.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ReshardError {
    /// Correct the layout.
    #[error("the {end}'s layout: {error}")]
    Layout {
        /// Whose.
        end: End,
        /// What is wrong.
        error: LayoutError,
    },
    /// Correct the sharding.
    #[error("the {end}'s ranks: {error}")]
    Sharding {
        /// Whose.
        end: End,
        /// What is wrong.
        error: ShardError,
    },
    /// Ask for tokens in ascending order, up to [`TOKENS_MAX`](super::TOKENS_MAX).
    #[error("tokens {start} to {end} are no range of a sequence")]
    Tokens {
        /// First.
        start: u64,
        /// After the last.
        end: u64,
    },
    /// The engines serve different models or cache options: compute the KV anew.
    #[error("layer {layer} has a part {part:?} that the {end} lacks")]
    Missing {
        /// Who lacks it.
        end: End,
        /// The model's layer.
        layer: u32,
        /// The part's name.
        part: String,
    },
    /// The engines serve different models or cache options, and no copying makes one of the other: compute the KV
    /// anew, or start both with the same.
    #[error(
        "layer {layer}, part {part:?} (group {group} of the destination): {field} is {theirs} at the source, {ours} at the destination"
    )]
    Differs {
        /// The destination layout's group.
        group: usize,
        /// The model's layer.
        layer: u32,
        /// The part's name.
        part: String,
        /// What differs: `kind`, `window`, `dtype`, `element bytes`, `heads`, `bytes of a head`.
        field: &'static str,
        /// The destination's.
        ours: String,
        /// The source's.
        theirs: String,
    },
    /// Give each rank once, and all sources that are needed.
    #[error("rank {rank} of the {end} {what}")]
    Rank {
        /// Whose.
        end: End,
        /// The rank's number.
        rank: u32,
        /// What is wrong.
        what: &'static str,
    },
    /// Correct the arrays; a source's come from its card or ticket, which is then broken or stale.
    #[error("rank {rank} of the {end}, group {group}: {what}")]
    Pool {
        /// Whose.
        end: End,
        /// The rank's number.
        rank: u32,
        /// The layout's group.
        group: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// Ask for tokens that both sides have blocks for.
    #[error("rank {rank} of the {end}, group {group}: the sequence's block {block} is not in its table")]
    Block {
        /// Whose.
        end: End,
        /// The rank's number.
        rank: u32,
        /// The layout's group.
        group: usize,
        /// Which block of the sequence.
        block: u64,
    },
    /// Plan fewer tokens or one destination at a time, or let both engines keep heads before tokens (HND), with
    /// larger blocks.
    #[error(
        "the plan has more than {pieces_max} pieces: plan fewer tokens or ranks at a time, or use HND and larger blocks on both sides"
    )]
    Pieces {
        /// The bound.
        pieces_max: u64,
    },
}
