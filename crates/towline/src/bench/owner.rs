//! The process whose memory is read and written: `towline bench kv --listen`, or a child of the sweep.
//!
//! It does what its leader says (`message`), on a thread of its own, since the agent's callbacks may not block. The
//! leader is the first peer that commands; others are not heard until it has gone, or two sweeps would spoil each other.

use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use clap::ArgMatches;
use serde_json::json;
use towline_fabric::{
    Access, Agent, AgentConfig, Limits, Memory, Owner, Region, RegionOptions, RegionRole, ShmConfig,
};
use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::blocks::Extent;
use towline_wire::card::Fingerprint;
use towline_wire::frame::Status;
use towline_wire::id::{AgentName, EngineId, Generation, LeaseId, RegionId};
use towline_wire::lease::LeaseError;

use super::flags::KvArgs;
use super::flood::{self, Lent};
use super::machine;
use super::message::{self, CONTROL_BYTES, Command, Contents, Filling, Order, Outcome, Place};
use super::pattern::{self, Arrival, Seed};
use super::raw::Mapping;
use super::shape::{Shape, Side};
use crate::cli::{Format, Global};
use crate::{out, stop, worker};

/// Commands waiting to be carried out: a leader sends one and waits for its answer.
const ORDERS_MAX: usize = 16;

/// Serves until told to stop.
pub(crate) fn run(global: &Global, args: &KvArgs, matches: &ArgMatches) -> Result<()> {
    let listen = args.listen.context("no address")?;
    let Some(key) = worker::given_key(args.cluster_key_file.as_deref(), matches)? else {
        bail!(
            "--listen needs the cluster's key: give --cluster-key-file FILE or {}, 64 hexadecimal digits, the same \
             for the process that connects",
            worker::KEY_VARIABLE
        );
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("can't start")?;
    runtime.block_on(async {
        let stopped = stop::watch(args.stop_with_parent)?;
        let config =
            AgentConfig { listen, ucx: args.ucx(), ..agent_config("owner", key, Threads::of(args))? };
        let serving = Serving::start(config)?;
        announce(global.format, serving.agent.address())?;
        stopped.cancelled().await;
        drop(serving);
        Ok(())
    })
}

fn announce(format: Format, address: &str) -> Result<()> {
    out::line(&match format {
        Format::Human => format!("listening on {address}"),
        Format::Json => json!({ "event": "listening", "kv": address }).to_string(),
    })
}

/// Threads of an agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Threads {
    pub(crate) copy: usize,
    pub(crate) streams: usize,
}

impl Threads {
    /// As the flags say.
    pub(crate) fn of(args: &KvArgs) -> Self {
        Self { copy: args.copy_threads.into(), streams: args.tcp_streams.into() }
    }
}

/// An agent of a benchmark on a free loopback port: `role` and random digits are its name.
pub(crate) fn agent_config(role: &str, key: ClusterKey, threads: Threads) -> Result<AgentConfig> {
    let name = format!("bench-{role}-{:08x}", random()? >> 32);
    let config = AgentConfig {
        name: AgentName::new(name)?,
        engine: EngineId::from_bytes([0; 16]),
        key,
        listen: ([127, 0, 0, 1], 0).into(),
        advertise: None,
        shm: ShmConfig::Abstract,
        tcp: true,
        fingerprint: Fingerprint::default(),
        copy_threads: threads.copy,
        tcp_streams: threads.streams,
        limits: Limits::default(),
        ucx: None,
        telemetry: None,
    };
    Ok(config)
}

/// A random number.
pub(crate) fn random() -> Result<u64> {
    getrandom::u64().map_err(|error| anyhow!("no random numbers: {error}"))
}

/// An owner at work.
pub(crate) struct Serving {
    pub(crate) agent: Agent,
    _control: Region,
}

impl Serving {
    /// Starts an agent, its control region and its raw streams.
    pub(crate) fn start(config: AgentConfig) -> Result<Self> {
        let ip = config.listen.ip();
        let (sender, orders) = sync_channel(ORDERS_MAX);
        let ears = Arc::new(Ears { orders: sender, leader: Mutex::default() });
        let agent = Agent::start(config, ears)?;
        let token = [random()?, random()?];
        let lent = Lent::default();
        let port = flood::serve(ip, token, lent.clone())?;
        let control = Arc::new(Memory::allocate("bench-control", CONTROL_BYTES)?);
        message::introduce(&control, Some((port, token)))?;
        // The card names one fence region and one KV region: the control page and the data.
        let options = RegionOptions { role: RegionRole::Fence, ..RegionOptions::default() };
        let region = agent.register(Arc::clone(&control), options)?;
        let hands = Hands { agent: agent.clone(), control, lent, data: None };
        let work = move || hands.work(&orders);
        std::thread::Builder::new().name("bench-owner".into()).spawn(work).context("can't start a thread")?;
        Ok(Self { agent, _control: region })
    }
}

/// Hears commands.
struct Ears {
    orders: SyncSender<Order>,
    leader: Mutex<Option<Identity>>,
}

impl Owner for Ears {
    fn admit(&self, _: RegionId, _: Option<(LeaseId, Generation)>, _: &[Extent]) -> Result<(), Status> {
        Ok(())
    }

    fn handle_release(&self, _: &Identity, lease: LeaseId, _: Generation) -> Result<(), LeaseError> {
        Err(LeaseError::Over { lease })
    }

