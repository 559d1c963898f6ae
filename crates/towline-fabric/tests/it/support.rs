//! Two agents and what their owners heard.

use std::any::Any;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use towline_fabric::{
    Access, Agent, AgentConfig, ConnectOptions, Limits, Memory, Owner, Peer, Pending, Region, RegionOptions,
    ShmConfig, TransferError, TransferRequest, TransportChoice, UcxConfig,
};
use towline_ffi::ucx::Ucx;
use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::blocks::{BlockList, Extent};
use towline_wire::card::{AgentCard, Fingerprint};
use towline_wire::frame::Status;
use towline_wire::id::{AgentName, EngineId, Generation, LeaseId, RegionId};
use towline_wire::lease::LeaseError;
use towline_wire::receipt::{EvidenceClass, Op, TransportKind};

use crate::skips;

/// The transports whose conformance is tested: all that this build has and that open here.
pub(crate) const KINDS: [TransportKind; 2] = [TransportKind::Shm, TransportKind::Tcp];

/// How the memory of an owner's region is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Made {
    /// By the fabric: peers of the host map it.
    Own,
    /// By somebody else: peers of the host have the kernel copy it.
    Foreign,
}

/// A transport, and what it reaches with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) kind: TransportKind,
    pub(crate) made: Made,
}

impl Case {
    /// The word that receipts have for it.
    pub(crate) fn word(self) -> &'static str {
        match (self.kind, self.made) {
            (TransportKind::Shm, Made::Own) => "mapping",
            (TransportKind::Shm, Made::Foreign) => "cma",
            (TransportKind::Ucx, _) => "library",
            _ => "socket",
        }
    }

    /// How strongly it is shown.
    pub(crate) fn class(self) -> EvidenceClass {
        match self.kind {
            TransportKind::Ucx => EvidenceClass::LibraryCapability,
            _ => EvidenceClass::LibraryExact,
        }
    }
}

/// What must behave alike.
pub(crate) const CASES: [Case; 4] = [
    Case { kind: TransportKind::Shm, made: Made::Own },
    Case { kind: TransportKind::Shm, made: Made::Foreign },
    Case { kind: TransportKind::Tcp, made: Made::Own },
    Case { kind: TransportKind::Tcp, made: Made::Foreign },
];

/// Those, and UCX where there is one: over its tcp, as no device is needed for that.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = CASES.to_vec();
    match has_ucx() {
        Ok(()) => {
            cases.extend([Made::Own, Made::Foreign].map(|made| Case { kind: TransportKind::Ucx, made }))
        }
        Err(why) => skips::note("UCX", &format!("{why} (apt-get install libucx0)")),
    }
    cases
}

/// UCX without devices, from the file that `TOWLINE_UCX_LIBRARY` names, if it does.
fn ucx_config() -> UcxConfig {
    let options = [("TLS", "tcp"), ("NET_DEVICES", "lo")].map(|(name, value)| (name.into(), value.into()));
    let library = std::env::var_os("TOWLINE_UCX_LIBRARY").map(PathBuf::from);
    UcxConfig { library, software: true, options: options.into() }
}

fn has_ucx() -> Result<(), String> {
    static OPENED: OnceLock<Result<(), String>> = OnceLock::new();
    let open = || Ucx::open(ucx_config().library.as_deref()).map(drop).map_err(|error| error.to_string());
    OPENED.get_or_init(open).clone()
}

/// Long enough for a loaded machine, short enough for a person.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn key() -> ClusterKey {
    ClusterKey::from_bytes([7; 32])
}

pub(crate) fn name(text: &str) -> AgentName {
    AgentName::new(text).unwrap()
}

/// An owner that admits one lease and writes down what it hears.
#[derive(Default)]
pub(crate) struct Book {
    heard: Mutex<Heard>,
    news: Condvar,
}

#[derive(Default)]
pub(crate) struct Heard {
    pub(crate) notes: VecDeque<(String, Vec<u8>)>,
    pub(crate) heartbeats: Vec<LeaseId>,
    /// The same, message by message.
    pub(crate) beats: Vec<Vec<LeaseId>>,
    pub(crate) gone: usize,
    pub(crate) released: Vec<LeaseId>,
}

