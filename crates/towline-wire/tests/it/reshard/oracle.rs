//! The oracle: engines as plain memory, addressed by the definition of their layout and nothing clever.
//!
//! A byte of memory is a `u64` here, so that every byte of the global KV has a value of its own.

use std::ops::Range;

use towline_wire::layout::{Arrangement, GroupKind, HeadOrder, KvLayout, Part, Split};
use towline_wire::reshard::{Array, GroupPool, Plan, RankPool, Side};
use towline_wire::shard::Sharding;

/// What a destination holds before.
pub(crate) const POISON: u64 = u64::MAX;
/// What a source holds where no KV is.
const JUNK: u64 = u64::MAX - 1;
/// Names of parts, so that a part has the same number on both sides.
const NAMES: [&str; 9] =
    ["k", "v", "k-scale", "token-scale", "latent", "indexer", "conv", "state", "state-scale"];

/// The value of the first byte of a head of a token; no other byte of the global KV has it, or those after it.
fn value(layer: u32, part: usize, token: u64, head: u32) -> u64 {
    let fields = [(u64::from(layer), 8), (part as u64, 4), (token, 20), (u64::from(head), 12), (0, 16)];
    fields.into_iter().fold(0, |value, (field, bits)| {
        assert!(field < 1 << bits);
        value << bits | field
    })
}

/// The layer of a byte's value.
pub(crate) fn layer_of(value: u64) -> u32 {
    u32::try_from(value >> 52).unwrap()
}

pub(crate) struct Pool {
    pub(crate) arrays: Vec<Array>,
    pub(crate) first_block: u32,
    pub(crate) blocks: Vec<u32>,
}

pub(crate) struct Memory {
    pub(crate) cells: Vec<u64>,
    pub(crate) pools: Vec<Pool>,
}

pub(crate) struct Engine {
    pub(crate) layout: KvLayout,
    pub(crate) sharding: Sharding,
    pub(crate) ranks: Vec<Memory>,
}

/// How an engine's memory is laid out beyond what its layout says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scatter {
    /// Blocks and arrays follow each other.
    Tight,
    /// Gaps between arrays and blocks, tables shuffled.
    Shuffled(u64),
}

impl Scatter {
    fn below(&mut self, bound: u64) -> u64 {
        let Self::Shuffled(seed) = self else { return 0 };
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) % bound
    }

    fn blocks(&mut self, count: u64) -> Vec<u32> {
        if *self == Self::Tight {
            return (0..u32::try_from(count).unwrap()).collect();
        }
        let mut all: Vec<u32> = (0..u32::try_from(count + 2).unwrap()).collect();
        for at in (1..all.len()).rev() {
            all.swap(at, index(self.below(at as u64 + 1)));
        }
        all.truncate(index(count));
        all
    }
}

/// Every token, and a state.
pub(crate) fn all(tokens: &Range<u64>) -> impl Fn(GroupKind) -> Range<u64> {
    move |kind| if kind == GroupKind::State { 0..1 } else { tokens.clone() }
}

/// What a group needs to go on after `tokens`.
pub(crate) fn needed(tokens: &Range<u64>) -> impl Fn(GroupKind) -> Range<u64> {
    move |kind| match kind {
        GroupKind::State => 0..u64::from(!tokens.is_empty()),
        GroupKind::SlidingWindow { window_tokens } => {
            let in_window = |token: &u64| token + u64::from(window_tokens) >= tokens.end;
            tokens.clone().find(in_window).unwrap_or(tokens.end)..tokens.end
        }
        _ => tokens.clone(),
    }
}

fn tokens_of(layout: &KvLayout, group: usize) -> u64 {
    match layout.groups[group].kind {
        GroupKind::State => 1,
        _ => u64::from(layout.groups[group].block_tokens),
    }
}

