//! What can go wrong, one enum an operation; each error tells whose fault it is and whether to try again.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use thiserror::Error;
use towline_wire::auth::AuthError;
use towline_wire::blocks::BlockListError;
use towline_wire::card::{CardError, Incompatible};
use towline_wire::carried_card::CarriedCardError;
use towline_wire::contract::ContractViolation;
use towline_wire::engine_card::EngineCardError;
use towline_wire::fault::{Fault, Retry};
use towline_wire::id::{AgentName, BootEpoch, LeaseId, RegionId};
use towline_wire::receipt::TransportKind;

/// Why an agent did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// Choose another address, or stop what holds it.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// The kernel's reason.
        error: io::Error,
    },
    /// Raise the process's limits on threads or open files.
    #[error("{step} failed: {error}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The kernel's reason.
        error: io::Error,
    },
    /// Turn at least one transport on.
    #[error("no transport is available: {reasons}")]
    NoTransport {
        /// Each transport with its reason.
        reasons: Reasons,
    },
}

/// Why transports were not used: `kind: reason` for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasons(pub Vec<(TransportKind, String)>);

impl std::fmt::Display for Reasons {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, (kind, reason)) in self.0.iter().enumerate() {
            write!(f, "{}{kind}: {reason}", if index == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// Why there is no peer.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nothing answers there, or it hung up, before its path opened or while it did; it may be starting, or gone.
    #[error("{address} cannot be reached: {reason}")]
    Unreachable {
        /// The address dialled.
        address: String,
        /// The kernel's reason; while the path opened, that of each transport tried or ruled out.
        reason: String,
    },
    /// The other side is no agent of this cluster: compare keys and releases.
    #[error("{address} failed the handshake: {reason}")]
    Auth {
        /// The address dialled.
        address: String,
        /// What failed.
        reason: String,
    },
    /// Another agent answers at that address.
    #[error("{address} is agent {found}, not {expected}")]
    WrongAgent {
        /// The address dialled.
        address: String,
        /// Whom the caller wanted.
        expected: AgentName,
        /// Who answered.
        found: AgentName,
    },
    /// The agent was started anew: its regions and leases of before are gone. Ask for new tickets.
    #[error("agent {agent} was restarted: boot epoch {found}, not {expected}")]
    PeerRestarted {
        /// The agent.
        agent: AgentName,
        /// The incarnation the caller knew.
        expected: BootEpoch,
        /// The one that answered.
        found: BootEpoch,
    },
    /// Its KV means something else.
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    /// The path is not what the deployment's contract requires.
    #[error(transparent)]
    ContractViolation(#[from] Box<ContractViolation>),
    /// The peer sent a card that breaks the rules: broken, hostile, or of another version.
    #[error("the peer's card was refused: {reason}")]
    Card {
        /// Which rule.
        reason: String,
    },
    /// A carried card that is not taken: altered, cut short, ended, of another version or cluster. Get a fresh one.
    #[error(transparent)]
    CarriedCard(#[from] CarriedCardError),
    /// No transport is fit for the peer, which is there; each reason is listed.
    #[error("no transport reaches the peer: {reasons}")]
    NoTransport {
        /// Each transport tried or ruled out.
        reasons: Reasons,
    },
    /// The peer did not answer in time: overloaded, stopped, or cut off.
    #[error("{address} did not answer within {deadline:?}")]
    Deadline {
        /// The address dialled.
        address: String,
        /// The time given.
        deadline: Duration,
    },
    /// This agent is full or shutting down.
    #[error("this agent takes no more connections: {reason}")]
    Closed {
        /// Which bound, or that it stops.
        reason: &'static str,
    },
}

impl From<CardError> for ConnectError {
    fn from(error: CardError) -> Self {
        Self::Card { reason: error.to_string() }
    }
}

impl From<ContractViolation> for ConnectError {
    fn from(violation: ContractViolation) -> Self {
        Self::ContractViolation(Box::new(violation))
    }
}

impl ConnectError {
    /// Whose fault it is.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Closed { .. } => Fault::Ours,
            Self::Incompatible(_) | Self::ContractViolation(_) | Self::NoTransport { .. } => Fault::Caller,
            Self::WrongAgent { .. } | Self::CarriedCard(_) => Fault::Caller,
            Self::Unreachable { .. } | Self::Auth { .. } | Self::PeerRestarted { .. } => Fault::Peer,
            Self::Card { .. } | Self::Deadline { .. } => Fault::Peer,
        }
    }

    /// Whether trying again can help.
    pub fn retry(&self) -> Retry {
        match self {
            Self::Unreachable { .. } | Self::Deadline { .. } | Self::Closed { .. } => Retry::Here,
            Self::PeerRestarted { .. } => Retry::Elsewhere,
            Self::Auth { .. } | Self::Card { .. } | Self::WrongAgent { .. } => Retry::Elsewhere,
            Self::CarriedCard(_) => Retry::Never,
            Self::Incompatible(_) | Self::ContractViolation(_) | Self::NoTransport { .. } => Retry::Elsewhere,
        }
    }
}

/// Why a transfer did not succeed. After any of these the destination's bytes mean nothing.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum TransferError {
    /// The connection was lost.
    #[error("agent {agent} cannot be reached: {reason}")]
    Unreachable {
        /// The peer.
        agent: AgentName,
        /// What happened to the connection.
        reason: String,
    },
    /// The peer is another incarnation than the one whose memory was named.
    #[error("agent {agent} was restarted")]
    PeerRestarted {
        /// The peer.
        agent: AgentName,
    },
    /// Not done by its deadline: the peer is stopped, cut off, or too slow.
    #[error("{moved} of {total} bytes were moved within {deadline:?}")]
    Stalled {
        /// Bytes in place at the deadline.
        moved: u64,
        /// Bytes asked for.
        total: u64,
        /// The time given.
        deadline: Duration,
    },
    /// The lease is over, of another generation, or does not cover the blocks.
    #[error("lease {lease} is over or does not cover the blocks")]
    Expired {
        /// The lease.
        lease: LeaseId,
    },
    /// The region is leased; name the lease.
    #[error("region {region} is read under a lease only")]
    LeaseRequired {
        /// The region.
        region: RegionId,
    },
    /// The pair broke its contract, which says to refuse: it is closed, and no data of this transfer is to be used.
    #[error(transparent)]
    ContractViolation(Box<ContractViolation>),
    /// Blocks that leave their region.
    #[error("out of range: {detail}")]
    OutOfRange {
        /// Which block of which side.
        detail: String,
    },
    /// Never registered, or deregistered since.
    #[error("the peer has no region {region}")]
    UnknownRegion {
        /// The region.
        region: RegionId,
    },
    /// The region does not take writes from peers, or the destination is a peer's memory mapped for reading.
    #[error("{what} does not take writes")]
    NotWritable {
        /// Which memory.
        what: String,
    },
    /// The caller cancelled it.
    #[error("cancelled")]
    Cancelled,
    /// The lists do not fit together.
    #[error("invalid block lists: {0}")]
    Invalid(#[from] BlockListError),
    /// A notification that is too long.
    #[error("a notification of {length} bytes is longer than {max}")]
    NotifyTooLong {
        /// Bytes given.
        length: usize,
        /// Most bytes.
        max: usize,
    },
    /// A prepared transfer is posted again only after its last post ended and drained.
    #[error("the prepared transfer is still active")]
    Active,
    /// Wait for transfers to end.
    #[error("{limit} transfers are in flight already")]
    Busy {
        /// The bound.
        limit: usize,
    },
    /// The peer or the agent was closed here.
    #[error("the peer is closed: {reason}")]
    Closed {
        /// By whom.
        reason: String,
    },
    /// The transport counted other bytes than were asked for; a bug, and the data is not used.
    #[error("{counted} bytes were counted for {asked} asked for")]
    Miscounted {
        /// Bytes asked for.
        asked: u64,
        /// Bytes the transport counted.
        counted: u64,
    },
}

impl TransferError {
    /// Whose fault it is.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Unreachable { .. } | Self::PeerRestarted { .. } | Self::Stalled { .. } => Fault::Peer,
            Self::Expired { .. } | Self::UnknownRegion { .. } => Fault::Peer,
            Self::Busy { .. } | Self::Miscounted { .. } => Fault::Ours,
            Self::LeaseRequired { .. } | Self::OutOfRange { .. } | Self::NotWritable { .. } => Fault::Caller,
            Self::Cancelled | Self::Invalid(_) | Self::NotifyTooLong { .. } => Fault::Caller,
            Self::Active | Self::Closed { .. } | Self::ContractViolation(_) => Fault::Caller,
        }
    }

    /// Whether trying again can help.
    pub fn retry(&self) -> Retry {
        match self {
            Self::Unreachable { .. } | Self::Stalled { .. } | Self::Busy { .. } | Self::Closed { .. } => {
                Retry::Here
            }
            Self::PeerRestarted { .. } | Self::Expired { .. } | Self::UnknownRegion { .. } => {
                Retry::Elsewhere
            }
            Self::ContractViolation(_) => Retry::Elsewhere,
            Self::Active => Retry::Here,
            Self::Miscounted { .. } => Retry::Elsewhere,
            Self::LeaseRequired { .. } | Self::OutOfRange { .. } | Self::NotWritable { .. } => Retry::Never,
            Self::Cancelled | Self::Invalid(_) | Self::NotifyTooLong { .. } => Retry::Never,
        }
    }
}

