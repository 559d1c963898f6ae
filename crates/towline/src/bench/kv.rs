//! The KV of one rank of an engine by the definition of its layout alone: what is where, and whether it is there.
//!
//! This is the naive rule that re-sharding is checked by. The words of a head of a token are a function of a seed and of
//! *which* head, token, layer and part they belong to, whatever rank they lie on. So every rank can be filled and
//! checked by itself, replicas are equal, and a planner that takes a wrong head, token, layer, part or block is found,
//! though nothing here knows which piece comes from where.
//!
//! **Cost.** As `pattern`: some GB/s in a release build, outside every timer.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use towline_fabric::Memory;
use towline_wire::layout::HeadOrder;
use towline_wire::shard::Sharding;

use super::model::{BLOCK_TOKENS, Model, PART_ALIGN};
use super::pattern::{self, Seed, WORD_BYTES, WrongByte};
use super::shape::{Shape, Side, mix};

/// Most ranks of one side: a process or an agent each.
pub(crate) const RANKS_MAX: u32 = 64;

/// How an engine shares its KV: `tp4`, `tp2pp2`, `tp4-nhd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ranks {
    /// Tensor-parallel ranks of each stage.
    pub(crate) tp: u32,
    /// Pipeline stages.
    pub(crate) pp: u32,
    /// Order inside a block.
    pub(crate) heads: HeadOrder,
}

impl Ranks {
    /// Ranks of all stages.
    pub(crate) fn count(self) -> u32 {
        self.tp * self.pp
    }
}

impl FromStr for Ranks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let explain = || format!("write tp4, tp2pp2 or tp4-nhd, at most {RANKS_MAX} ranks, not {text:?}");
        let (counts, heads) = match text.split_once('-') {
            None | Some((_, "hnd")) => (text.strip_suffix("-hnd").unwrap_or(text), HeadOrder::Hnd),
            Some((counts, "nhd")) => (counts, HeadOrder::Nhd),
            Some(_) => return Err(explain()),
        };
        let counts = counts.strip_prefix("tp").ok_or_else(explain)?;
        let (tp, pp) = counts.split_once("pp").unwrap_or((counts, "1"));
        let number = |text: &str| text.parse().ok().filter(|count| (1..=RANKS_MAX).contains(count));
        let (tp, pp) = number(tp).zip(number(pp)).ok_or_else(explain)?;
        if tp * pp > RANKS_MAX { Err(explain()) } else { Ok(Self { tp, pp, heads }) }
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp{}", self.tp)?;
        if self.pp > 1 {
            write!(f, "pp{}", self.pp)?;
        }
        f.write_str(if self.heads == HeadOrder::Nhd { "-nhd" } else { "" })
    }
}

/// One rank's memory with one sequence in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankKv {
    model: String,
    ranks: Ranks,
    /// The rank's number: stages outside, tensor-parallel ranks inside.
    pub(crate) rank: u32,
    /// Its blocks, and where they lie.
    shape: Shape,
}

/// What a rank keeps of a layer: heads of a part, and the bytes of one head of one token.
struct Share {
    part: u64,
    heads: Range<u32>,
    item_bytes: u64,
}

impl RankKv {
    /// Rank `rank` with `blocks` blocks of a sequence, shuffled by `shuffle` or in order.
    ///
    /// # Errors
    /// When heads, layers and ranks don't divide, or the blocks are too many.
    pub(crate) fn new(
        model: &Model,
        (ranks, rank): (Ranks, u32),
        blocks: u32,
        shuffle: Option<u64>,
    ) -> Result<Self> {
        let shape = Shape { block_bytes: 0, blocks, slots: blocks, lanes: 1, shuffle: None };
        let mut kv = Self { model: model.name.into(), ranks, rank, shape };
        let block_bytes = kv.block_bytes()?;
        let of_rank = shuffle.map(|seed| mix(seed ^ mix(u64::from(rank))));
        kv.shape = Shape::blocks(block_bytes * u64::from(blocks), block_bytes, of_rank)
            .context("more blocks than one list has")?;
        Ok(kv)
    }