fn index(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

fn round_up(value: u64, to: u64) -> u64 {
    value.div_ceil(to) * to
}

impl Engine {
    /// Memory for the tokens that each kind of group `keeps`, all cells junk.
    pub(crate) fn new(
        layout: KvLayout,
        sharding: Sharding,
        keeps: impl Fn(GroupKind) -> Range<u64>,
        mut scatter: Scatter,
    ) -> Self {
        let mut engine = Self { layout, sharding, ranks: vec![] };
        for rank in 0..engine.sharding.ranks().count() {
            let mut end = scatter.below(50);
            let mut pools = vec![];
            for group in 0..engine.layout.groups.len() {
                let size = tokens_of(&engine.layout, group);
                let tokens = keeps(engine.layout.groups[group].kind);
                let held = tokens.start / size..tokens.end.div_ceil(size);
                let blocks = scatter.blocks(held.end - held.start);
                let room = blocks.iter().max().map_or(0, |highest| u64::from(*highest) + 1);
                let mut arrays = vec![];
                for bytes in engine.array_bytes(rank, group) {
                    let array = Array { base: end + scatter.below(9), stride: bytes + scatter.below(7) };
                    end = array.base + room * array.stride;
                    arrays.push(array);
                }
                pools.push(Pool { arrays, first_block: u32::try_from(held.start).unwrap(), blocks });
            }
            engine.ranks.push(Memory { cells: vec![JUNK; index(end)], pools });
        }
        engine
    }

    fn place(&self, rank: usize) -> (u32, u32) {
        let rank = u32::try_from(rank).unwrap();
        (rank % self.sharding.tp_size, rank / self.sharding.tp_size)
    }

    /// The group's layers in the rank's stage.
    fn layers(&self, rank: usize, group: usize) -> Vec<u32> {
        let (_, stage) = self.place(rank);
        let mut owners = vec![];
        for (owner, layers) in (0..).zip(&self.sharding.stage_layers) {
            owners.extend(vec![owner; *layers as usize]);
        }
        let layers = self.layout.groups[group].layers.iter();
        layers.copied().filter(|layer| owners[*layer as usize] == stage).collect()
    }

    /// Heads on a rank, by the model's numbers.
    fn heads(&self, rank: usize, part: &Part) -> Vec<u32> {
        let (index, ranks) = (self.place(rank).0, self.sharding.tp_size);
        match part.split {
            Split::Replicated => vec![0],
            Split::Heads(heads) if ranks > heads => vec![index * heads / ranks],
            Split::Heads(heads) => (0..heads).filter(|head| head * ranks / heads == index).collect(),
        }
    }

    fn item(&self, group: usize, part: &Part) -> u64 {
        let heads = match part.split {
            Split::Heads(heads) => u64::from(heads),
            Split::Replicated => 1,
        };
        part.bytes / tokens_of(&self.layout, group) / heads
    }

    fn part_bytes(&self, rank: usize, group: usize, part: &Part) -> u64 {
        self.item(group, part) * tokens_of(&self.layout, group) * self.heads(rank, part).len() as u64
    }

    /// Bytes of a block in each of a rank's arrays of a group.
    fn array_bytes(&self, rank: usize, group: usize) -> Vec<u64> {
        let g = &self.layout.groups[group];
        let bytes = g.parts.iter().map(|part| (self.part_bytes(rank, group, part), part.align));
        let layers = self.layers(rank, group).len();
        match g.arrangement {
            _ if layers == 0 => vec![],
            Arrangement::BlockMajor => {
                vec![layers as u64 * bytes.map(|(bytes, align)| round_up(bytes, align)).sum::<u64>()]
            }
            Arrangement::LayerMajor => {
                let one: Vec<u64> = bytes.map(|(bytes, _)| bytes).collect();
                one.repeat(layers)
            }
        }
    }

    /// Calls `with` for every byte that `rank` keeps of `tokens`: its cell's address, and its value.
    fn each(&self, rank: usize, tokens: impl Fn(GroupKind) -> Range<u64>, mut with: impl FnMut(usize, u64)) {
        for (group, g) in self.layout.groups.iter().enumerate() {
            let pool = &self.ranks[rank].pools[group];
            let size = tokens_of(&self.layout, group);
            let mut offset = 0;
            for (number, (layer, part)) in self
                .layers(rank, group)
                .into_iter()
                .flat_map(|l| g.parts.iter().map(move |p| (l, p)))
                .enumerate()
            {
                let heads = self.heads(rank, part);
                let item = self.item(group, part);
                let name = NAMES.iter().position(|name| *name == part.name).unwrap();
                let (array, within) = match g.arrangement {
                    Arrangement::BlockMajor => (pool.arrays[0], offset),
                    Arrangement::LayerMajor => (pool.arrays[number], 0),
                };
                for token in tokens(g.kind) {
                    let block = pool.blocks[index(token / size) - pool.first_block as usize];
                    for (place, head) in heads.iter().enumerate() {
                        let inner = match g.heads {
                            HeadOrder::Nhd => token % size * heads.len() as u64 + place as u64,
                            HeadOrder::Hnd => place as u64 * size + token % size,
                        };
                        let at = array.base + u64::from(block) * array.stride + within + inner * item;
                        let value = value(layer, name, token, *head);
                        for byte in 0..item {
                            with(index(at + byte), value + byte);
                        }
                    }
                }
                offset += round_up(self.part_bytes(rank, group, part), part.align);
            }
        }
    }

    /// Writes every byte of `tokens` on every rank.
    pub(crate) fn fill(&mut self, tokens: impl Fn(GroupKind) -> Range<u64>) {
        for rank in 0..self.ranks.len() {
            let mut cells = std::mem::take(&mut self.ranks[rank].cells);
            self.each(rank, &tokens, |at, value| cells[at] = value);
            self.ranks[rank].cells = cells;
        }
    }

    pub(crate) fn poison(&mut self) {
        for rank in &mut self.ranks {
            rank.cells.fill(POISON);
        }
    }

    /// What every rank's memory must be after `tokens` have come into poisoned memory.
    pub(crate) fn expected(&self, tokens: &Range<u64>) -> Vec<Vec<u64>> {
        let rank = |rank: usize| {
            let mut cells = vec![POISON; self.ranks[rank].cells.len()];
            self.each(rank, needed(tokens), |at, value| cells[at] = value);
            cells
        };
        (0..self.ranks.len()).map(rank).collect()
    }

    pub(crate) fn pools(&self) -> Vec<RankPool<'_>> {
        let pool = |(rank, memory): (u32, &'_ Memory)| RankPool {
            rank,
            region_bytes: memory.cells.len() as u64,
            groups: vec![GroupPool::default(); memory.pools.len()],
        };
        let mut pools: Vec<RankPool<'_>> = (0..).zip(&self.ranks).map(pool).collect();
        for (rank, memory) in pools.iter_mut().zip(&self.ranks) {
            for (group, pool) in rank.groups.iter_mut().zip(&memory.pools) {
                let Pool { arrays, first_block, blocks } = pool;
                *group = GroupPool { arrays, first_block: *first_block, blocks };
            }
        }
        pools
    }

    pub(crate) fn side<'a>(&'a self, ranks: &'a [RankPool<'a>]) -> Side<'a> {
        Side { layout: &self.layout, sharding: &self.sharding, ranks }
    }

    /// Copies as the plan says, in runs of at most `run_bytes_max`; panics when it writes a byte twice, reads what is
    /// no KV, or completes another layer than it says.
    pub(crate) fn apply(&mut self, source: &Self, plan: &Plan, run_bytes_max: u64) {
        for transfer in &plan.transfers {
            let from = &source.ranks[transfer.source as usize].cells;
            let into = &mut self.ranks[transfer.destination as usize].cells;
            for pair in &transfer.lists {
                pair.local.validate(into.len() as u64).unwrap();
                pair.remote.validate(from.len() as u64).unwrap();
            }
            let mut moved = 0;
            for run in transfer.merged(run_bytes_max).unwrap() {
                assert!((1..=run_bytes_max).contains(&run.len));
                moved += run.len;
                for byte in 0..run.len {
                    let (at, value) = (index(run.local + byte), from[index(run.remote + byte)]);
                    assert_eq!(
                        into[at], POISON,
                        "byte {at} of rank {} is written twice",
                        transfer.destination
                    );
                    assert_ne!(value, JUNK, "no KV is read from rank {}", transfer.source);
                    assert!(transfer.layer.is_none_or(|layer| layer == layer_of(value)));
                    into[at] = value;
                }
            }
            assert_eq!(moved, transfer.bytes());
            assert!(moved > 0, "an empty transfer");
        }
    }
}
