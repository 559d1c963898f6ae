//! Ordered parts of a handoff: consecutive ranges of layers, so that the first can move while the last is computed.
//!
//! Owner and reader both count parts, and nothing else about them crosses the wire: the ticket says how many layers
//! each part has, the fence slot how many parts are ready, in order. A rank of a pipeline stage has only some of the
//! layers; a part of which it has none is ready there as soon as those before it are.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::shard::MODEL_LAYERS_MAX;

/// How many layers each part completes, in the model's order. In JSON the bare list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Parts(Vec<u32>);

impl Parts {
    /// One part of all `depth` layers: for KV that is computed already.
    pub fn whole(depth: u32) -> Self {
        Self(vec![depth])
    }

    /// A part a layer: the finest overlap of compute and transfer.
    pub fn by_layer(depth: u32) -> Self {
        Self(vec![1; depth as usize])
    }

    /// Parts of these many layers each; check with [`Parts::validate`].
    pub fn of_layers(layers: Vec<u32>) -> Self {
        Self(layers)
    }

    /// Checks that there is a part, that none is empty, and that together they are the `depth` layers of the model.
    ///
    /// # Errors
    /// [`PartsError`].
    pub fn validate(&self, depth: u32) -> Result<(), PartsError> {
        let layers: u64 = self.0.iter().map(|layers| u64::from(*layers)).sum();
        let fits = !self.0.is_empty() && self.0.len() <= MODEL_LAYERS_MAX as usize && !self.0.contains(&0);
        if fits && layers == u64::from(depth) { Ok(()) } else { Err(PartsError { layers, depth }) }
    }

    /// Parts there are.
    pub fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// The model's layers of part `part`; empty when there is no such part.
    pub fn layers(&self, part: u32) -> Range<u32> {
        let at = (part as usize).min(self.0.len());
        let start = self.0.iter().take(at).fold(0, |sum: u32, layers| sum.saturating_add(*layers));
        start..start.saturating_add(self.0.get(at).copied().unwrap_or(0))
    }

    /// The part that has `layer`, if one does.
    pub fn part_of(&self, layer: u32) -> Option<u32> {
        let mut end = 0;
        let part = self.0.iter().position(|layers| {
            end += u64::from(*layers);
            u64::from(layer) < end
        });
        part.and_then(|part| u32::try_from(part).ok())
    }

    /// How many parts are ready, in order, on a rank that has the model's layers `stage` and holds all tokens' KV of
    /// those before `computed`.
    pub fn ready(&self, stage: &Range<u32>, computed: u32) -> u32 {
        let done = computed.max(stage.start);
        let ready = (0..self.count()).take_while(|part| self.layers(*part).end.min(stage.end) <= done);
        u32::try_from(ready.count()).unwrap_or(u32::MAX)
    }
}

/// The owner is broken: its parts are not its layers.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("parts of {layers} layers in all, none or some empty, for a model of {depth}")]
pub struct PartsError {
    /// Layers of all parts.
    pub layers: u64,
    /// Layers of the model.
    pub depth: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_tile_the_layers_in_order() {
        let parts = Parts::of_layers(vec![1, 3, 2]);
        assert_eq!([0, 1, 2, 3].map(|part| parts.layers(part)), [0..1, 1..4, 4..6, 6..6]);
        assert_eq!(
            (parts.part_of(0), parts.part_of(3), parts.part_of(5), parts.part_of(6)),
            (Some(0), Some(1), Some(2), None)
        );
        assert_eq!((Parts::whole(6).count(), Parts::by_layer(6).count()), (1, 6));
    }

    #[test]
    fn a_part_is_ready_when_all_its_layers_and_all_before_it_are() {
        let parts = Parts::of_layers(vec![1, 3, 2]);
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6].map(|computed| parts.ready(&(0..6), computed)),
            [0, 1, 1, 1, 2, 2, 3]
        );
    }

    #[test]
    fn parts_without_a_layer_of_the_stage_wait_only_for_those_before() {
        let parts = Parts::by_layer(6);
        assert_eq!([0, 1, 3].map(|computed| parts.ready(&(0..3), computed)), [0, 1, 6]);
        assert_eq!([0, 3, 4, 6].map(|computed| parts.ready(&(3..6), computed)), [3, 3, 4, 6]);
    }

    #[test]
    fn parts_that_are_not_the_layers_are_refused() {
        assert_eq!(Parts::of_layers(vec![2, 4]).validate(6), Ok(()));
        for wrong in [vec![], vec![0, 6], vec![5], vec![u32::MAX, 7]] {
            assert!(Parts::of_layers(wrong).validate(6).is_err());
        }
    }
}
