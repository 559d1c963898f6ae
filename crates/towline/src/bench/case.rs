//! One case of a sweep, which comes to one line of the result.

use towline_wire::receipt::{Op, TransportKind};

use super::flags::{Order, Pattern};
use super::model::Model;
use super::reshard::{Prompt, Reshard};
use super::shape::Shape;

/// See the head of this file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) transport: TransportKind,
    pub(crate) op: Op,
    pub(crate) pattern: Pattern,
    pub(crate) peers: u32,
    pub(crate) batch: u32,
    pub(crate) order: Order,
    /// Bytes of a block; `None` for one contiguous piece.
    pub(crate) block_bytes: Option<u64>,
    /// The model, and the tokens of its prompt.
    pub(crate) model: Option<(&'static Model, u32)>,
    /// From which ranks to which the model's prompt moves.
    pub(crate) reshard: Option<Reshard>,
    /// One transfer; with `reshard`, the prompt as a single rank would hold it.
    pub(crate) shape: Shape,
}

impl Case {
    /// Bytes that a repetition moves.
    pub(crate) fn bytes(&self) -> u64 {
        match self.prompt() {
            Some(prompt) => prompt.destinations.iter().map(|rank| rank.bytes()).sum(),
            None => self.shape.size_bytes() * u64::from(self.batch) * u64::from(self.peers),
        }
    }

    /// Bytes of the memories of one side; of the side that has more, where they differ.
    pub(crate) fn memory_bytes(&self) -> u64 {
        match self.prompt() {
            Some(Prompt { sources, destinations }) => {
                let bytes = [sources, destinations]
                    .map(|ranks| ranks.iter().filter_map(|rank| rank.region_bytes()).sum::<u64>());
                bytes.into_iter().max().unwrap_or(0)
            }
            None => self.shape.span_bytes() * u64::from(self.batch) * u64::from(self.peers),
        }
    }

    /// The ranks' memories, when it is a re-sharding.
    fn prompt(&self) -> Option<Prompt> {
        let (reshard, (model, _)) = self.reshard.zip(self.model)?;
        reshard.prompt(model, self.shape.blocks, self.shape.shuffle).ok()
    }

    /// Owners with memory of their own.
    pub(crate) fn owners(&self) -> u32 {
        match (self.pattern, self.reshard) {
            (_, Some(reshard)) => reshard.ends(self.op).0.count(),
            (Pattern::ManyToOne, None) => self.peers,
            _ => 1,
        }
    }

    /// Agents that post.
    pub(crate) fn initiators(&self) -> u32 {
        match (self.pattern, self.reshard) {
            (_, Some(reshard)) => reshard.ends(self.op).1.count(),
            (Pattern::OneToMany, None) => self.peers,
            _ => 1,
        }
    }

    /// Lanes in the memory of each owner.
    pub(crate) fn lanes(&self) -> u32 {
        if self.reshard.is_some() { 1 } else { self.batch * self.peers / self.owners() }
    }
}