/// The lease that a [`Book`] admits.
pub(crate) const LEASE: (LeaseId, Generation) = (LeaseId(5), Generation(6));

impl Book {
    /// Waits until what was heard is what `enough` wants.
    pub(crate) fn wait_for<T>(&self, mut enough: impl FnMut(&mut Heard) -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        let mut heard = self.heard.lock().unwrap();
        loop {
            if let Some(found) = enough(&mut heard) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "it was never heard");
            heard = self.news.wait_timeout(heard, left).unwrap().0;
        }
    }

    fn note(&self, write: impl FnOnce(&mut Heard)) {
        write(&mut self.heard.lock().unwrap());
        self.news.notify_all();
    }
}

impl Owner for Book {
    fn admit(&self, _: RegionId, lease: Option<(LeaseId, Generation)>, _: &[Extent]) -> Result<(), Status> {
        if lease.is_none_or(|lease| lease == LEASE) { Ok(()) } else { Err(Status::LeaseExpired) }
    }

    fn handle_release(&self, _: &Identity, lease: LeaseId, generation: Generation) -> Result<(), LeaseError> {
        if (lease, generation) != LEASE {
            return Err(LeaseError::Over { lease });
        }
        self.note(|heard| heard.released.push(lease));
        Ok(())
    }

    fn handle_heartbeat(&self, _: &Identity, leases: &[LeaseId]) {
        self.note(|heard| {
            heard.heartbeats.extend(leases);
            heard.beats.push(leases.to_vec());
        });
    }

    fn handle_notify(&self, peer: &Identity, payload: Vec<u8>) {
        self.note(|heard| heard.notes.push_back((peer.agent.to_string(), payload)));
    }

    fn handle_peer_gone(&self, _: &Identity) {
        self.note(|heard| heard.gone += 1);
    }
}

pub(crate) fn config(agent: &str) -> AgentConfig {
    AgentConfig {
        name: name(agent),
        engine: EngineId::from_bytes([1; 16]),
        key: key(),
        listen: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        shm: ShmConfig::Abstract,
        tcp: true,
        fingerprint: Fingerprint { rope: "base=10000".into(), ..Fingerprint::default() },
        copy_threads: 2,
        tcp_streams: 2,
        limits: Limits::default(),
        ucx: None,
        telemetry: None,
    }
}

pub(crate) fn start(config: AgentConfig) -> (Agent, Arc<Book>) {
    let book = Arc::new(Book::default());
    (Agent::start(config, Arc::<Book>::clone(&book)).unwrap(), book)
}

pub(crate) fn only(kind: TransportKind) -> ConnectOptions {
    ConnectOptions { transport: TransportChoice::Only(kind), deadline: PATIENCE, ..ConnectOptions::default() }
}

pub(crate) fn wait<T>(mut pending: Pending<T>) -> T {
    pending.wait(PATIENCE).expect("an answer in time")
}

/// An owner with a region, a reader, and the reader's peer.
pub(crate) struct Pair {
    pub(crate) peer: Peer,
    pub(crate) region: Region,
    pub(crate) owner: Agent,
    pub(crate) reader: Agent,
    pub(crate) book: Arc<Book>,
}

impl Pair {
    pub(crate) fn over(kind: TransportKind, bytes: u64, options: RegionOptions) -> Self {
        Self::of(Case { kind, made: Made::Own }, bytes, options)
    }

    pub(crate) fn of(Case { kind, made }: Case, bytes: u64, options: RegionOptions) -> Self {
        let access = if options.peer_writable { Access::PeersWrite } else { Access::PeersRead };
        let memory = match made {
            Made::Own => Arc::new(Memory::allocate_for("remote", bytes, access).unwrap()),
            Made::Foreign => foreign(bytes, access).0,
        };
        Self::to(kind, memory, options)
    }

    pub(crate) fn to(kind: TransportKind, memory: Arc<Memory>, options: RegionOptions) -> Self {
        let config = |name| {
            let ucx = (kind == TransportKind::Ucx).then(ucx_config);
            AgentConfig { ucx, ..config(name) }
        };
        let (owner, book) = start(config("owner"));
        let region = owner.register(memory, options).unwrap();
        let (reader, _) = start(config("reader"));
        let peer = wait(reader.connect(owner.address(), only(kind))).unwrap();
        assert_eq!(peer.transport(), kind);
        Self { peer, region, owner, reader, book }
    }

