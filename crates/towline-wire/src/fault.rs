//! The two questions every error answers: whose fault, and does it help to try again.

use serde::{Deserialize, Serialize};

/// Whose fault an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// This process: a bug or a limit of this machine.
    Ours,
    /// The other agent, or the way to it.
    Peer,
    /// Whoever asked: the request cannot be met as it is.
    Caller,
}

/// Whether, and where, trying again can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Retry {
    /// It will fail the same way.
    Never,
    /// The same pair may succeed, for example over a new connection.
    Here,
    /// Another peer may succeed, or the KV must be computed anew.
    Elsewhere,
}
