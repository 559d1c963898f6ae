//! What a transport is, and which ones this build has.
//!
//! **Why the traits look like this.** They must hold for transports that are not here yet:
//! - *UCX* gives each region a packed rkey that the peer unpacks, and reports a broken endpoint through a callback:
//!   so [`Transport::register`] answers with opaque bytes for the card, and a path tells [`PathEvents`] that it is down.
//! - *libfabric* has memory keys for each domain and several rails: one [`Path`] may spread slices over rails, and
//!   the key's bytes are the transport's own.
//! - *EFA* promises no order between operations, and no transport's fence is trusted (brief, section 3.4): a path
//!   completes each [`Slice`] when *its* bytes are in place, in any order; what must follow the data (a
//!   notification, the read of a fence slot) is posted by the agent after the last completion.
//! - *An engine in Python* polls an event fd: completion is one callback on a plain object, from whatever thread made
//!   the progress; nothing here needs an async runtime.
//! - *Device memory*: a slice names a [`Memory`], not a pointer or a slice of bytes, and [`Capabilities`] says whether
//!   the transport can reach memory of a device.
//!
//! **What a transport may not do.** Block in [`Path::post`] for the copy; touch a slice's memory after completing it;
//! complete it twice (the type prevents it) or never (dropping it completes it with an error); cut, retry or time
//! out: slicing, windows, deadlines and cancellation are the agent's, once for all transports.

pub mod shm;
pub mod tcp;
pub mod ucx;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;
use towline_wire::card::AgentCard;
use towline_wire::frame::Status;
use towline_wire::id::{BootEpoch, Generation, LeaseId, RegionId};
use towline_wire::receipt::{Evidence, Op, TransportKind};

use crate::agent::Environment;
use crate::error::SessionError;
use crate::region::{Access, Memory, RegisterError};

mod outside;
mod slice;
pub(crate) use outside::Outside;
pub(crate) use slice::SliceParts;
pub use slice::{Moved, Slice, SliceSink};

/// A way to move bytes, opened by one agent.
pub trait Transport: Send + Sync {
    /// Its word.
    fn kind(&self) -> TransportKind;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Why it turned out not to be available, for one that opens in the background.
    fn unavailable(&self) -> Option<String> {
        None
    }

    /// Its address for the agent's card, at most 4096 bytes; nothing from one that opens in the background and tells later.
    fn endpoint(&self) -> Option<Vec<u8>>;

    /// Offers `memory` to peers. Answers with the key for the card, at most 4096 bytes; with nothing when it doesn't offer it, or tells
    /// later.
    ///
    /// # Errors
    /// [`RegisterError`] when the memory is not of a kind that it can offer for `access`.
    fn register(
        &self,
        id: RegionId,
        memory: &Arc<Memory>,
        access: Access,
    ) -> Result<Option<Vec<u8>>, RegisterError>;

    /// Takes the offer back, as far as the transport can: see each transport.
    fn deregister(&self, id: RegionId);

    /// Opens a path to a peer whose card was authenticated. Returns at once; `opened` gets the path, or why there is
    /// none, before [`PeerAddress::until`].
    fn connect(&self, peer: &PeerAddress, opened: Opened);
}

/// One peer over one transport. One that is dropped without having been closed lets what was posted come to its end: the
/// agent replaces paths while slices of theirs wait.
pub trait Path: Send + Sync {
    /// What shows that bytes go this way.
    fn evidence(&self) -> Evidence;

    /// What shows it for one region, where not all are reached alike: what receipts carry.
    fn evidence_of(&self, _region: RegionId) -> Evidence {
        self.evidence()
    }

    /// Its devices or streams, local side to remote side, for receipts. [`Moved::rail`] counts them; more may join
    /// while the path lives, at most 64.
    fn rails(&self) -> Vec<String>;

    /// Starts a slice. Never blocks for the copy, save for slices so small that handing over costs more.
    fn post(&self, slice: Slice);

    /// Ends the path: no slice is started any more, and each outstanding one completes once nothing can touch its
    /// local memory any more, for a lack of better news with [`PathError::Down`]. May be called twice.
    fn close(&self);
}

/// Takes the outcome of [`Transport::connect`].
pub type Opened = Box<dyn FnOnce(Result<Arc<dyn Path>, PathError>) + Send>;

/// What a path tells about itself when no slice is there to tell it.
pub trait PathEvents: Send + Sync {
    /// The path works no more: [`PathError::Closed`] when this side ended it, else [`PathError::Down`].
    fn handle_down(&self, reason: &PathError);
}

/// A peer that proved itself, and what it offers.
#[derive(Clone)]
pub struct PeerAddress {
    /// Its card.
    pub card: Arc<AgentCard>,
    /// Where its control session was reached.
    pub socket: SocketAddr,
    /// When the caller stops waiting for the path.
    pub until: Instant,
    /// Whether the caller wants this transport and no other, and so waits while it is opened in the background.
    pub insists: bool,
    /// Whom to tell that the path went down.
    pub events: Arc<dyn PathEvents>,
}

/// What a transport can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether data moves without the peer's CPU: then a stopped peer can still be read, and its fence is the guard.
    pub one_sided: bool,
    /// Whether it can reach memory of a device.
    pub device_memory: bool,
    /// Whether each request's region, bounds and lease are checked by the serving side.
    pub checked_by_owner: bool,
    /// Whether slices complete in the order of posting.
    pub ordered: bool,
    /// Most extents in a slice.
    pub extents_max: usize,
}

/// Why a path did not do what it was asked.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathError {
    /// The connection is lost or was never made.
    #[error("{0}")]
    Down(String),
    /// Another incarnation of the peer answered.
    #[error("the peer was restarted, and has boot epoch {found}")]
    Restarted {
        /// The one that answered.
        found: BootEpoch,
    },
    /// This side closed it.
    #[error("{0}")]
    Closed(String),
    /// The owner refused the request.
    #[error("the owner refused: {0:?}")]
    Refused(Status),
    /// It is still being opened in the background, on the side that is named. A newer card may offer it.
    #[error("{0} is still opening it")]
    Opening(&'static str),
    /// The transport does not apply to this peer, with the reason.
    #[error("{0}")]
    Unfit(String),
    /// Not started, because nobody wants it any more.
    #[error("not started")]
    Unwanted,
}

/// The lease that a slice reads under.
pub type Lease = Option<(LeaseId, Generation)>;

/// How a transport of this build is opened.
pub(crate) struct Entry {
    pub(crate) kind: TransportKind,
    /// Opens it for an agent, or says why it is not available.
    pub(crate) open: fn(&Arc<Environment>) -> Availability,
}

/// A transport, or why an agent does not have it.
pub(crate) type Availability = Result<Arc<dyn Transport>, String>;

/// The transports of this build, preferred first.
pub(crate) static REGISTRY: [Entry; 3] = [
    Entry { kind: TransportKind::Shm, open: shm::open },
    Entry { kind: TransportKind::Ucx, open: ucx::open },
    Entry { kind: TransportKind::Tcp, open: tcp::open },
];

impl From<SessionError> for PathError {
    fn from(error: SessionError) -> Self {
        match error {
            SessionError::Closed(reason) => Self::Closed(reason.into()),
            SessionError::Restarted(found) => Self::Restarted { found },
            other => Self::Down(other.to_string()),
        }
    }
}

/// Refuses to write where peers may only read.
pub(crate) fn refuse_write(op: Op, access: Access) -> Result<(), PathError> {
    match (op, access) {
        (Op::Write, Access::PeersRead) => Err(PathError::Refused(Status::NotWritable)),
        _ => Ok(()),
    }
}
