//! The agent: regions, peers and transfers of one role in one process.
//!
//! Several may live in one process; each has its own threads, port and keys. [`Agent`] is a handle: the last clone that
//! goes stops the threads and closes every session. Regions and peers outlive it harmlessly: they find it closed.

mod book;
mod config;
mod connect;
mod connection;
mod environment;
mod estimate;
mod follow;
mod handle;
mod job;
mod lease;
mod pair;
mod peer;
mod place;
mod plan;
mod region;
mod stats;
mod transfer;
mod view;
mod waiting;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use towline_topo::place::Place;
use towline_wire::auth::Identity;
use towline_wire::card::{AgentCard, CardError, Endpoint};
use towline_wire::carried_card::{CarriedCard, CarriedCardError};
use towline_wire::id::{AgentName, BootEpoch, RegionId};
use towline_wire::receipt::TransportKind;

pub use book::Totals;
pub use config::{
    AgentConfig, ConnectOptions, Limits, Owner, RegionOptions, RegionRole, ShmConfig, TransportChoice,
};
pub(crate) use environment::{Environment, random};
pub use lease::HeldLease;
pub use peer::Peer;
pub use region::Region;
pub(crate) use region::RegionEntry;
pub(crate) use stats::Seat;
pub use stats::{AgentStats, TransportTraffic};
pub use transfer::{Prepared, Transfer, TransferRequest};

use self::connect::Route;
use self::handle::Handle;
use crate::control::Listener;
use crate::error::{ConnectError, Reasons, StartError};
use crate::io::Reactor;
use crate::pending::{Pending, pending, ready};
use crate::region::{Memory, RegisterError};
use crate::transport::{Capabilities, Outside, REGISTRY, Transport};

/// Most data streams to a peer, each with a thread: beyond, a host's cores are better spent elsewhere.
const TCP_STREAMS_MAX: usize = 16;

/// One transport of this build, as an agent finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportStatus {
    /// Which.
    pub kind: TransportKind,
    /// What it can do here, or why it is not available.
    pub available: Result<Capabilities, String>,
}

