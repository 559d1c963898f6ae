//! Engines of several ranks in one process: an agent a rank, real memory, both transports; every byte where it should be.
//!
//! What each rank holds, and must hold after a pull, is what the naive oracle of the re-sharding planner says
//! (`towline-wire/tests/it/reshard/oracle.rs`): engines as plain arrays of cells, addressed by the definition of their
//! layout alone. Here a cell is a byte of registered memory.

mod heartbeats;
mod layouts;
mod leases;
#[path = "../../../../towline-wire/tests/it/reshard/models.rs"]
#[expect(dead_code, reason = "shared with the planner's tests, which use all of it")]
mod models;
#[path = "../../../../towline-wire/tests/it/reshard/oracle.rs"]
#[expect(dead_code, reason = "shared with the planner's tests, which use all of it")]
mod oracle;
mod reshard;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use towline_fabric::{
    Agent, AgentConfig, Limits, Memory, Region, RegionOptions, RegionRole, ShmConfig, TransportChoice,
};
use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::blocks::Extent;
use towline_wire::card::Fingerprint;
use towline_wire::contract::Contract;
use towline_wire::digest::Digests;
use towline_wire::fence::SLOT_BYTES;
use towline_wire::frame::Status;
use towline_wire::handoff::HandoffError;
use towline_wire::id::{AgentName, EngineId, Generation, LeaseId, RegionId};
use towline_wire::lease::{LeaseError, Readers};
use towline_wire::parts::Parts;
use towline_wire::receipt::{Receipt, TransportKind};
use towline_wire::ticket::{BlockTable, Ticket};
use towline_worker::handoff::{
    GroupMemory, Keeper, Lender, LendingRank, Lent, Links, Loan, PullWatch, RankMemory, RankPull, RankShare,
};

use oracle::{Engine, POISON, layer_of};

pub(crate) const BOTH: [TransportKind; 2] = [TransportKind::Shm, TransportKind::Tcp];
/// Longer than any test's wait should ever be.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const AUDIENCE: &str = "test";

fn key() -> ClusterKey {
    ClusterKey::from_bytes([7; 32])
}

/// The byte that stands for a cell.
fn byte(cell: u64) -> u8 {
    cell.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_be_bytes()
        [0]
}

fn bytes(cells: &[u64]) -> Vec<u8> {
    cells.iter().map(|cell| byte(*cell)).collect()
}

fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.len()).unwrap()];
    memory.read_into(0, &mut bytes).unwrap();
    bytes
}

fn names(engine: &str, ranks: usize) -> Vec<AgentName> {
    (0..ranks).map(|rank| AgentName::new(format!("{engine}/{rank}")).unwrap()).collect()
}

fn config(name: &AgentName, engine: u8, layout: String) -> AgentConfig {
    AgentConfig {
        name: name.clone(),
        engine: EngineId::from_bytes([engine; 16]),
        key: key(),
        listen: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        shm: ShmConfig::Abstract,
        tcp: true,
        fingerprint: Fingerprint { rope: "base=10000".into(), layout, ..Fingerprint::default() },
        copy_threads: 1,
        tcp_streams: 1,
        // As often as can be, so that tests that wait for heartbeats are short.
        limits: Limits { heartbeat: Duration::from_millis(10), ..Limits::default() },
        ucx: None,
        telemetry: None,
    }
}

pub(crate) type Beats = Mutex<Vec<Vec<LeaseId>>>;

/// What an engine's keeper hears, with the heartbeats written down.
struct Ear {
    engine: Arc<dyn towline_fabric::Owner>,
    beats: Arc<Beats>,
}

impl towline_fabric::Owner for Ear {
    fn admit(
        &self,
        region: RegionId,
        lease: Option<(LeaseId, Generation)>,
        extents: &[Extent],
    ) -> Result<(), Status> {
        self.engine.admit(region, lease, extents)
    }

    fn handle_release(
        &self,
        peer: &Identity,
        lease: LeaseId,
        generation: Generation,
    ) -> Result<(), LeaseError> {
        self.engine.handle_release(peer, lease, generation)
    }

    fn handle_heartbeat(&self, peer: &Identity, leases: &[LeaseId]) {
        self.engine.handle_heartbeat(peer, leases);
        self.beats.lock().unwrap().push(leases.to_vec());
    }

    fn handle_notify(&self, peer: &Identity, payload: Vec<u8>) {
        self.engine.handle_notify(peer, payload);
    }

    fn handle_peer_gone(&self, peer: &Identity) {
        self.engine.handle_peer_gone(peer);
    }
}

