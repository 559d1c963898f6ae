//! Who holds what in a case, and who moves what with whom, before anything is connected.
//!
//! `many-to-one` has one initiating agent and an owner for each pair; `one-to-many` has one owner and an agent of this
//! process for each pair, whose lanes lie one after the other in the owner's memory. A re-sharding has an owner for each
//! rank of the one side, an agent and a memory for each rank of the other, and the pairs that the planner makes.

use anyhow::Result;
use towline_wire::blocks::BlockList;
use towline_wire::receipt::Op;

use super::case::Case;
use super::kv::RankKv;
use super::message::Contents;
use super::reshard::Passage;
use super::shape::Side;

/// See the head of this file.
pub(crate) struct Pairing {
    /// Of each owner's memory.
    pub(crate) contents: Vec<Contents>,
    /// This side's memories, one an initiator, when a prompt is re-sharded; else each pair has one of its own.
    pub(crate) ranks: Vec<RankKv>,
    pub(crate) pairs: Vec<Pair>,
}

/// An initiator and an owner.
pub(crate) struct Pair {
    pub(crate) initiator: usize,
    pub(crate) owner: usize,
    /// What each transfer moves: the initiator's list, and the owner's.
    pub(crate) parts: Vec<(BlockList, BlockList)>,
}

impl Pairing {
    /// Of a valid case.
    ///
    /// # Errors
    /// When the planner of re-shardings can't.
    pub(crate) fn of(case: &Case) -> Result<Self> {
        let Some((reshard, (model, _))) = case.reshard.zip(case.model) else {
            let contents = vec![Contents::Pages(case.shape); case.owners() as usize];
            let pairs = (0..case.peers).map(|index| Pair::lanes(case, index)).collect();
            return Ok(Self { contents, ranks: Vec::new(), pairs });
        };
        let prompt = reshard.prompt(model, case.shape.blocks, case.shape.shuffle)?;
        let planned = |Passage { source, destination, lists }: Passage| match case.op {
            Op::Read => {
                let parts = lists.into_iter().map(|(from, to)| (to, from)).collect();
                Pair { initiator: destination, owner: source, parts }
            }
            Op::Write => Pair { initiator: source, owner: destination, parts: lists },
        };
        let pairs = reshard.passages(model, &prompt)?.into_iter().map(planned).collect();
        let (owners, ranks) = match case.op {
            Op::Read => (prompt.sources, prompt.destinations),
            Op::Write => (prompt.destinations, prompt.sources),
        };
        Ok(Self { contents: owners.into_iter().map(Contents::Rank).collect(), ranks, pairs })
    }
}

impl Pair {
    /// Pair `index` of a pattern: a lane for each transfer of the batch.
    fn lanes(case: &Case, index: u32) -> Self {
        let (shape, span) = (case.shape, case.shape.span_bytes());
        let first_lane = if case.initiators() > 1 { index * case.batch } else { 0 };
        let lists = |lane: u32| {
            let there = first_lane + lane;
            (
                shape.list(Side::Local, there, u64::from(lane) * span),
                shape.list(Side::Remote, there, u64::from(there) * span),
            )
        };
        Self {
            initiator: if case.initiators() > 1 { index as usize } else { 0 },
            owner: if case.owners() > 1 { index as usize } else { 0 },
            parts: (0..case.batch).map(lists).collect(),
        }
    }
}
