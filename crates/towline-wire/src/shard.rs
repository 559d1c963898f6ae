//! How an engine's ranks share its KV: heads over tensor-parallel ranks, layers over pipeline stages.
//!
//! The rules are vLLM's, so that its engines can be described as they are. Heads: contiguous ranges in rank order;
//! with more ranks than heads, each head stands on neighbouring ranks (`QKVParallelLinear`: rank `r` loads head
//! `r / replicas`, and both divisions must be exact). Layers: contiguous ranges in stage order, by default as equal
//! as `get_pp_indices` makes them, or as the operator says (`VLLM_PP_LAYER_PARTITION`). Ranks are numbered with the
//! tensor-parallel index innermost.

use std::ops::Range;

use thiserror::Error;

use crate::layout::{Group, KvLayout, Split};
use crate::lease::READERS_MAX;

/// Most ranks of an engine: each may be a reader of one lease.
pub const RANKS_MAX: u32 = READERS_MAX;
/// Most layers of a model: bounds stages and the arithmetic on layer numbers.
pub const MODEL_LAYERS_MAX: u32 = 4096;

/// One rank's place in its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    /// Which tensor-parallel rank of its stage.
    pub tp_index: u32,
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// Which pipeline stage.
    pub pp_index: u32,
    /// Pipeline stages.
    pub pp_size: u32,
}

/// A rank's share of a part's heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadShare {
    /// Its heads, by the model's numbers; `0..1` for a part without heads.
    pub heads: Range<u32>,
    /// Which of the ranks with these same heads it is.
    pub copy: u32,
    /// Ranks of its stage that have these same heads.
    pub copies: u32,
}

impl Rank {
    /// Its number in the engine: stages outside, tensor-parallel ranks inside.
    pub fn index(&self) -> u32 {
        self.pp_index.saturating_mul(self.tp_size).saturating_add(self.tp_index)
    }

    /// Its share of a part.
    ///
    /// # Errors
    /// [`ShardError::Heads`] when ranks and heads do not divide, [`ShardError::Rank`] when there is no such rank.
    pub fn share(&self, split: Split) -> Result<HeadShare, ShardError> {
        let (rank, ranks) = (self.tp_index, self.tp_size);
        if rank >= ranks {
            return Err(ShardError::Rank { tp_index: rank, tp_size: ranks });
        }
        let heads = match split {
            Split::Replicated => return Ok(HeadShare { heads: 0..1, copy: rank, copies: ranks }),
            Split::Heads(heads) => heads.max(1),
        };
        if heads.is_multiple_of(ranks) {
            let each = heads / ranks;
            return Ok(HeadShare { heads: rank * each..(rank + 1) * each, copy: 0, copies: 1 });
        }
        if !ranks.is_multiple_of(heads) {
            return Err(ShardError::Heads { heads, tp_size: ranks });
        }
        let copies = ranks / heads;
        let head = rank / copies;
        Ok(HeadShare { heads: head..head + 1, copy: rank % copies, copies })
    }
}

/// How many ranks an engine has, and which layers each stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// Tensor-parallel ranks of each stage.
    pub tp_size: u32,
    /// Layers of each pipeline stage, in order; their sum is the model's depth.
    pub stage_layers: Vec<u32>,
}

impl Sharding {
    /// `layers` over `pp_size` stages as equal as can be. What is left over goes to the stages before the last, from
    /// the back, one each: the last also computes the output head (vLLM's `get_pp_indices`).
    ///
    /// # Errors
    /// [`ShardError`], as [`Sharding::validate`].
    pub fn even(tp_size: u32, pp_size: u32, layers: u32) -> Result<Self, ShardError> {
        if !(1..=RANKS_MAX).contains(&pp_size) {
            return Err(ShardError::Ranks { tp_size, pp_size: pp_size as usize });
        }
        let more = layers % pp_size;
        let stage = |index| layers / pp_size + u32::from(index + 1 < pp_size && index + 1 + more >= pp_size);
        let sharding = Self { tp_size, stage_layers: (0..pp_size).map(stage).collect() };
        sharding.validate().map(|()| sharding)
    }

    /// Checks sizes: 1 to [`RANKS_MAX`] ranks, no empty stage, at most [`MODEL_LAYERS_MAX`] layers.
    ///
    /// # Errors
    /// [`ShardError::Ranks`], [`ShardError::Stages`].
    pub fn validate(&self) -> Result<(), ShardError> {
        let (tp_size, pp_size) = (self.tp_size, self.stage_layers.len());
        let ranks = usize::try_from(tp_size).ok().and_then(|tp| tp.checked_mul(pp_size));
        if !ranks.is_some_and(|ranks| (1..=RANKS_MAX as usize).contains(&ranks)) {
            return Err(ShardError::Ranks { tp_size, pp_size });
        }
        let layers: u64 = self.stage_layers.iter().map(|layers| u64::from(*layers)).sum();
        if self.stage_layers.contains(&0) || layers > u64::from(MODEL_LAYERS_MAX) {
            return Err(ShardError::Stages { layers });
        }
        Ok(())
    }