/// An engine that lends: its ranks' agents, and memory that holds nothing yet.
pub(crate) struct Owner {
    pub(crate) oracle: Engine,
    pub(crate) lender: Lender,
    pub(crate) agents: Vec<Option<Agent>>,
    memories: Vec<Arc<Memory>>,
    regions: Vec<[Region; 2]>,
    /// The leases that each heartbeat named, in the order of their coming.
    pub(crate) beats: Arc<Beats>,
    expiry: Option<JoinHandle<()>>,
}

/// What a test lends, and to whom.
pub(crate) struct Terms {
    pub(crate) parts: Parts,
    /// Layers that are computed.
    pub(crate) computed: u32,
    pub(crate) readers: Readers,
}

impl Owner {
    /// Ranks as the oracle has them; leases last `ttl`.
    pub(crate) fn start(oracle: Engine, ttl: Duration) -> Self {
        let layout = oracle.layout.clone();
        let memory = |name, bytes: u64| Arc::new(Memory::allocate(name, bytes.max(1)).unwrap());
        let memories: Vec<_> =
            oracle.ranks.iter().map(|rank| memory("rank-kv", rank.cells.len() as u64)).collect();
        let fences: Vec<_> = oracle.ranks.iter().map(|_| memory("rank-fences", 8 * SLOT_BYTES)).collect();
        let group = |pool: &oracle::Pool| GroupMemory {
            arrays: pool.arrays.clone(),
            blocks: pool.blocks.iter().max().map_or(0, |highest| highest + 1),
        };
        let rank_memory = |(rank, fences): (&oracle::Memory, &Arc<Memory>)| RankMemory {
            fences: Arc::clone(fences),
            groups: rank.pools.iter().map(group).collect(),
        };
        let ranks = oracle.ranks.iter().zip(&fences).map(rank_memory);
        let keeper = Arc::new(Keeper::new(ranks.collect(), ttl));
        let (mut agents, mut lending, mut regions) = (vec![], vec![], vec![]);
        let beats = Arc::<Beats>::default();
        for ((number, name), memory) in (0..).zip(names("p", memories.len())).zip(&memories) {
            let ear = Arc::new(Ear { engine: keeper.owner(number), beats: Arc::clone(&beats) });
            let agent = Agent::start(config(&name, 1, layout.describe()), ear).unwrap();
            let options = |role, leased| RegionOptions { role, peer_writable: false, leased };
            let kv = agent.register(Arc::clone(memory), options(RegionRole::Kv, true)).unwrap();
            let slots = Arc::clone(&fences[number as usize]);
            let slots = agent.register(slots, options(RegionRole::Fence, false)).unwrap();
            keeper.serve(number, kv.id());
            let pools = &oracle.ranks[number as usize].pools;
            let arrays = pools.iter().map(|pool| pool.arrays.clone()).collect();
            lending.push(LendingRank::new(&agent, (&kv, &slots), arrays));
            agents.push(Some(agent));
            regions.push([kv, slots]);
        }
        let expiry = Some(keeper.start_expiry().unwrap());
        let lender = Lender {
            keeper,
            ranks: lending,
            engine: EngineId::from_bytes([1; 16]),
            layout: Some(layout),
            sharding: oracle.sharding.clone(),
            key: key(),
            audience: AUDIENCE.into(),
        };
        Self { oracle, lender, agents, memories, regions, beats, expiry }
    }

    /// Stores the KV of some layers on every rank that has them.
    pub(crate) fn store(&self, layers: Range<u32>) {
        for (memory, rank) in self.memories.iter().zip(&self.oracle.ranks) {
            for (at, cell) in (0..).zip(&rank.cells) {
                if layers.contains(&layer_of(*cell)) {
                    memory.write_from(at, &[byte(*cell)]).unwrap();
                }
            }
        }
    }

    /// Stores the KV of `layer` and counts it, on the ranks of its stage.
    pub(crate) fn compute(&self, lent: &Lent, layer: u32) {
        self.store(layer..layer + 1);
        let sharding = &self.oracle.sharding;
        for rank in sharding.ranks() {
            let stage = sharding.layers(rank.pp_index);
            if stage.contains(&layer) {
                // A lease that is over has no reader.
                _ = self.lender.computed(lent, rank.index(), layer + 1 - stage.start);
            }
        }
    }

