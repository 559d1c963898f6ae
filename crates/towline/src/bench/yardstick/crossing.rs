//! Cross-memory attach beside shared memory: the kernel copies between this process and the owner, whose memory it reads
//! or writes by address. It needs no mapping of the other's memory, and is what other engines use between processes.

use std::sync::Arc;

use anyhow::{Context, Result};
use towline_wire::blocks::Run;
use towline_wire::receipt::Op;

use super::super::case::Case;
use super::super::links::Links;
use super::super::owner::Threads;
use super::super::raw::{Abroad, Mapping};
use super::copying::slices_of;
use super::{Gauge, RUN_BYTES_MAX, Scale, copy_threads, together};

/// What one thread moves of one pair.
struct Share {
    here: Arc<Mapping>,
    there: Abroad,
    runs: Vec<Run>,
}

/// See the head of this file.
pub(super) struct Crossing {
    /// Of each thread.
    shares: Vec<Vec<Share>>,
    op: Op,
}

impl Crossing {
    /// The one that fits the case.
    ///
    /// # Errors
    /// With `--connect`, where the owner is no child of this process; the kernel's.
    pub(super) fn scales(case: &Case, links: &Links, threads: Threads) -> Result<Vec<Scale>> {
        let threads = copy_threads(case, threads).max(1);
        let mut shares: Vec<Vec<Share>> = (0..threads).map(|_| Vec::new()).collect();
        let mut next = 0;
        for (link, runs) in links.links.iter().zip(links.runs(RUN_BYTES_MAX)?) {
            let owner = links.owners.get(link.owner).context("no such owner")?;
            let there = owner.abroad.context("the owner is no child of this process")?;
            let here = Arc::new(Mapping::of(&link.local)?);
            let slices = slices_of(&runs);
            for slices in slices.chunks(slices.len().div_ceil(threads).max(1)) {
                let share = Share { here: Arc::clone(&here), there, runs: slices.concat() };
                shares[next % threads].push(share);
                next += 1;
            }
        }
        shares.retain(|share| !share.is_empty());
        let (call, threads) =
            (if case.op == Op::Read { "process_vm_readv" } else { "process_vm_writev" }, shares.len());
        let note = format!("{call} of the same runs from one process to the other, threads: {threads}");
        let gauge = Box::new(Self { shares, op: case.op });
        Ok(vec![Scale { gauge, threads, note, bytes: case.bytes(), times: Vec::new() }])
    }
}

impl Gauge for Crossing {
    fn rounds(&mut self, rounds: u32) -> Result<Vec<std::time::Duration>> {
        let op = self.op;
        let cross = |share: &Share| share.here.cross(&share.there, &share.runs, op);
        together(self.shares.iter().map(|shares| move || shares.iter().try_for_each(cross)).collect(), rounds)
    }
}
