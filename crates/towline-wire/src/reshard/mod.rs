//! Re-sharding: which bytes of which source rank go where in a destination rank, when the two engines share, order
//! or cut their KV differently.
//!
//! Everything that can be done by copying bytes is done: other TP and PP sizes (replicated heads and MLA latents
//! too), other block sizes, NHD against HND, block-major against layer-major, other groups, order or padding of
//! parts, only the window's tokens of a sliding-window group, one state a sequence. What would need arithmetic
//! (another element type, head dimension or number of heads) is a [`ReshardError`] that names it.
//!
//! A [`Transfer`] is one pair of ranks. Where both have equal block sizes it is *block lists*: how one block maps to
//! one block is worked out once, and applies to all whole blocks, as bases × indices. Partial blocks, and blocks of
//! unequal sizes, are *runs*, sorted by local offset and merged where both sides go on.
//!
//! # Cost
//! Time is `O(p log p)` for `p` pieces before merging, at 24 bytes a run; lists take 8 bytes a base and 4 an index.
//! Moves are pieces of one head when the orders of heads differ, of a rank's heads of one token when both are NHD,
//! and of a rank's heads of one block when both are HND. Llama-3.1-8B in bf16, 8,000 tokens (1.05 GB) in blocks of
//! 16, TP 4 → 1: HND 128,000 pieces of 8 KiB (4 pairs of lists of 64 bases × 500 indices), NHD 2,048,000 of
//! 512 bytes (4 × 1,024 bases × 500); TP 1 → 1: one run where the blocks are neighbours, 500 of 2 MiB where none are.

mod error;
mod pairing;
mod pieces;
mod pool;
mod transfer;

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use error::{End, ReshardError};
pub use transfer::{ListPair, Plan, Transfer};

use crate::layout::KvLayout;
use crate::shard::{HeadShare, Sharding};
use pairing::Pair;
use pieces::{Bundle, Slice};
use pool::View;

/// Most tokens of a plan: sixteen times the longest context there is.
pub const TOKENS_MAX: u64 = 1 << 24;
/// A bound on pieces that most callers want: twice the worst case of [the cost above](self), 100 MB of runs.
pub const PIECES_MAX: u64 = 1 << 22;

/// Where an array of blocks lies in a rank's region: block `i` starts at `base + i * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Array {
    /// Its first byte, from the region's start.
    pub base: u64,
    /// Bytes from one block to the next; at least those of a block in this array.
    pub stride: u64,
}

/// One group's blocks of a sequence in a rank's region.
#[derive(Clone, Copy, Debug, Default)]
pub struct GroupPool<'a> {
    /// One for a block-major group; for a layer-major one, one for each of the rank's layers and, in it, each part
    /// (number layer × parts + part). None where the rank has no layer of the group.
    pub arrays: &'a [Array],
    /// Which block of the sequence `blocks` begins with: tokens `first_block * block_tokens` and on. 0 for a state.
    pub first_block: u32,
    /// The sequence's blocks, in order; one for a state.
    pub blocks: &'a [u32],
}

/// One rank's memory, for one sequence.
#[derive(Clone, Debug)]
pub struct RankPool<'a> {
    /// The rank's number.
    pub rank: u32,
    /// Bytes of its region; nothing outside is named by a plan.
    pub region_bytes: u64,
    /// One for each group of the engine's layout, in its order.
    pub groups: Vec<GroupPool<'a>>,
}

/// One engine.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// The KV of the whole engine.
    pub layout: &'a KvLayout,
    /// How its ranks share it.
    pub sharding: &'a Sharding,
    /// The destinations to plan for, or the sources to read from: all that hold what a destination needs.
    pub ranks: &'a [RankPool<'a>],
}

/// Whether layers are to be told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// All layers at once: fewest pieces, as blocks whose layers lie together move whole.
    Whole,
    /// Each layer in transfers of its own, so that layer 0 can move while layer 1 is being computed: the ordered
    /// parts that a fence slot counts.
    ByLayer,
}

/// What to move.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Who has it.
    pub source: Side<'a>,
    /// Who wants it.
    pub destination: Side<'a>,
    /// Tokens of the sequence. Of sliding windows only the last window's are moved, and of states the whole, which
    /// is that after the last token. Nothing when empty.
    pub tokens: Range<u64>,
    /// Whether layers are told apart.
    pub steps: Steps,
    /// Which replica to prefer where a destination may choose among several; any number, another for each request,
    /// so that replicas share the load.
    pub rotation: u32,
    /// Most pieces of the plan; [`PIECES_MAX`] for want of a better bound.
    pub pieces_max: u64,
}

/// Works out what each destination rank reads from which source rank. Pure, and the same for the same request, so
/// that both ends may compute it. For a push, the source takes `remote` for its own side.
///
/// # Errors
/// [`ReshardError`] naming side, rank, group, layer or part.
pub fn plan(request: &Request<'_>) -> Result<Plan, ReshardError> {
    let Request { source, destination, tokens, .. } = request;
    if tokens.start > tokens.end || tokens.end > TOKENS_MAX {
        return Err(ReshardError::Tokens { start: tokens.start, end: tokens.end });
    }
    check_side(End::Source, source)?;
    check_side(End::Destination, destination)?;
    let pairs = pairing::pairs(destination.layout, source.layout)?;
    let theirs = views(End::Source, source)?;
    let ours = views(End::Destination, destination)?;
    let mut budget = pieces::Budget::new(request.pieces_max);
    let mut plan = Plan::default();
    for view in ours.values().filter(|_| !tokens.is_empty()) {
        for ((layer, from), bundles) in bundles(request, &pairs, view, &theirs)? {
            let (lists, runs) = pieces::emit(&bundles, tokens, &mut budget)?;
            let (destination, source) = (view.rank.index(), from);
            if !(lists.is_empty() && runs.is_empty()) {
                plan.transfers.push(Transfer { layer, destination, source, lists, runs });
            }
        }
    }
    plan.transfers.sort_by_key(|transfer| (transfer.layer, transfer.destination, transfer.source));
    Ok(plan)
}

