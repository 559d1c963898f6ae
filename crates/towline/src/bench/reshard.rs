//! Moving a prompt's KV between engines that share it over different ranks, as the wire's planner cuts it.
//!
//! The planner says which pieces go where; what must be where afterwards is `kv`'s business.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, ensure};
use towline_wire::blocks::BlockList;
use towline_wire::receipt::Op;
use towline_wire::reshard::{Array, GroupPool, PIECES_MAX, RankPool, Request, Side, Steps, plan};
use towline_wire::shard::Sharding;

use super::kv::{RankKv, Ranks};
use super::model::{BLOCK_TOKENS, Model};

/// From which ranks to which: `tp4:tp1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reshard {
    pub(crate) from: Ranks,
    pub(crate) to: Ranks,
}

impl FromStr for Reshard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (from, to) =
            text.split_once(':').ok_or("write FROM:TO, for example tp4:tp1 or tp2pp2:tp8-nhd")?;
        Ok(Self { from: from.parse()?, to: to.parse()? })
    }
}

impl fmt::Display for Reshard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.from, self.to)
    }
}

/// Where the shuffles of the two sides part, so that their tables differ.
const OTHER_SIDE: u64 = 1 << 40;

/// A prompt to be moved.
pub(crate) struct Prompt {
    /// The memory of each rank that has it.
    pub(crate) sources: Vec<RankKv>,
    /// The memory of each rank that wants it.
    pub(crate) destinations: Vec<RankKv>,
}

/// What one rank reads from one other: lists of equally many bytes on both sides, in the same order.
pub(crate) struct Passage {
    pub(crate) source: usize,
    pub(crate) destination: usize,
    /// The source's list, and the destination's.
    pub(crate) lists: Vec<(BlockList, BlockList)>,
}

impl Reshard {
    /// The side that owns memory, and the side that reads it or writes to it.
    pub(crate) fn ends(&self, op: Op) -> (Ranks, Ranks) {
        if op == Op::Read { (self.from, self.to) } else { (self.to, self.from) }
    }

    /// The memories of `blocks` blocks of a prompt, in tables shuffled by `shuffle` or in order.
    ///
    /// # Errors
    /// When the model's heads or layers can't be shared like that.
    pub(crate) fn prompt(&self, model: &Model, blocks: u32, shuffle: Option<u64>) -> Result<Prompt> {
        let side = |ranks: Ranks, salt: u64| {
            let rank = |rank| RankKv::new(model, (ranks, rank), blocks, shuffle.map(|seed| seed ^ salt));
            (0..ranks.count()).map(rank).collect::<Result<Vec<_>>>()
        };
        Ok(Prompt { sources: side(self.from, OTHER_SIDE)?, destinations: side(self.to, 0)? })
    }

    /// Who reads what from whom.
    ///
    /// # Errors
    /// The planner's.
    pub(crate) fn passages(&self, model: &Model, prompt: &Prompt) -> Result<Vec<Passage>> {
        let blocks = prompt.sources.first().map_or(0, |rank| rank.table().len() as u64);
        let (from, to) = (Memories::of(&prompt.sources), Memories::of(&prompt.destinations));
        let (from_pools, to_pools) = (from.pools(), to.pools());
        let layouts = [self.from, self.to].map(|ranks| model.layout(ranks.heads));
        let shardings = [self.from, self.to].map(|ranks| Sharding::even(ranks.tp, ranks.pp, model.layers()));
        let [from_sharding, to_sharding] = shardings;
        let (from_sharding, to_sharding) = (from_sharding?, to_sharding?);
        let planned = plan(&Request {
            source: Side { layout: &layouts[0], sharding: &from_sharding, ranks: &from_pools },
            destination: Side { layout: &layouts[1], sharding: &to_sharding, ranks: &to_pools },
            tokens: 0..blocks * BLOCK_TOKENS,
            steps: Steps::Whole,
            rotation: 0,
            pieces_max: PIECES_MAX,
        })?;
        let passage = |transfer: towline_wire::reshard::Transfer| {
            // Whole blocks of one size on both sides are lists; runs would be what is left over of others.
            ensure!(transfer.runs.is_empty(), "the planner cut whole blocks into runs");
            Ok(Passage {
                source: transfer.source as usize,
                destination: transfer.destination as usize,
                lists: transfer.lists.into_iter().map(|pair| (pair.remote, pair.local)).collect(),
            })
        };
        planned.transfers.into_iter().map(passage).collect()
    }
}