    /// Pipeline stages.
    pub fn pp_size(&self) -> u32 {
        u32::try_from(self.stage_layers.len()).unwrap_or(u32::MAX)
    }

    /// Every rank, by its number.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + '_ {
        let (tp_size, pp_size) = (self.tp_size, self.pp_size());
        (0..pp_size).flat_map(move |pp_index| {
            (0..tp_size).map(move |tp_index| Rank { tp_index, tp_size, pp_index, pp_size })
        })
    }

    /// The rank of that number, if there is one.
    pub fn rank(&self, index: u32) -> Option<Rank> {
        let (tp_size, pp_size) = (self.tp_size, self.pp_size());
        let pp_index = index.checked_div(tp_size).filter(|pp_index| *pp_index < pp_size)?;
        Some(Rank { tp_index: index % tp_size, tp_size, pp_index, pp_size })
    }

    /// The model's layers that stage `pp_index` has; empty when there is no such stage.
    pub fn layers(&self, pp_index: u32) -> Range<u32> {
        let stages = &self.stage_layers;
        let at = (pp_index as usize).min(stages.len());
        let start: u32 = stages.iter().take(at).fold(0, |sum, layers| sum.saturating_add(*layers));
        start..start.saturating_add(stages.get(at).copied().unwrap_or(0))
    }

    /// The stage that has `layer`, if one does.
    pub fn stage(&self, layer: u32) -> Option<u32> {
        (0..self.pp_size()).find(|stage| self.layers(*stage).contains(&layer))
    }
}

impl Group {
    /// What a rank keeps of this group of the whole engine: its layers and, of each part, its heads. `None` when its
    /// stage has no layer of the group.
    ///
    /// # Errors
    /// [`ShardError::Heads`] when ranks and heads do not divide.
    pub fn shard(&self, sharding: &Sharding, rank: Rank) -> Result<Option<Self>, ShardError> {
        let stage = sharding.layers(rank.pp_index);
        let layers: Vec<u32> = self.layers.iter().copied().filter(|layer| stage.contains(layer)).collect();
        let mut parts = self.parts.clone();
        for part in &mut parts {
            let share = rank.share(part.split)?.heads.len() as u64;
            part.bytes = part.bytes / u64::from(part.split.heads().max(1)) * share;
            if let Split::Heads(heads) = &mut part.split {
                *heads = u32::try_from(share).unwrap_or(*heads);
            }
        }
        Ok((!layers.is_empty()).then(|| Self { layers, parts, ..self.clone() }))
    }
}

impl KvLayout {
    /// Checks that every rank of `sharding` can have its share of this layout of the whole engine.
    ///
    /// # Errors
    /// [`ShardError`] naming what doesn't divide.
    pub fn check_sharding(&self, sharding: &Sharding) -> Result<(), ShardError> {
        sharding.validate()?;
        let Some(rank) = sharding.rank(0) else { return Ok(()) };
        let depth: u32 = sharding.stage_layers.iter().sum();
        for group in &self.groups {
            if let Some(layer) = group.layers.iter().find(|layer| **layer >= depth) {
                return Err(ShardError::Layer { layer: *layer, depth });
            }
            group.shard(sharding, rank)?;
        }
        Ok(())
    }

    /// The layout of one rank, given the whole engine's. Groups of which the rank's stage has no layer are left out,
    /// so a group's index may differ from its index here.
    ///
    /// # Errors
    /// [`ShardError`] naming what doesn't divide.
    pub fn shard(&self, sharding: &Sharding, rank: Rank) -> Result<Self, ShardError> {
        self.check_sharding(sharding)?;
        let groups = self.groups.iter().filter_map(|group| group.shard(sharding, rank).transpose());
        Ok(Self { groups: groups.collect::<Result<_, _>>()? })
    }
}