    /// Bytes of the sequence's blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.shape.size_bytes()
    }

    /// Bytes of the memory that they lie in; `None` when they overflow, which only a broken message does.
    pub(crate) fn region_bytes(&self) -> Option<u64> {
        self.shape.region_bytes()
    }

    /// Bytes from one block to the next.
    pub(crate) fn stride(&self) -> u64 {
        self.shape.block_bytes
    }

    /// Where the sequence's blocks lie, in order.
    pub(crate) fn table(&self) -> Vec<u32> {
        self.shape.list(Side::Local, 0, 0).indices
    }

    /// Writes the sequence into the rank's memory, and nothing else.
    ///
    /// # Errors
    /// For a memory that is too small, or a description that contradicts itself.
    pub(crate) fn fill(&self, memory: &Memory, seed: Seed) -> Result<()> {
        let mut image = Vec::new();
        for (block, slot) in (0..).zip(self.table()) {
            self.image(&mut image, block, seed)?;
            memory.write_from(u64::from(slot) * self.stride(), &image)?;
        }
        Ok(())
    }

    /// Checks every byte of the memory: the sequence's blocks, and that nothing else was touched.
    ///
    /// # Errors
    /// As [`RankKv::fill`]; what is wrong with the bytes is the inner value.
    pub(crate) fn check(&self, memory: &Memory, seed: Seed, poison: Seed) -> Result<Option<WrongByte>> {
        let mut blocks = vec![None; self.shape.slots as usize];
        for (block, slot) in (0_u64..).zip(self.table()) {
            blocks[slot as usize] = Some(block);
        }
        let mut image = Vec::new();
        for (slot, block) in (0_u64..).zip(blocks) {
            let at = slot * self.stride();
            let wrong = match block {
                Some(block) => {
                    self.image(&mut image, block, seed)?;
                    pattern::check_bytes(memory, (at, &image), poison)?
                }
                None => pattern::check_untouched(memory, (at, self.stride()), poison)?,
            };
            if wrong.is_some() {
                return Ok(wrong);
            }
        }
        Ok(None)
    }

    /// The bytes of the sequence's `block`-th block on this rank.
    fn image(&self, image: &mut Vec<u8>, block: u64, seed: Seed) -> Result<()> {
        image.clear();
        image.resize(usize::try_from(self.stride())?, 0);
        let mut at = 0_u64;
        for layer in self.layers()? {
            for Share { part, heads, item_bytes } in &self.shares()? {
                let count = heads.len() as u64;
                for token in 0..BLOCK_TOKENS {
                    for (place, head) in (0..count).zip(heads.clone()) {
                        let number = match self.ranks.heads {
                            HeadOrder::Nhd => token * count + place,
                            HeadOrder::Hnd => place * BLOCK_TOKENS + token,
                        };
                        let item = item_seed(seed, (layer, *part, head), block * BLOCK_TOKENS + token);
                        let start = usize::try_from(at + number * item_bytes)?;
                        let bytes = image.get_mut(start..start + usize::try_from(*item_bytes)?);
                        write_item(bytes.context("a block that is too small")?, item);
                    }
                }
                at += (count * BLOCK_TOKENS * item_bytes).next_multiple_of(PART_ALIGN);
            }
        }
        Ok(())
    }

    /// Bytes of a block by the definition.
    fn block_bytes(&self) -> Result<u64> {
        let of_share = |share: &Share| {
            (share.heads.len() as u64 * BLOCK_TOKENS * share.item_bytes).next_multiple_of(PART_ALIGN)
        };
        Ok(self.layers()?.len() as u64 * self.shares()?.iter().map(of_share).sum::<u64>())
    }

    fn model(&self) -> Result<&'static Model> {
        Model::find(&self.model).with_context(|| format!("no model {}", self.model))
    }

    /// The layers of its stage.
    fn layers(&self) -> Result<Range<u32>> {
        let stages = Sharding::even(self.ranks.tp, self.ranks.pp, self.model()?.layers())?;
        let stage = self.rank.checked_div(self.ranks.tp).filter(|stage| *stage < self.ranks.pp);
        Ok(stages.layers(stage.context("no such rank")?))
    }

    /// Its heads of each part: a range of them, or, with more ranks than heads, the one that it shares with its
    /// neighbours; of a part without heads, all.
    fn shares(&self) -> Result<Vec<Share>> {
        let (rank, ranks) = (self.rank % self.ranks.tp, self.ranks.tp);
        let share = |(part, piece): (u64, super::model::Piece)| {
            let heads = match piece.heads {
                None => 0..1,
                Some(heads) if heads.is_multiple_of(ranks) => {
                    let each = heads / ranks;
                    rank * each..(rank + 1) * each
                }
                Some(heads) => {
                    ensure!(
                        ranks.is_multiple_of(heads),
                        "{} has {heads} KV heads, which {ranks} ranks can't share",
                        self.model
                    );
                    let head = rank / (ranks / heads);
                    head..head + 1
                }
            };
            Ok(Share { part, heads, item_bytes: piece.item_bytes })
        };
        (0..).zip(self.model()?.pieces()).map(share).collect()
    }
}