/// The ranks of one side, as the planner wants to see them.
struct Memories<'a> {
    ranks: &'a [RankKv],
    tables: Vec<Vec<u32>>,
    arrays: Vec<[Array; 1]>,
}

impl<'a> Memories<'a> {
    fn of(ranks: &'a [RankKv]) -> Self {
        Self {
            ranks,
            tables: ranks.iter().map(RankKv::table).collect(),
            arrays: ranks.iter().map(|rank| [Array { base: 0, stride: rank.stride() }]).collect(),
        }
    }

    fn pools(&self) -> Vec<RankPool<'_>> {
        let ranks = self.ranks.iter().zip(&self.tables).zip(&self.arrays);
        ranks
            .map(|((rank, blocks), arrays)| RankPool {
                rank: rank.rank,
                region_bytes: rank.region_bytes().unwrap_or(0),
                groups: vec![GroupPool { arrays, first_block: 0, blocks }],
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use towline_fabric::Memory;

    use super::*;
    use crate::bench::pattern::{Seed, fill};

    #[test]
    fn words_of_pairs_are_read_back() {
        for text in ["tp4:tp1", "tp2pp2:tp8-nhd"] {
            assert_eq!(text.parse::<Reshard>().unwrap().to_string(), text);
        }
        for text in ["tp4", "tp4:", ":tp1", "tp4:tp1:tp2"] {
            assert!(text.parse::<Reshard>().is_err(), "{text}");
        }
    }

    /// Applies a plan by copying, and checks every rank by the naive rule.
    fn moves_everything(text: &str, model: &str, spoil: impl Fn(&mut Vec<Passage>)) -> bool {
        let (reshard, model) = (text.parse::<Reshard>().unwrap(), Model::find(model).unwrap());
        let prompt = reshard.prompt(model, 3, Some(5)).unwrap();
        let mut passages = reshard.passages(model, &prompt).unwrap();
        spoil(&mut passages);
        let memory = |kv: &RankKv, seed| {
            let memory = Memory::allocate("rank", kv.region_bytes().unwrap()).unwrap();
            fill(&memory, seed).unwrap();
            memory
        };
        let sources: Vec<Memory> = prompt.sources.iter().map(|kv| memory(kv, Seed(2))).collect();
        let destinations: Vec<Memory> = prompt.destinations.iter().map(|kv| memory(kv, Seed(3))).collect();
        prompt.sources.iter().zip(&sources).for_each(|(kv, memory)| kv.fill(memory, Seed(1)).unwrap());
        let mut bytes = 0;
        for passage in &passages {
            for (from, to) in &passage.lists {
                for (from, to) in from.extents().zip(to.extents()) {
                    let (target, source) = (&destinations[passage.destination], &sources[passage.source]);
                    target.copy_from(to.offset, source, from.offset, from.len).unwrap();
                    bytes += from.len;
                }
            }
        }
        let wanted: u64 = prompt.destinations.iter().map(RankKv::bytes).sum();
        let mut ranks = prompt.destinations.iter().zip(&destinations);
        ranks.all(|(kv, memory)| kv.check(memory, Seed(1), Seed(3)).unwrap().is_none()) && bytes == wanted
    }

    #[test]
    fn every_rank_has_its_kv_afterwards() {
        for (text, model) in [
            ("tp1:tp1", "smollm2-135m"),
            ("tp3:tp1", "smollm2-135m"),
            ("tp1:tp3pp2", "smollm2-135m"),
            ("tp6:tp3-nhd", "smollm2-135m"),
            ("tp4pp2-nhd:tp2", "llama-3.2-1b"),
            ("tp2:tp4", "deepseek-r1"),
        ] {
            assert!(moves_everything(text, model, |_| ()), "{text} {model}");
        }
    }

    #[test]
    fn a_piece_that_is_missing_or_comes_from_elsewhere_is_found() {
        let spoilt = |spoil: fn(&mut Vec<Passage>)| moves_everything("tp3:tp1", "smollm2-135m", spoil);
        assert!(!spoilt(|passages| passages.truncate(2)));
        assert!(!spoilt(|passages| passages[0].source = 1), "another rank's heads");
        assert!(!spoilt(|passages| passages[1].lists[0].0.indices.swap(0, 1)), "another block");
        assert!(!spoilt(|passages| passages[1].lists[0].0.bases.swap(0, 1)), "another layer or part");
        assert!(!spoilt(|passages| passages[1].lists[0].0.bases[0] += 64), "another token");
    }
}
