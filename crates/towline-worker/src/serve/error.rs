//! Why a worker does not start, or stops serving.

use std::net::SocketAddr;

use thiserror::Error;
use towline_fabric::RegisterError;
use towline_wire::id::IdError;

use crate::engine;
use crate::handoff::HandoffStartError;
use crate::model::{CacheError, LoadError};

/// Why a worker did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// Choose another address, or stop what holds it.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The model can't be used; the error says what to do.
    #[error(transparent)]
    Model(#[from] LoadError),
    /// Give more with `kv_cache_bytes`.
    #[error("{bytes} bytes of KV memory are too few: a block has {block_bytes}, and at least 2 are needed")]
    KvMemory {
        /// Bytes configured.
        bytes: u64,
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// Memory is short: give less with `kv_cache_bytes`, or raise the limit.
    #[error("cannot reserve the KV memory: {0}")]
    Reserve(#[from] RegisterError),
    /// The model's layout is none this engine computes on.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The system gives no more threads.
    #[error(transparent)]
    Engine(#[from] engine::StartError),
    /// The KV port is taken, or no transport is available.
    #[error("cannot start the KV handoff: {0}")]
    Handoff(#[from] HandoffStartError),
    /// Choose another name.
    #[error(transparent)]
    Name(#[from] IdError),
    /// The system has no randomness: ids and keys would be guessable.
    #[error("no random numbers: {detail}")]
    Random {
        /// The system's reason.
        detail: String,
    },
}

/// Why a worker stopped serving.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The listener can't be used by the runtime.
    #[error("cannot serve on {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
}