    /// Lends `tokens` tokens; `hold` is kept as long as the lease.
    pub(crate) fn lend(&self, tokens: u64, terms: Terms, hold: &Arc<()>) -> Lent {
        let Terms { parts, computed, readers } = terms;
        let (mut tables, mut ranks) = (Vec::<BlockTable>::new(), vec![]);
        for (rank, memory) in self.oracle.sharding.ranks().zip(&self.oracle.ranks) {
            let named = memory.pools.iter().map(|pool| {
                let table = BlockTable { first_block: pool.first_block, blocks: pool.blocks.clone() };
                let known = tables.iter().position(|known| *known == table);
                let index = known.unwrap_or_else(|| {
                    tables.push(table);
                    tables.len() - 1
                });
                u32::try_from(index).unwrap()
            });
            let stage = self.oracle.sharding.layers(rank.pp_index);
            ranks.push(RankShare {
                tables: named.collect(),
                computed: computed.clamp(stage.start, stage.end) - stage.start,
                digests: Digests { mode: towline_wire::digest::DigestMode::Off, values: vec![] },
            });
        }
        let loan = Loan {
            prompt_hash: "00".into(),
            tokens: u32::try_from(tokens).unwrap(),
            tables,
            ranks,
            parts,
            readers,
            hold: Box::new(Arc::clone(hold)),
        };
        self.lender.lend(loan).unwrap()
    }

    /// Everything computed, in one part.
    pub(crate) fn lend_whole(&self, tokens: u64, readers: Readers, hold: &Arc<()>) -> Lent {
        self.store(0..models::LAYERS);
        let parts = Parts::whole(models::LAYERS);
        self.lend(tokens, Terms { parts, computed: models::LAYERS, readers }, hold)
    }

    pub(crate) fn held(&self) -> usize {
        self.lender.keeper.held()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.lender.keeper.stop();
        self.expiry.take().map(JoinHandle::join);
    }
}

/// An engine that reads: an agent and poisoned memory a rank.
pub(crate) struct Destination {
    pub(crate) oracle: Engine,
    links: Vec<Links>,
    memories: Vec<Arc<Memory>>,
}

impl Destination {
    pub(crate) fn start(oracle: Engine, transport: TransportKind) -> Self {
        let describe = oracle.layout.describe();
        let memory = |rank: &oracle::Memory| {
            let memory = Memory::allocate("rank-into", (rank.cells.len() as u64).max(1)).unwrap();
            memory.write_from(0, &bytes(&vec![POISON; rank.cells.len()])).unwrap();
            Arc::new(memory)
        };
        let memories: Vec<_> = oracle.ranks.iter().map(memory).collect();
        let link = |name: AgentName| {
            // It lends nothing.
            let nothing = Arc::new(Keeper::new(vec![], PATIENCE)).owner(0);
            let agent = Agent::start(config(&name, 2, describe.clone()), nothing).unwrap();
            Links::new(agent, TransportChoice::Only(transport), Contract::default())
        };
        let links = names("d", memories.len()).into_iter().map(link).collect();
        Self { oracle, links, memories }
    }

    /// The names of its ranks' agents, as readers.
    pub(crate) fn readers(&self) -> Readers {
        Readers::Named(names("d", self.links.len()).into_iter().collect::<BTreeSet<_>>())
    }

    /// One rank's pull.
    pub(crate) async fn pull(
        &self,
        rank: usize,
        (lent, tokens): (&Lent, &Range<u64>),
        watch: &mut dyn PullWatch,
    ) -> Result<Vec<Receipt>, HandoffError> {
        let ticket: Ticket = lent.ticket.clone().open(&key(), AUDIENCE, 0).unwrap();
        let pools = self.oracle.pools();
        let pull = RankPull {
            ticket: &ticket,
            layout: &self.oracle.layout,
            sharding: &self.oracle.sharding,
            pool: pools[rank].clone(),
            memory: Arc::clone(&self.memories[rank]),
            hold: None,
            tokens: tokens.clone(),
            deadline: PATIENCE,
        };
        self.links[rank].pull(&pull, watch).await
    }

    /// All ranks' pulls, at the same time.
    pub(crate) async fn pull_all(&self, lent: &Lent, tokens: &Range<u64>) -> Vec<Vec<Receipt>> {
        let one = async |rank| self.pull(rank, (lent, tokens), &mut ()).await.unwrap();
        futures_util::future::join_all((0..self.links.len()).map(one)).await
    }

    pub(crate) fn ranks(&self) -> usize {
        self.links.len()
    }

    /// Compares all memory of a rank with what it must be when the layers before `layers` of `tokens` have come.
    pub(crate) fn check(&self, rank: usize, tokens: &Range<u64>, layers: u32) {
        let mut cells = self.oracle.expected(tokens).swap_remove(rank);
        cells.iter_mut().filter(|cell| layer_of(**cell) >= layers).for_each(|cell| *cell = POISON);
        let found = contents(&self.memories[rank]);
        let wrong = found.iter().zip(bytes(&cells)).position(|(found, expected)| *found != expected);
        assert_eq!(wrong, None, "first wrong byte of rank {rank} with {layers} layers");
    }

    pub(crate) fn check_all(&self, tokens: &Range<u64>) {
        (0..self.ranks()).for_each(|rank| self.check(rank, tokens, models::LAYERS));
    }
}

/// Waits for what a message in flight will bring.
pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(waited.await.is_ok(), "never: {what}");
}
