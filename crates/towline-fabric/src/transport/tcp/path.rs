//! One peer over TCP: a queue of slices and the streams that take from it.
//!
//! The first stream is dialled when the peer is connected to, the others when a transfer comes that is large enough to
//! feed them ([`SPREAD_BYTES`]): a peer that only heartbeats costs one. A stream that cannot be opened is done without;
//! one that breaks later takes the path down, as the peer is gone or about to be.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use towline_wire::auth::{Identity, Purpose};
use towline_wire::receipt::{Evidence, EvidenceClass, TransportKind};

use super::client::TcpClient;
use crate::agent::Environment;
use crate::control::{Dialling, Welcome};
use crate::error::SessionError;
use crate::io::{Channel, Mailbox, ReaderIndex, Refusal, Session, Socket};
use crate::transport::{Opened, Path, PathError, PathEvents, PeerAddress, Slice};

/// A transfer of this size has the other streams dialled: two slices.
const SPREAD_BYTES: u64 = 4 << 20;
/// Time for a further stream to open; transfers don't wait for it.
const DIAL: Duration = Duration::from_secs(2);

/// What the streams of a path share.
pub(super) struct Shared {
    pub(super) environment: Arc<Environment>,
    pub(super) mailbox: Arc<Mailbox<Slice>>,
    pub(super) expected: Identity,
    pub(super) events: Arc<dyn PathEvents>,
    rails: Mutex<Vec<String>>,
}

impl Shared {
    /// Names a stream that opened; its number among the rails.
    pub(super) fn add_rail(&self, name: String) -> usize {
        let mut rails = self.rails();
        rails.push(name);
        rails.len() - 1
    }

    fn rails(&self) -> MutexGuard<'_, Vec<String>> {
        self.rails.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dials the first stream.
pub(super) fn connect(environment: &Arc<Environment>, peer: &PeerAddress, opened: Opened) {
    if peer.card.endpoint(TransportKind::Tcp).is_none() {
        return opened(Err(PathError::Unfit("the peer does not offer it".into())));
    }
    let shared = Arc::new(Shared {
        environment: Arc::clone(environment),
        // Bounded by what the agent's transfers may have in flight together.
        mailbox: Mailbox::new(environment.limits.transfers.saturating_mul(16)),
        expected: Identity { agent: peer.card.agent.clone(), boot_epoch: peer.card.boot_epoch },
        events: Arc::clone(&peer.events),
        rails: Mutex::default(),
    });
    let path = Arc::new(TcpPath { socket: peer.socket, shared, spread: AtomicBool::new(false) });
    path.dial(Opening { until: peer.until, first: Some((opened, Arc::clone(&path))) });
}

struct TcpPath {
    socket: SocketAddr,
    shared: Arc<Shared>,
    /// Whether the further streams have been dialled.
    spread: AtomicBool,
}

impl TcpPath {
    fn dial(&self, opening: Opening) {
        let socket = match Socket::connect(self.socket) {
            Ok(socket) => socket,
            Err(error) => return opening.fail(&self.shared, error.into()),
        };
        let io = self.shared.environment.next_lane();
        let id = io.reserve();
        let reader = self.shared.mailbox.join(io, id);
        let until = opening.until;
        let welcome = Box::new(Connected { shared: Arc::clone(&self.shared), reader, opening });
        io.spawn_at(id, Dialling::new(socket, &self.shared.environment, (Purpose::Data, until), welcome));
    }

    fn spread(&self) {
        if !self.spread.swap(true, Ordering::Relaxed) {
            for _ in 1..self.shared.environment.streams() {
                self.dial(Opening { until: Instant::now() + DIAL, first: None });
            }
        }
    }
}

impl Path for TcpPath {
    fn evidence(&self) -> Evidence {
        Evidence { class: EvidenceClass::LibraryExact, source: "socket".into() }
    }

    fn rails(&self) -> Vec<String> {
        self.shared.rails().clone()
    }

    fn post(&self, slice: Slice) {
        if slice.part_of_bytes() >= SPREAD_BYTES {
            self.spread();
        }
        if let Err((slice, refusal)) = self.shared.mailbox.push(slice) {
            let error = match refusal {
                Refusal::Full => PathError::Down("its queue is full".into()),
                Refusal::Shut(why) => why.into(),
            };
            slice.complete(Err(error));
        }
    }

    fn close(&self) {
        self.shared.mailbox.close();
    }
}

/// What a stream's opening leads to: for the first one the path.
pub(super) struct Opening {
    pub(super) until: Instant,
    first: Option<(Opened, Arc<TcpPath>)>,
}

impl Opening {
    pub(super) fn succeed(self) {
        if let Some((opened, path)) = self.first {
            opened(Ok(path));
        }
    }

    pub(super) fn fail(self, shared: &Shared, why: SessionError) {
        match self.first {
            Some((opened, _)) => {
                shared.mailbox.shut(&why);
                opened(Err(why.into()));
            }
            None => tracing::info!(peer = %shared.expected.agent, %why, "going on with fewer streams"),
        }
    }
}

struct Connected {
    shared: Arc<Shared>,
    reader: ReaderIndex,
    opening: Opening,
}

impl Welcome for Connected {
    fn proceed(self: Box<Self>, channel: Channel) -> Result<Box<dyn Session>, SessionError> {
        let Self { shared, reader, opening } = *self;
        match TcpClient::open(channel, (Arc::clone(&shared), reader), opening) {
            Ok(client) => Ok(client),
            Err((why, opening)) => {
                opening.fail(&shared, why.clone());
                Err(why)
            }
        }
    }

    fn handle_failed(self: Box<Self>, why: SessionError) {
        self.opening.fail(&self.shared, why);
    }
}