fn unix_now() -> Duration {
    // A clock before 1970 reads as 1970.
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Registers memory, serves peers, connects to peers. A cheap handle; `Send + Sync`.
#[derive(Clone)]
pub struct Agent(Arc<Running>);

struct Running {
    environment: Arc<Environment>,
    transports: Vec<Arc<dyn Transport>>,
    statuses: Vec<TransportStatus>,
    bound: SocketAddr,
    address: String,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Agent {
    /// Starts the threads, opens what transports it can and listens.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: AgentConfig, owner: Arc<dyn Owner>) -> Result<Self, StartError> {
        Self::start_with(config, owner, Vec::new())
    }

    /// As [`Agent::start`], with transports of the application's own, which are preferred to those of this build. Bytes
    /// go over them like over any other; what they say of themselves is no proof ([`Evidence::proves`]) and meets no
    /// contract that wants one.
    ///
    /// [`Evidence::proves`]: towline_wire::receipt::Evidence::proves
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start_with(
        config: AgentConfig,
        owner: Arc<dyn Owner>,
        transports: Vec<Arc<dyn Transport>>,
    ) -> Result<Self, StartError> {
        let system = |step| move |error| StartError::System { step, error };
        let (listener, bound) = Listener::bind(config.listen)?;
        let (io, reactor) = Reactor::new().map_err(system("epoll"))?;
        let (mut more_lanes, mut reactors) = (Vec::new(), vec![reactor]);
        for _ in 1..config.tcp_streams.clamp(1, TCP_STREAMS_MAX) {
            let (lane, reactor) = Reactor::new().map_err(system("epoll"))?;
            more_lanes.push(lane);
            reactors.push(reactor);
        }
        let advertised = config.advertise.clone();
        let environment =
            Arc::new(Environment::new(config, owner, (io, more_lanes)).map_err(system("getrandom"))?);
        // From here on dropping `running` stops everything that was started.
        let mut running = Running {
            environment,
            threads: Mutex::default(),
            transports: Vec::new(),
            statuses: Vec::new(),
            bound,
            address: advertised.unwrap_or_else(|| bound.to_string()),
        };
        for (index, reactor) in reactors.into_iter().enumerate() {
            let name = if index == 0 { "towline-io".into() } else { format!("towline-io-{index}") };
            // An agent with one of its threads gone would serve some peers and not others.
            let all = Arc::downgrade(&running.environment);
            let panicked = move || all.upgrade().map_or((), |environment| environment.stop());
            let thread = reactor.start(&name, panicked).map_err(system("starting an io thread"))?;
            running.threads.get_mut().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        running.open_transports(transports)?;
        running.environment.io.spawn(listener.serve(&running.environment));
        Ok(Self(Arc::new(running)))
    }

    /// Makes memory a region that peers may read, and write if `options` say so, until the [`Region`] is dropped.
    ///
    /// # Errors
    /// [`RegisterError::Sealed`], [`RegisterError::Peers`], [`RegisterError::TooMany`].
    pub fn register(&self, memory: Arc<Memory>, options: RegionOptions) -> Result<Region, RegisterError> {
        Region::register(&self.0.environment, &self.0.transports, memory, options)
    }

    /// `host:port` that peers dial.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// The socket address listened on.
    pub fn bound(&self) -> SocketAddr {
        self.0.bound
    }

    /// Its name.
    pub fn name(&self) -> &AgentName {
        &self.identity().agent
    }

    /// Its incarnation.
    pub fn boot_epoch(&self) -> BootEpoch {
        self.identity().boot_epoch
    }

    /// Name and incarnation, as peers see them proved.
    pub fn identity(&self) -> &Identity {
        &self.0.environment.identity
    }

    /// Where it runs. A field that could not be read has no value.
    pub fn place(&self) -> &Place {
        &self.0.environment.place
    }

    /// What it offers now.
    pub fn card(&self) -> AgentCard {
        self.0.environment.card()
    }

    /// What it offers now, of these regions only.
    ///
    /// # Errors
    /// [`CardError::UnknownRegion`].
    pub fn card_of(&self, regions: &[RegionId]) -> Result<AgentCard, CardError> {
        self.card().with_regions(regions)
    }

    /// A card of this agent, whole or in part, as bytes for the caller to carry: in a file, over HTTP, through etcd. Whoever
    /// holds the cluster's key can use it for `valid_for` from now, with [`Agent::connect_card`].
    ///
    /// # Errors
    /// [`CarriedCardError::Address`] when the agent's address can't be dialled, [`CarriedCardError::Card`].
    pub fn seal_card(&self, card: AgentCard, valid_for: Duration) -> Result<Vec<u8>, CarriedCardError> {
        let expires_unix_s = unix_now().saturating_add(valid_for).as_secs();
        let address = self.address().to_owned();
        CarriedCard { card, address, expires_unix_s }.seal(&self.0.environment.key)
    }

    /// Dials `address` (`host:port`), proves itself, fetches the card, checks what `options` ask and opens a path.
    pub fn connect(&self, address: &str, options: ConnectOptions) -> Pending<Result<Peer, ConnectError>> {
        let (outcome, pending) = pending(|| Err(ConnectError::Closed { reason: "the agent stopped" }));
        let route = Route::new(&self.0.transports, &self.0.statuses, (address, options));
        let again = route.clone();
        let done = move |dialled: Result<_, _>| {
            outcome.complete(dialled.map(|(connection, view)| Peer(Handle::of(connection, again, view))));
        };
        connect::dial(&self.0.environment, route, None, Box::new(done));
        pending
    }

    /// A peer known by the bytes of [`Agent::seal_card`], which connects when it is used: to the address in the card and
    /// no other, over the transports in it, and only if the agent and the incarnation of the card answer there. Until then
    /// nothing is dialled and nothing is held.
    ///
    /// # Errors
    /// [`ConnectError::CarriedCard`]; [`ConnectError::WrongAgent`], [`ConnectError::PeerRestarted`] and
    /// [`ConnectError::Incompatible`] when the card is not of whom `options` want.
    pub fn introduce(&self, card: &[u8], options: ConnectOptions) -> Result<Peer, ConnectError> {
        let CarriedCard { card, address, .. } =
            CarriedCard::open(card, &self.0.environment.key, unix_now().as_secs())?;
        let route = Route::new(&self.0.transports, &self.0.statuses, (&address, options));
        route.check(&card)?;
        Ok(Peer(Handle::new(&self.0.environment, route.within(&card), Arc::new(card))))
    }

    /// As [`Agent::introduce`], and connects now.
    pub fn connect_card(&self, card: &[u8], options: ConnectOptions) -> Pending<Result<Peer, ConnectError>> {
        let peer = match self.introduce(card, options) {
            Ok(peer) => peer,
            Err(error) => return ready(Err(error)),
        };
        let (outcome, pending) = pending(|| Err(ConnectError::Closed { reason: "the agent stopped" }));
        let handle = Arc::clone(&peer.0);
        handle.wake(Box::new(move |connection| _ = outcome.complete(connection.map(|_| peer))));
        pending
    }

    /// The transports of this build, preferred first, each with its capabilities or the reason why it is unavailable.
    pub fn transports(&self) -> Vec<TransportStatus> {
        let mut statuses = self.0.statuses.clone();
        for transport in &self.0.transports {
            if let Some(reason) = transport.unavailable() {
                let status = statuses.iter_mut().find(|status| status.kind == transport.kind());
                status.into_iter().for_each(|status| status.available = Err(reason.clone()));
            }
        }
        statuses
    }

    /// Counters since the start, for metrics.
    pub fn stats(&self) -> AgentStats {
        self.0.environment.counters.snapshot()
    }
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Agent({} at {})", self.name(), self.address())
    }
}

impl Running {
    fn open_transports(&mut self, outside: Vec<Arc<dyn Transport>>) -> Result<(), StartError> {
        for transport in outside {
            let available = Ok(transport.capabilities());
            self.statuses.push(TransportStatus { kind: transport.kind(), available });
            self.transports.push(Arc::new(Outside(transport)));
        }
        for entry in &REGISTRY {
            let opened = (entry.open)(&self.environment);
            let available = opened.map(|transport| {
                let capabilities = transport.capabilities();
                self.transports.push(transport);
                capabilities
            });
            if let Err(reason) = &available {
                tracing::info!(transport = %entry.kind, reason, "transport not available");
            }
            self.statuses.push(TransportStatus { kind: entry.kind, available });
        }
        if self.transports.is_empty() {
            let reasons =
                self.statuses.drain(..).filter_map(|s| Some((s.kind, s.available.err()?))).collect();
            return Err(StartError::NoTransport { reasons: Reasons(reasons) });
        }
        for transport in &self.transports {
            if let Some(address) = transport.endpoint() {
                self.environment.publish(Endpoint { transport: transport.kind(), address });
            }
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.environment.stop();
        for thread in std::mem::take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner)) {
            // A callback may hold the last handle; its thread cannot join itself and ends right after.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        self.environment.copiers.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_go_to_any_thread() {
        fn shared<T: Send + Sync>() {}
        shared::<Agent>();
        shared::<Peer>();
        shared::<Region>();
        shared::<Prepared>();
        shared::<Transfer>();
        shared::<Pending<Result<Peer, ConnectError>>>();
    }
}