    fn handle_heartbeat(&self, _: &Identity, _: &[LeaseId]) {}

    fn handle_notify(&self, peer: &Identity, payload: Vec<u8>) {
        let mut leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if leader.get_or_insert_with(|| peer.clone()) != peer {
            tracing::warn!(peer = %peer.agent, "another sweep is under way: not heard");
            return;
        }
        match serde_json::from_slice(&payload) {
            // A full queue is a leader that doesn't wait for answers: it gets none.
            Ok(order) => _ = self.orders.try_send(order),
            Err(error) => tracing::warn!("a command of another version? {error}"),
        }
    }

    fn handle_peer_gone(&self, peer: &Identity) {
        let mut leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        leader.take_if(|leader| leader == peer);
    }
}

/// The owner of an agent that only initiates: it lends nothing and hears nobody.
pub(crate) struct Deaf;

impl Owner for Deaf {
    fn admit(&self, _: RegionId, _: Option<(LeaseId, Generation)>, _: &[Extent]) -> Result<(), Status> {
        Err(Status::UnknownRegion)
    }

    fn handle_release(&self, _: &Identity, lease: LeaseId, _: Generation) -> Result<(), LeaseError> {
        Err(LeaseError::Over { lease })
    }

    fn handle_heartbeat(&self, _: &Identity, _: &[LeaseId]) {}

    fn handle_notify(&self, _: &Identity, _: Vec<u8>) {}

    fn handle_peer_gone(&self, _: &Identity) {}
}

/// Carries commands out.
struct Hands {
    agent: Agent,
    control: Arc<Memory>,
    /// The data as the raw streams see it.
    lent: Lent,
    data: Option<Data>,
}

/// The memory of the case at hand.
struct Data {
    contents: Contents,
    memory: Arc<Memory>,
    _region: Region,
}

impl Hands {
    fn work(mut self, orders: &Receiver<Order>) {
        for Order { number, command } in orders {
            let outcome = self.obey(&command).unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
            if let Err(error) = message::answer(&self.control, number, &outcome) {
                tracing::error!("can't answer: {error:#}");
            }
        }
    }

    fn obey(&mut self, command: &Command) -> Result<Outcome> {
        match command {
            Command::Prepare(contents) => self.prepare(contents.clone())?,
            Command::Fill(filling) => self.data()?.fill(*filling)?,
            Command::Check { seeds, poison } => {
                return Ok(self.data()?.check(seeds, *poison)?.map_or(Outcome::Done, Outcome::Wrong));
            }
            Command::Mark => {}
        }
        Ok(Outcome::Done)
    }

    fn data(&self) -> Result<&Data> {
        self.data.as_ref().context("nothing was prepared")
    }

    fn prepare(&mut self, contents: Contents) -> Result<()> {
        let bytes = contents.region_bytes().context("a shape that overflows")?;
        if let Some(data) = self.data.as_mut().filter(|data| data.memory.len() == bytes) {
            data.contents = contents;
            return Ok(());
        }
        // Before the new one is allocated: both may not fit.
        self.lent.set(None);
        self.data = None;
        machine::room_for(bytes)?;
        let memory = Arc::new(Memory::allocate_for("bench-kv", bytes, Access::PeersWrite)?);
        let mapping = Mapping::of(&memory)?;
        let file = memory.fd().context("the memory has no file")?.as_raw_fd();
        let place = Place { address: mapping.address(), file: file.try_into()? };
        message::show_place(&self.control, place)?;
        self.lent.set(Some(Arc::new(mapping)));
        let options = RegionOptions { role: RegionRole::Kv, peer_writable: true, leased: false };
        let region = self.agent.register(Arc::clone(&memory), options)?;
        self.data = Some(Data { contents, memory, _region: region });
        Ok(())
    }
}

impl Data {
    fn fill(&self, filling: Filling) -> Result<()> {
        match (filling, &self.contents) {
            (Filling::Data(seed), Contents::Rank(rank)) => rank.fill(&self.memory, seed),
            (Filling::Data(seed) | Filling::Poison(seed), _) => pattern::fill(&self.memory, seed),
        }
    }

    fn check(&self, seeds: &[Seed], poison: Seed) -> Result<Option<pattern::WrongByte>> {
        match &self.contents {
            Contents::Pages(shape) => self.check_pages(shape, seeds, poison),
            Contents::Rank(rank) => rank.check(&self.memory, *seeds.first().context("no seed")?, poison),
        }
    }

    /// Checks all lanes. Each seed is that of a group of lanes whose source is one memory.
    fn check_pages(&self, shape: &Shape, seeds: &[Seed], poison: Seed) -> Result<Option<pattern::WrongByte>> {
        let group = usize::try_from(shape.lanes)?.checked_div(seeds.len()).context("no seeds")?;
        for lane in 0..shape.lanes {
            let (index, seed) = (lane as usize % group.max(1), seeds.get(lane as usize / group.max(1)));
            let span = shape.span_bytes();
            let arrival = Arrival {
                source: &shape.list(Side::Local, lane, index as u64 * span),
                destination: &shape.list(Side::Remote, lane, u64::from(lane) * span),
                slots: shape.slots,
                seed: *seed.context("fewer seeds than groups of lanes")?,
                poison,
            };
            if let Some(wrong) = pattern::check(&self.memory, &arrival)? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }
}
