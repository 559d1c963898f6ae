//! What an agent and its connections are asked to be.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::blocks::Extent;
use towline_wire::card::Fingerprint;
use towline_wire::contract::Contract;
use towline_wire::engine_card::EngineCard;
use towline_wire::frame::Status;
use towline_wire::id::{AgentName, BootEpoch, EngineId, Generation, LeaseId, RegionId};
use towline_wire::lease::LeaseError;
use towline_wire::receipt::TransportKind;

use crate::telemetry::Telemetry;
use crate::transport::ucx::UcxConfig;

/// Where agents of one host find each other's shared memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ShmConfig {
    /// Nowhere: the transport is not offered.
    Off,
    /// A socket in this directory, made if it is missing; mount it into every container that should be reached.
    Dir(PathBuf),
    /// An abstract socket: every process in the same network namespace reaches it.
    #[default]
    Abstract,
}

/// Bounds of one agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Authenticated sessions from peers at a time, and foreign regions that they have the address of. Default 4096: 1,000
    /// peers with a control session and three streams.
    pub sessions: usize,
    /// Connections that have not proved themselves yet. Default 64: each may last 2 s and costs one file.
    pub unauthenticated: usize,
    /// Transfers in flight. Default 4096: bounds the queues of the copy threads and of the connections.
    pub transfers: usize,
    /// Peers connected to. Default 1024.
    pub peers: usize,
    /// How often a peer with held leases ([`Peer::hold`](crate::Peer::hold)) is told so, in one message for all of them.
    /// Default 5 s, at least 10 ms: a sixth of the default lease, so that several may be lost.
    pub heartbeat: Duration,
    /// How long a peer keeps its path without a transfer, a call or a held lease. Default 60 s, at least 10 ms. Opening it
    /// again takes a round trip or a mapping.
    pub path_idle: Duration,
    /// How long after that it keeps its control session, likewise. Default 10 min, at least 10 ms. Connecting again takes
    /// three round trips and a mapping. `Duration::MAX` keeps either for good.
    pub session_idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 4096,
            unauthenticated: 64,
            transfers: 4096,
            peers: 1024,
            heartbeat: Duration::from_secs(5),
            path_idle: Duration::from_secs(60),
            session_idle: Duration::from_secs(600),
        }
    }
}

/// What an agent is.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Its name, unique among the agents that talk to each other.
    pub name: AgentName,
    /// The engine it belongs to.
    pub engine: EngineId,
    /// The cluster's secret.
    pub key: ClusterKey,
    /// Where it listens, for control and data alike; port 0 takes a free one.
    pub listen: SocketAddr,
    /// `host:port` that peers dial, when it is not the address listened on.
    pub advertise: Option<String>,
    /// Shared memory.
    pub shm: ShmConfig,
    /// Whether data may go over TCP. Control always does.
    pub tcp: bool,
    /// What its KV means.
    pub fingerprint: Fingerprint,
    /// Threads that copy over shared memory, 1 to 64; 2 saturate most hosts' memory for one socket.
    pub copy_threads: usize,
    /// TCP streams to a peer and threads that serve streams, 1 to 16. Small transfers use the first; the others are
    /// dialled when a large one comes. 2 saturate loopback on two cores; a fast network wants 4 to 8.
    pub tcp_streams: usize,
    /// Bounds.
    pub limits: Limits,
    /// UCX, if it is to be opened.
    pub ucx: Option<UcxConfig>,
    /// Who is told what each transfer came to.
    pub telemetry: Option<Arc<dyn Telemetry>>,
}

/// What a region is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegionRole {
    /// The KV pool; the card names it.
    Kv,
    /// The fence slots; the card names it.
    Fence,
    /// Anything else.
    #[default]
    Plain,
}

/// How memory is registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionOptions {
    /// What it is for.
    pub role: RegionRole,
    /// Whether peers may write into it; the memory must be made, or wrapped, with
    /// [`Access::PeersWrite`](crate::region::Access).
    pub peer_writable: bool,
    /// Whether each request must name a lease, which [`Owner::admit`] then judges.
    pub leased: bool,
}

/// Which transport a connection uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// The best one whose probe succeeds; why others were passed over is kept ([`Peer::passed_over`](crate::Peer)).
    #[default]
    Auto,
    /// This one or none.
    Only(TransportKind),
}

/// What a connection must be.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Who must answer.
    pub agent: Option<AgentName>,
    /// Which incarnation must answer, else [`ConnectError::PeerRestarted`](crate::ConnectError).
    pub boot_epoch: Option<BootEpoch>,
    /// What the peer's KV must mean, else [`ConnectError::Incompatible`](crate::ConnectError).
    pub fingerprint: Option<Fingerprint>,
    /// What the path must be, else [`ConnectError::ContractViolation`](crate::ConnectError).
    pub contract: Contract,
    /// Which transport.
    pub transport: TransportChoice,
    /// Time for everything: dial, handshake, card, path.
    pub deadline: Duration,
}

impl Default for ConnectOptions {
    /// Anybody, over anything, within 5 s: a handshake takes three round trips, a mapping milliseconds.
    fn default() -> Self {
        Self {
            agent: None,
            boot_epoch: None,
            fingerprint: None,
            contract: Contract::default(),
            transport: TransportChoice::Auto,
            deadline: Duration::from_secs(5),
        }
    }
}

/// What the serving side asks the application. Called on the threads that serve peers, [`Owner::admit`] on several at
/// once: answer at once, never block, never wait for a [`Pending`](crate::Pending). A panic stops the agent.
pub trait Owner: Send + Sync {
    /// Whether a peer may read or write `extents` of `region` under `lease`. Region, bounds, and that a leased region
    /// is asked for with a lease, are checked before. Asked for each request of at most 2 MiB, over transports whose
    /// requests the owner sees (tcp).
    ///
    /// # Errors
    /// What the peer is told.
    fn admit(
        &self,
        region: RegionId,
        lease: Option<(LeaseId, Generation)>,
        extents: &[Extent],
    ) -> Result<(), Status>;

    /// A reader needs the lease no more.
    ///
    /// # Errors
    /// [`LeaseError`], which the peer is told.
    fn handle_release(
        &self,
        peer: &Identity,
        lease: LeaseId,
        generation: Generation,
    ) -> Result<(), LeaseError>;

    /// A reader still wants these leases.
    fn handle_heartbeat(&self, peer: &Identity, leases: &[LeaseId]);

    /// A peer's notification: after the data of the transfer it belongs to.
    fn handle_notify(&self, peer: &Identity, payload: Vec<u8>);

    /// The card of the engine that this agent belongs to, for a peer that asks; by default none.
    fn engine_card(&self) -> Option<EngineCard> {
        None
    }

    /// A peer's control session ended: it is gone, or was idle for long.
    fn handle_peer_gone(&self, peer: &Identity);
}
