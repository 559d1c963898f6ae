//! A rank's memory as the planner sees it: its share of each group, checked so that no address can leave the region
//! or overflow.

use super::{Array, End, GroupPool, RankPool, ReshardError, Side};
use crate::layout::{Arrangement, Group, HeadOrder};
use crate::shard::Rank;

/// Where the items of a part of a layer lie: head `h` of token `t` of block `i` starts at
/// `start + i * stride + t * token_step + h * head_step`, heads counted from the first one wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) start: u64,
    pub(super) stride: u64,
    pub(super) token_step: u64,
    pub(super) head_step: u64,
}

/// A rank and its memory.
#[derive(Debug)]
pub(super) struct View<'a> {
    pub(super) rank: Rank,
    end: End,
    /// By the engine's group: what this rank keeps of it, and where.
    groups: Vec<Option<GroupView<'a>>>,
}

/// A rank's share of a group.
#[derive(Debug)]
pub(super) struct GroupView<'a> {
    pub(super) layout: Group,
    pool: GroupPool<'a>,
    end: End,
    rank: u32,
    group: usize,
}

impl<'a> View<'a> {
    /// Checks a rank's memory against its share of a valid layout.
    pub(super) fn new(end: End, side: &Side<'_>, pool: &'a RankPool<'a>) -> Result<Self, ReshardError> {
        let no_rank = |what| ReshardError::Rank { end, rank: pool.rank, what };
        let rank = side.sharding.rank(pool.rank).ok_or_else(|| no_rank("does not exist"))?;
        if pool.groups.len() != side.layout.groups.len() {
            return Err(no_rank("does not give one pool for each group"));
        }
        let mut groups = Vec::with_capacity(pool.groups.len());
        for (group, (whole, given)) in side.layout.groups.iter().zip(&pool.groups).enumerate() {
            let share =
                whole.shard(side.sharding, rank).map_err(|error| ReshardError::Sharding { end, error })?;
            let view = share.map(|layout| GroupView { layout, pool: *given, end, rank: pool.rank, group });
            if let Some(view) = &view {
                view.check(pool.region_bytes)?;
            }
            groups.push(view);
        }
        Ok(Self { rank, end, groups })
    }

    /// What this rank keeps of the engine's group.
    pub(super) fn group(&'a self, group: usize) -> Result<&'a GroupView<'a>, ReshardError> {
        let absent = ReshardError::Pool {
            end: self.end,
            rank: self.rank.index(),
            group,
            what: "the rank's stage has no layer of it",
        };
        self.groups.get(group).and_then(Option::as_ref).ok_or(absent)
    }
}

impl GroupView<'_> {
    /// The lane of a part of a layer from the rank's `head`-th head on.
    pub(super) fn lane(&self, part: usize, layer: u32, head: u64) -> Result<Lane, ReshardError> {
        self.find_lane(part, layer, head).ok_or(ReshardError::Pool {
            end: self.end,
            rank: self.rank,
            group: self.group,
            what: "it has no such layer or part",
        })
    }

    fn find_lane(&self, part: usize, layer: u32, head: u64) -> Option<Lane> {
        let Self { layout, pool, .. } = self;
        let place = layout.layers.binary_search(&layer).ok()?;
        let item = layout.item_bytes(part)?;
        let heads = u64::from(layout.parts.get(part)?.split.heads());
        let (token_step, head_step) = match layout.heads {
            HeadOrder::Nhd => (heads * item, item),
            HeadOrder::Hnd => (item, layout.part_tokens() * item),
        };
        let (array, offset) = match layout.arrangement {
            Arrangement::BlockMajor => (pool.arrays.first()?, layout.offset(place, part)?),
            Arrangement::LayerMajor => (pool.arrays.get(place * layout.parts.len() + part)?, 0),
        };
        let start = array.base + offset + head * head_step;
        Some(Lane { start, stride: array.stride, token_step, head_step })
    }

    /// The pool's block that holds the sequence's `block`-th.
    pub(super) fn block(&self, block: u64) -> Result<u32, ReshardError> {
        let at = block.checked_sub(u64::from(self.pool.first_block)).and_then(|at| usize::try_from(at).ok());
        at.and_then(|at| self.pool.blocks.get(at)).copied().ok_or(ReshardError::Block {
            end: self.end,
            rank: self.rank,
            group: self.group,
            block,
        })
    }

    fn check(&self, region_bytes: u64) -> Result<(), ReshardError> {
        let Self { layout, pool, end, rank, group } = self;
        let (end, rank, group) = (*end, *rank, *group);
        let wrong = |what| Err(ReshardError::Pool { end, rank, group, what });
        let parts = layout.parts.len();
        let wanted = match layout.arrangement {
            Arrangement::BlockMajor => 1,
            Arrangement::LayerMajor => layout.layers.len() * parts,
        };
        if pool.arrays.len() != wanted {
            return wrong("it has not one array, or not one for each layer and part");
        }
        // Without a block nothing is addressed, but lanes are still worked out.
        let highest = pool.blocks.iter().max().copied();
        let (highest, bound) = highest.map_or((0, u64::MAX), |highest| (highest, region_bytes));
        for (number, array) in pool.arrays.iter().enumerate() {
            let bytes = match layout.arrangement {
                Arrangement::BlockMajor => layout.block_bytes(),
                Arrangement::LayerMajor => layout.parts[number % parts].bytes,
            };
            if array.stride < bytes {
                return wrong("an array's stride is shorter than its block");
            }
            if !inside(*array, highest, bytes, bound) {
                return wrong("a block leaves the region");
            }
        }
        let mut blocks = pool.blocks.to_vec();
        blocks.sort_unstable();
        if end == End::Destination && blocks.windows(2).any(|pair| pair[0] == pair[1]) {
            return wrong("its table names a block twice");
        }
        Ok(())
    }
}

fn inside(array: Array, index: u32, bytes: u64, region_bytes: u64) -> bool {
    let start = u64::from(index).checked_mul(array.stride).and_then(|at| at.checked_add(array.base));
    start.and_then(|start| start.checked_add(bytes)).is_some_and(|end| end <= region_bytes)
}