/// Why an engine's KV can't be shared out so.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ShardError {
    /// Choose sizes whose product is in range.
    #[error("an engine has 1 to {RANKS_MAX} ranks, not {tp_size} × {pp_size}")]
    Ranks {
        /// Tensor-parallel ranks.
        tp_size: u32,
        /// Pipeline stages.
        pp_size: usize,
    },
    /// Give every stage a layer, and no more layers than a model has.
    #[error("stages have at least one layer each and {MODEL_LAYERS_MAX} together; these have {layers}")]
    Stages {
        /// Layers of all stages.
        layers: u64,
    },
    /// Choose a TP size that divides the heads or is a multiple of them.
    #[error("{heads} heads cannot be shared by {tp_size} tensor-parallel ranks: neither divides the other")]
    Heads {
        /// Heads of the part.
        heads: u32,
        /// Tensor-parallel ranks.
        tp_size: u32,
    },
    /// Name a rank that the engine has.
    #[error("there is no tensor-parallel rank {tp_index} of {tp_size}")]
    Rank {
        /// The index.
        tp_index: u32,
        /// Tensor-parallel ranks.
        tp_size: u32,
    },
    /// Let the stages cover all layers.
    #[error("the layout has layer {layer}, the stages end before layer {depth}")]
    Layer {
        /// The first layer that no stage has.
        layer: u32,
        /// Layers of all stages.
        depth: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Gqa;

    fn llama() -> KvLayout {
        KvLayout::gqa(Gqa { layers: 32, kv_heads: 8, head_dim: 128, element_bytes: 2, block_tokens: 16 })
    }

    fn shares(tp_size: u32, split: Split) -> Vec<(Range<u32>, u32)> {
        let sharding = Sharding { tp_size, stage_layers: vec![1] };
        sharding
            .ranks()
            .map(|rank| rank.share(split).unwrap())
            .map(|share| (share.heads, share.copy))
            .collect()
    }

    #[test]
    fn heads_are_shared_out_or_replicated_like_vllm() {
        assert_eq!(shares(2, Split::Heads(4)), [(0..2, 0), (2..4, 0)]);
        assert_eq!(shares(4, Split::Heads(2)), [(0..1, 0), (0..1, 1), (1..2, 0), (1..2, 1)]);
        assert_eq!(shares(2, Split::Replicated), [(0..1, 0), (0..1, 1)]);
        let odd = Rank { tp_index: 0, tp_size: 4, pp_index: 0, pp_size: 1 };
        assert_eq!(odd.share(Split::Heads(6)), Err(ShardError::Heads { heads: 6, tp_size: 4 }));
    }

    #[test]
    fn leftover_layers_go_to_the_stages_before_the_last() {
        let stages = |pp_size, layers| Sharding::even(1, pp_size, layers).unwrap().stage_layers;
        assert_eq!(stages(1, 32), [32]);
        assert_eq!(stages(4, 32), [8, 8, 8, 8]);
        assert_eq!(stages(4, 34), [8, 9, 9, 8]);
        assert_eq!(stages(4, 35), [9, 9, 9, 8]);
        assert_eq!(stages(2, 61), [31, 30]);
        assert!(Sharding::even(1, 4, 3).is_err(), "an empty stage");
    }

    #[test]
    fn ranks_are_numbered_with_tp_inside() {
        let sharding = Sharding::even(4, 2, 32).unwrap();
        let ranks: Vec<_> = sharding.ranks().collect();
        assert_eq!(ranks.iter().map(Rank::index).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
        assert!(ranks.iter().all(|rank| sharding.rank(rank.index()) == Some(*rank)));
        assert_eq!((sharding.rank(8), sharding.layers(1), sharding.stage(16)), (None, 16..32, Some(1)));
        assert_eq!((sharding.layers(2), sharding.stage(32)), (32..32, None));
    }

    #[test]
    fn a_rank_has_its_part_of_the_bytes() {
        let sharding = Sharding::even(4, 2, 32).unwrap();
        let rank = llama().shard(&sharding, sharding.rank(5).unwrap()).unwrap();
        rank.validate().unwrap();
        assert_eq!(rank.bytes_per_token(), llama().bytes_per_token() / 8);
        assert_eq!(rank.groups[0].layers, (16..32).collect::<Vec<_>>());
        let wide = Sharding::even(16, 1, 32).unwrap();
        let rank = llama().shard(&wide, wide.rank(5).unwrap()).unwrap();
        assert_eq!(rank.bytes_per_token(), llama().bytes_per_token() / 8, "replicated");
    }

    #[test]
    fn shardings_that_do_not_fit_are_named() {
        let sharding =
            |tp_size, stage_layers: &[u32]| Sharding { tp_size, stage_layers: stage_layers.into() };
        let why = |sharding: Sharding| llama().check_sharding(&sharding).unwrap_err();
        assert!(matches!(why(sharding(0, &[32])), ShardError::Ranks { .. }));
        assert!(matches!(why(sharding(u32::MAX, &[16, 16])), ShardError::Ranks { .. }));
        assert!(matches!(why(sharding(1, &[])), ShardError::Ranks { .. }));
        assert!(matches!(why(sharding(1, &[32, 0])), ShardError::Stages { .. }));
        assert!(matches!(why(sharding(1, &[u32::MAX, u32::MAX])), ShardError::Stages { .. }));
        assert_eq!(why(sharding(1, &[31])), ShardError::Layer { layer: 31, depth: 31 });
        assert_eq!(why(sharding(3, &[32])), ShardError::Heads { heads: 8, tp_size: 3 });
    }
}
