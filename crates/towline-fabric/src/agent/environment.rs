//! What sessions, transports and transfers of one agent share.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towline_topo::place::Place;
use towline_topo::system::Live;
use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::card::{AgentCard, Endpoint, Fingerprint};
use towline_wire::id::{BootEpoch, EngineId, RegionId};
use towline_wire::receipt::TransportKind;

use super::config::{AgentConfig, Limits, Owner, ShmConfig};
use super::lease::Heart;
use super::pair::Refused;
use super::place;
use super::region::Regions;
use super::stats::Counters;
use crate::control::Subscribers;
use crate::io::Io;
use crate::telemetry::Telemetry;
use crate::transport::shm::Copiers;
use crate::transport::ucx::UcxConfig;

/// One agent's identity, books and threads.
pub(crate) struct Environment {
    pub(crate) identity: Identity,
    pub(crate) key: ClusterKey,
    pub(crate) limits: Limits,
    pub(crate) shm: ShmConfig,
    pub(crate) tcp: bool,
    pub(crate) ucx: Option<UcxConfig>,
    pub(crate) telemetry: Option<Arc<dyn Telemetry>>,
    pub(crate) owner: Arc<dyn Owner>,
    /// Control sessions, deadlines, listeners, and the first lane.
    pub(crate) io: Arc<Io>,
    /// The lanes beside it: data streams are spread over all of them.
    more_lanes: Vec<Arc<Io>>,
    next_lane: AtomicUsize,
    pub(crate) regions: Regions,
    pub(crate) counters: Counters,
    pub(crate) copiers: Copiers,
    pub(crate) refused: Refused,
    pub(crate) heart: Arc<Heart>,
    /// Control sessions of peers that follow the card.
    pub(crate) subscribers: Subscribers,
    /// Where this process runs.
    pub(crate) place: Place,
    engine: EngineId,
    fingerprint: Fingerprint,
    endpoints: Mutex<Vec<Endpoint>>,
}

impl Environment {
    pub(crate) fn new(
        config: AgentConfig,
        owner: Arc<dyn Owner>,
        (io, more_lanes): (Arc<Io>, Vec<Arc<Io>>),
    ) -> io::Result<Self> {
        let boot_epoch = BootEpoch(u64::from_le_bytes(random()?));
        Ok(Self {
            identity: Identity { agent: config.name, boot_epoch },
            key: config.key,
            limits: config.limits,
            shm: config.shm,
            tcp: config.tcp,
            ucx: config.ucx,
            telemetry: config.telemetry,
            owner,
            more_lanes,
            next_lane: AtomicUsize::new(0),
            regions: Regions::default(),
            counters: Counters::default(),
            copiers: Copiers::new(config.copy_threads),
            refused: Refused::default(),
            heart: Heart::new(&io, config.limits.heartbeat),
            subscribers: Subscribers::default(),
            place: place::read(&Live),
            engine: config.engine,
            fingerprint: config.fingerprint,
            endpoints: Mutex::default(),
            io,
        })
    }

    /// The thread for the next data stream: in turn.
    pub(crate) fn next_lane(&self) -> &Arc<Io> {
        let turn = self.next_lane.fetch_add(1, Ordering::Relaxed);
        match turn % self.streams() {
            0 => &self.io,
            further => &self.more_lanes[further - 1],
        }
    }

    /// Streams that a path may have.
    pub(crate) fn streams(&self) -> usize {
        1 + self.more_lanes.len()
    }

    /// Ends every thread.
    pub(crate) fn stop(&self) {
        self.more_lanes.iter().chain([&self.io]).for_each(|io| io.stop());
    }

    /// Puts a transport on the card, before anybody can ask for it.
    pub(crate) fn publish(&self, endpoint: Endpoint) {
        self.endpoints().push(endpoint);
    }

    /// Puts one on the card that was opened later, with its keys for regions; peers that follow the card are told.
    pub(crate) fn offer(&self, endpoint: Endpoint, keys: Vec<(RegionId, Vec<u8>)>) {
        let transport = endpoint.transport;
        self.endpoints().retain(|before| before.transport != transport);
        self.publish(endpoint);
        self.regions.offer(transport, keys);
        Subscribers::announce(self);
    }

    /// Takes one off the card that couldn't be opened.
    pub(crate) fn withdraw(&self, transport: TransportKind) {
        self.endpoints().retain(|endpoint| endpoint.transport != transport);
        self.regions.offer(transport, Vec::new());
        Subscribers::announce(self);
    }

    fn endpoints(&self) -> MutexGuard<'_, Vec<Endpoint>> {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The card as it is now.
    pub(crate) fn card(&self) -> AgentCard {
        let (regions, roles, revision) = self.regions.cards();
        AgentCard {
            agent: self.identity.agent.clone(),
            engine: self.engine,
            boot_epoch: self.identity.boot_epoch,
            endpoints: self.endpoints().clone(),
            regions,
            fingerprint: self.fingerprint.clone(),
            fence_region: roles.fence,
            kv_region: roles.kv,
            revision,
            place: place::to_json(&self.place),
        }
    }
}

/// Fresh random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}