/// What the words of a head of a token start from.
fn item_seed(seed: Seed, (layer, part, head): (u32, u64, u32), token: u64) -> Seed {
    let place = u64::from(layer) << 32 | part << 24 | u64::from(head);
    Seed(mix(mix(seed.0 ^ place) ^ token))
}

fn write_item(bytes: &mut [u8], seed: Seed) {
    for (index, word) in (0..).zip(bytes.chunks_exact_mut(8)) {
        word.copy_from_slice(&seed.word(index * WORD_BYTES).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(words: &str, rank: u32) -> RankKv {
        let model = Model::find("smollm2-135m").unwrap();
        RankKv::new(model, (words.parse().unwrap(), rank), 3, Some(7)).unwrap()
    }

    fn filled(kv: &RankKv, seed: u64) -> Memory {
        let memory = Memory::allocate("rank", kv.region_bytes().unwrap()).unwrap();
        pattern::fill(&memory, Seed(9)).unwrap();
        kv.fill(&memory, Seed(seed)).unwrap();
        memory
    }

    #[test]
    fn words_of_ranks_are_read_back() {
        for text in ["tp1", "tp4", "tp2pp2", "tp8-nhd", "tp1pp4-nhd"] {
            assert_eq!(text.parse::<Ranks>().unwrap().to_string(), text);
        }
        assert_eq!("tp2-hnd".parse::<Ranks>().unwrap().to_string(), "tp2");
        for text in ["", "4", "tp", "tp0", "tp65", "tp16pp8", "pp2", "tp2-dnh", "tp-2", "tp4:tp1"] {
            assert!(text.parse::<Ranks>().unwrap_err().contains("write tp4"), "{text}");
        }
    }

    #[test]
    fn ranks_have_their_part_of_the_bytes() {
        let block = Model::find("smollm2-135m").unwrap().block_bytes();
        assert_eq!(rank("tp1", 0).stride(), block);
        assert_eq!(rank("tp3pp2", 5).stride(), block / 6);
        assert_eq!(rank("tp6", 5).stride(), block / 3, "each head on two ranks");
        let model = Model::find("smollm2-135m").unwrap();
        assert!(RankKv::new(model, ("tp2".parse().unwrap(), 0), 3, None).is_err(), "3 heads over 2 ranks");
        assert!(RankKv::new(model, ("tp1".parse().unwrap(), 1), 3, None).is_err(), "no such rank");
    }

    #[test]
    fn the_layout_agrees_on_every_rank() {
        for (name, words) in
            [("llama-3.1-8b", "tp4pp2"), ("qwen2.5-7b", "tp8"), ("deepseek-r1", "tp2pp2-nhd")]
        {
            let (model, ranks) = (Model::find(name).unwrap(), words.parse::<Ranks>().unwrap());
            let sharding = Sharding::even(ranks.tp, ranks.pp, model.layers()).unwrap();
            for rank in sharding.ranks() {
                let kv = RankKv::new(model, (ranks, rank.index()), 1, None).unwrap();
                let layout = model.layout(ranks.heads).shard(&sharding, rank).unwrap();
                assert_eq!(kv.stride(), layout.groups[0].block_bytes(), "{name} {words} {rank:?}");
            }
        }
    }

    #[test]
    fn what_a_rank_holds_passes_and_anything_else_is_found() {
        for words in ["tp1", "tp3-nhd"] {
            let kv = rank(words, 0);
            let memory = filled(&kv, 1);
            assert_eq!(kv.check(&memory, Seed(1), Seed(9)).unwrap(), None);
            assert!(kv.check(&memory, Seed(2), Seed(9)).unwrap().is_some(), "another sequence");
            // The last item of the last block, and a slot that no block has.
            let last = u64::from(*kv.table().last().unwrap()) * kv.stride() + kv.stride() - 8;
            let free = (0..kv.shape.slots).find(|slot| !kv.table().contains(slot)).unwrap();
            for at in [last, u64::from(free) * kv.stride()] {
                let memory = filled(&kv, 1);
                memory.write_from(at, &[0; 8]).unwrap();
                assert_eq!(kv.check(&memory, Seed(1), Seed(9)).unwrap().unwrap().offset, at);
            }
        }
    }

    #[test]
    fn heads_tokens_layers_and_parts_all_differ_and_replicas_do_not() {
        let mut seen = std::collections::BTreeSet::new();
        for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)] {
            for token in [0, 1, 16] {
                seen.insert(item_seed(Seed(1), place, token).0);
            }
        }
        assert_eq!(seen.len(), 15);
        let [a, b, c] = [0, 1, 2].map(|number| {
            let mut image = Vec::new();
            rank("tp6", number).image(&mut image, 2, Seed(1)).unwrap();
            image
        });
        assert!(a == b && b != c);
    }
}
