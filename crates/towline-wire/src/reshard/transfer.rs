//! A plan: transfers between pairs of ranks, as block lists and runs.

use crate::blocks::{self, BlockList, BlockListError, Run};

/// Equally many bytes on both sides, in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListPair {
    /// In the destination's region; its group is the destination layout's.
    pub local: BlockList,
    /// In the source's region; its group is the source layout's.
    pub remote: BlockList,
}

/// What one rank reads from one other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Which layer it completes, under [`Steps::ByLayer`](super::Steps::ByLayer).
    pub layer: Option<u32>,
    /// The reading rank's number.
    pub destination: u32,
    /// The rank it reads from.
    pub source: u32,
    /// Whole blocks, where both sides have equal block sizes.
    pub lists: Vec<ListPair>,
    /// All else: local is the destination's region, remote the source's. Ascending by local offset.
    pub runs: Vec<Run>,
}

impl Transfer {
    /// Bytes to move.
    pub fn bytes(&self) -> u64 {
        let lists: u64 = self.lists.iter().map(|pair| pair.local.bytes()).sum();
        lists + self.runs.iter().map(|run| run.len).sum::<u64>()
    }

    /// Blocks of all lists, and runs: most pieces that a transport may have to move.
    pub fn pieces(&self) -> u64 {
        let blocks = |list: &BlockList| list.bases.len() as u64 * list.indices.len() as u64;
        self.lists.iter().map(|pair| blocks(&pair.local)).sum::<u64>() + self.runs.len() as u64
    }

    /// All of it as runs of at most `run_bytes_max` bytes, neighbours merged.
    ///
    /// # Errors
    /// None for a transfer made by [`plan`](super::plan); a [`BlockListError`] when a list was altered.
    pub fn merged(&self, run_bytes_max: u64) -> Result<Vec<Run>, BlockListError> {
        let mut merged = Vec::new();
        for pair in &self.lists {
            merged.extend(blocks::runs(&pair.local, &pair.remote, run_bytes_max)?);
        }
        for run in &self.runs {
            append(&mut merged, *run, run_bytes_max);
        }
        Ok(merged)
    }
}

/// Adds a run: to the last one where it goes on there, and in pieces of at most `run_bytes_max`.
fn append(merged: &mut Vec<Run>, mut next: Run, run_bytes_max: u64) {
    if let Some(last) = merged.last_mut() {
        let touches = last.local + last.len == next.local && last.remote + last.len == next.remote;
        if touches && last.len < run_bytes_max {
            let taken = next.len.min(run_bytes_max - last.len);
            last.len += taken;
            next = Run { local: next.local + taken, remote: next.remote + taken, len: next.len - taken };
        }
    }
    while next.len > 0 {
        let len = next.len.min(run_bytes_max.max(1));
        merged.push(Run { len, ..next });
        next = Run { local: next.local + len, remote: next.remote + len, len: next.len - len };
    }
}

/// All transfers, by layer (under [`Steps::ByLayer`](super::Steps::ByLayer)), then destination, then source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// None is empty, and no two have the same layer, destination and source.
    pub transfers: Vec<Transfer>,
}

impl Plan {
    /// What completes the model's layer `layer`; nothing for a plan of [`Steps::Whole`](super::Steps::Whole).
    pub fn layer(&self, layer: u32) -> impl Iterator<Item = &Transfer> {
        self.transfers.iter().filter(move |transfer| transfer.layer == Some(layer))
    }

    /// What rank `destination` reads.
    pub fn destination(&self, destination: u32) -> impl Iterator<Item = &Transfer> {
        self.transfers.iter().filter(move |transfer| transfer.destination == destination)
    }

    /// Bytes to move.
    pub fn bytes(&self) -> u64 {
        self.transfers.iter().map(Transfer::bytes).sum()
    }

    /// Most pieces that transports may have to move.
    pub fn pieces(&self) -> u64 {
        self.transfers.iter().map(Transfer::pieces).sum()
    }
}
