//! What sessions, transports and transfers of one agent share.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use towline_topo::place::Place;
use towline_topo::system::Live;
use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::card::{AgentCard, Endpoint, Fingerprint};
use towline_wire::id::{BootEpoch, EngineId};

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

/// One agent's identity, books and threads.
pub(crate) struct Environment {
    pub(crate) identity: Identity,
    pub(crate) key: ClusterKey,
    pub(crate) limits: Limits,
    pub(crate) shm: ShmConfig,
    pub(crate) tcp: bool,
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
    endpoints: OnceLock<Vec<Endpoint>>,
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
            endpoints: OnceLock::new(),
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

    /// Sets the card's endpoints, once, before anybody can ask for it.
    pub(crate) fn publish_endpoints(&self, endpoints: Vec<Endpoint>) {
        let _ = self.endpoints.set(endpoints);
    }

    /// The card as it is now.
    pub(crate) fn card(&self) -> AgentCard {
        let (regions, roles, revision) = self.regions.cards();
        AgentCard {
            agent: self.identity.agent.clone(),
            engine: self.engine,
            boot_epoch: self.identity.boot_epoch,
            endpoints: self.endpoints.get().cloned().unwrap_or_default(),
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