fn check_side(end: End, side: &Side<'_>) -> Result<(), ReshardError> {
    side.layout.validate().map_err(|error| ReshardError::Layout { end, error })?;
    side.layout.check_sharding(side.sharding).map_err(|error| ReshardError::Sharding { end, error })
}

fn views<'a>(end: End, side: &'a Side<'a>) -> Result<BTreeMap<u32, View<'a>>, ReshardError> {
    let mut views = BTreeMap::new();
    for pool in side.ranks {
        let view = View::new(end, side, pool)?;
        if views.insert(pool.rank, view).is_some() {
            return Err(ReshardError::Rank { end, rank: pool.rank, what: "is given twice" });
        }
    }
    Ok(views)
}

type ByStep<'a> = BTreeMap<(Option<u32>, u32), BTreeMap<(usize, usize), Bundle<'a>>>;

/// For one destination: by layer and source rank, the parts to move, by pair of groups.
fn bundles<'a>(
    request: &Request<'_>,
    pairs: &[Pair],
    ours: &'a View<'a>,
    theirs: &'a BTreeMap<u32, View<'a>>,
) -> Result<ByStep<'a>, ReshardError> {
    let mut steps = ByStep::new();
    let source = request.source.sharding;
    let stage = request.destination.sharding.layers(ours.rank.pp_index);
    for pair in pairs.iter().filter(|pair| stage.contains(&pair.layer)) {
        let want = share(End::Destination, ours.rank, pair)?;
        let stage = source.stage(pair.layer);
        for rank in source.ranks().filter(|rank| Some(rank.pp_index) == stage) {
            let have = share(End::Source, rank, pair)?;
            let Some(heads) = served(&want, &have, request.rotation) else { continue };
            let index = rank.index();
            let missing =
                ReshardError::Rank { end: End::Source, rank: index, what: "is needed and not given" };
            let theirs = theirs.get(&index).ok_or(missing)?;
            let (local, remote) = (ours.group(pair.ours.group)?, theirs.group(pair.theirs.group)?);
            let from = |share: &HeadShare| u64::from(heads.start - share.heads.start);
            let slice = Slice {
                local: local.lane(pair.ours.part, pair.layer, from(&want))?,
                remote: remote.lane(pair.theirs.part, pair.layer, from(&have))?,
                heads: heads.len() as u64,
                item: pair.item,
            };
            let layer = (request.steps == Steps::ByLayer).then_some(pair.layer);
            let bundles = steps.entry((layer, index)).or_default();
            let groups = (pair.ours.group, pair.theirs.group);
            let bundle =
                bundles.entry(groups).or_insert_with(|| Bundle { local, remote, slices: Vec::new() });
            bundle.slices.push(slice);
        }
    }
    Ok(steps)
}

fn share(end: End, rank: crate::shard::Rank, pair: &Pair) -> Result<HeadShare, ReshardError> {
    rank.share(pair.split).map_err(|error| ReshardError::Sharding { end, error })
}

/// Which heads a rank that wants `want` takes from one that has `have`. Of several with the same heads it takes one:
/// its peer where both sides have as many copies; where there are fewer sources, they divide the destinations; where
/// more, `rotation` chooses within the destination's own part of them.
fn served(want: &HeadShare, have: &HeadShare, rotation: u32) -> Option<Range<u32>> {
    let first = |copy: u32| copy * have.copies / want.copies.max(1);
    let width = first(want.copy + 1).saturating_sub(first(want.copy)).max(1);
    let heads = want.heads.start.max(have.heads.start)..want.heads.end.min(have.heads.end);
    (have.copy == first(want.copy) + rotation % width && !heads.is_empty()).then_some(heads)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(want: (u32, u32), copies: u32, rotation: u32) -> Vec<u32> {
        let share = |copy, copies| HeadShare { heads: 0..1, copy, copies };
        let want = share(want.0, want.1);
        (0..copies).filter(|copy| served(&want, &share(*copy, copies), rotation).is_some()).collect()
    }

    #[test]
    fn every_destination_has_one_source_and_replicas_share_the_load() {
        for (wanting, having, rotation) in
            (1..=8).flat_map(|w| (1..=8).flat_map(move |h| (0..5).map(move |r| (w, h, r))))
        {
            let mut load = vec![0; having as usize];
            for copy in 0..wanting {
                let from = sources((copy, wanting), having, rotation);
                assert_eq!(from.len(), 1, "{copy} of {wanting} from {having}");
                load[from[0] as usize] += 1;
            }
            let (least, most) = (load.iter().min().unwrap(), load.iter().max().unwrap());
            assert!(most - least <= 1, "{wanting} from {having}: {load:?}");
        }
        assert_eq!(sources((1, 2), 2, 7), [1], "its peer");
        assert_eq!([0, 1, 2, 3, 4].map(|rotation| sources((0, 1), 4, rotation)[0]), [0, 1, 2, 3, 0]);
    }
}