/// Why a control call was not answered with success.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControlError {
    /// The session is closed.
    #[error("the control session is closed: {reason}")]
    Unreachable {
        /// Why.
        reason: String,
    },
    /// No answer in time.
    #[error("no answer within {deadline:?}")]
    Stalled {
        /// The time given.
        deadline: Duration,
    },
    /// The peer said no.
    #[error("the peer refused: {code}: {message}")]
    Refused {
        /// One word.
        code: String,
        /// A sentence.
        message: String,
    },
    /// The engine's card breaks the rules: the peer is broken, or of another version.
    #[error("the engine's card was refused: {0}")]
    EngineCard(Box<EngineCardError>),
    /// Too many messages wait already, or one is too long.
    #[error("the message was not queued: {reason}")]
    Full {
        /// Which bound.
        reason: &'static str,
    },
}

impl ControlError {
    /// Whose fault it is.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Unreachable { .. } | Self::Stalled { .. } | Self::Refused { .. } => Fault::Peer,
            Self::EngineCard(_) => Fault::Peer,
            Self::Full { .. } => Fault::Caller,
        }
    }

    /// Whether trying again can help.
    pub fn retry(&self) -> Retry {
        match self {
            Self::Unreachable { .. } | Self::Stalled { .. } | Self::Full { .. } => Retry::Here,
            Self::Refused { .. } | Self::EngineCard(_) => Retry::Never,
        }
    }
}

/// Why a session of the reactor ended. Crate-internal; operations translate it into their own errors.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum SessionError {
    /// The socket failed or the peer hung up.
    #[error("{0}")]
    Lost(String),
    /// The handshake failed.
    #[error("{0}")]
    Auth(String),
    /// The peer broke the protocol.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// Another incarnation of the agent answered than was expected.
    #[error("another incarnation answers, of boot epoch {0}")]
    Restarted(BootEpoch),
    /// It did not answer in time.
    #[error("no answer in time")]
    Deadline,
    /// This side closed it.
    #[error("{0}")]
    Closed(&'static str),
}

impl From<io::Error> for SessionError {
    fn from(error: io::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

impl From<AuthError> for SessionError {
    fn from(error: AuthError) -> Self {
        Self::Auth(error.to_string())
    }
}

impl From<towline_wire::frame::FrameError> for SessionError {
    fn from(error: towline_wire::frame::FrameError) -> Self {
        Self::Protocol(error.to_string())
    }
}

impl From<towline_wire::control::ControlError> for SessionError {
    fn from(error: towline_wire::control::ControlError) -> Self {
        Self::Protocol(error.to_string())
    }
}