    pub(crate) fn request(
        &self,
        op: Op,
        local: &Arc<Memory>,
        blocks: (BlockList, BlockList),
    ) -> TransferRequest {
        request(op, local, self.region.id(), blocks)
    }
}

pub(crate) fn request(
    op: Op,
    local: &Arc<Memory>,
    remote_region: RegionId,
    (local_blocks, remote_blocks): (BlockList, BlockList),
) -> TransferRequest {
    let local = Arc::clone(local);
    let (lease, hold, notify) = (None, None, None);
    TransferRequest {
        op,
        local,
        local_blocks,
        remote_region,
        remote_blocks,
        lease,
        deadline: PATIENCE,
        hold,
        notify,
    }
}

pub(crate) fn memory(bytes: u64) -> Arc<Memory> {
    Arc::new(Memory::allocate("local", bytes).unwrap())
}

/// An engine's own buffer, wrapped, and what tells whether it is still kept.
#[expect(unsafe_code, reason = "it wraps a pointer")]
pub(crate) fn foreign(bytes: u64, access: Access) -> (Arc<Memory>, Weak<Buffer>) {
    let bytes = usize::try_from(bytes).unwrap();
    let buffer: Arc<Buffer> = Arc::new(std::iter::repeat_with(|| AtomicU8::new(0)).take(bytes).collect());
    let seen = Arc::downgrade(&buffer);
    let base = NonNull::new(buffer.as_ptr().cast_mut().cast()).unwrap();
    // SAFETY: atomics, kept by the guard, to which nobody else has a reference.
    let memory = unsafe { Memory::foreign(base, bytes as u64, access, buffer) };
    (Arc::new(memory.unwrap()), seen)
}

/// Bytes that may change behind the compiler's back.
pub(crate) type Buffer = Vec<AtomicU8>;

/// Blocks side by side: `indices` of `block_bytes` each.
pub(crate) fn blocks(block_bytes: u64, indices: impl IntoIterator<Item = u32>) -> BlockList {
    BlockList {
        group: 0,
        bases: vec![0],
        block_bytes,
        stride: block_bytes,
        indices: indices.into_iter().collect(),
    }
}

/// Bytes that tell their place and their `seed`.
pub(crate) fn pattern(seed: u8, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at ^ (at >> 8) ^ (at >> 16)) & 0xff).unwrap() ^ seed).collect()
}

pub(crate) fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.len()).unwrap()];
    memory.read_into(0, &mut bytes).unwrap();
    bytes
}

/// A hold whose release can be seen.
pub(crate) fn hold() -> (Arc<dyn Any + Send + Sync>, Weak<()>) {
    let held = Arc::new(());
    let seen = Arc::downgrade(&held);
    (held, seen)
}

/// Waits for something that comes without a sign, at most [`PATIENCE`].
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        pause(Duration::from_millis(1));
    }
}

/// Reads the first `bytes` of a region.
pub(crate) fn read(peer: &Peer, region: RegionId, bytes: u64) -> Result<Vec<u8>, TransferError> {
    let local = memory(bytes);
    let lists = (blocks(bytes, [0]), blocks(bytes, [0]));
    peer.transfer(request(Op::Read, &local, region, lists))?.wait(PATIENCE).expect("an outcome in time")?;
    Ok(contents(&local))
}

/// Registers memory that shows `pattern(seed, bytes)`.
pub(crate) fn offer(owner: &Agent, seed: u8, bytes: u64) -> Region {
    let shown = memory(bytes);
    shown.write_from(0, &pattern(seed, bytes)).unwrap();
    owner.register(shown, RegionOptions::default()).unwrap()
}

/// Waits until the peer's card satisfies `enough`.
pub(crate) fn news(peer: &Peer, enough: impl Fn(&AgentCard) -> bool) -> Arc<AgentCard> {
    let mut card = peer.card();
    while !enough(&card) {
        card = wait(peer.watch(card.revision)).unwrap();
    }
    card
}

/// Lets time pass where passing time is the point.
pub(crate) fn pause(time: Duration) {
    let (_sender, receiver) = std::sync::mpsc::channel::<()>();
    let _ = receiver.recv_timeout(time);
}
