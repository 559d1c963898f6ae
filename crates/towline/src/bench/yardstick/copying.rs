//! The limit of shared memory: the same copy between the same memories by plain loops. The owner's is mapped through the
//! files of its process; where that can't be, another one takes its place, allocated like it.
//!
//! Both kinds of stores are tried, since which is faster depends on whether the data fits a cache; threads take the next
//! slice when they are done with one, as the fabric's do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use towline_fabric::{Access, Memory};
use towline_wire::blocks::Run;
use towline_wire::receipt::Op;

use super::super::case::Case;
use super::super::links::{Far, Links};
use super::super::owner::Threads;
use super::super::pattern::{self, Seed};
use super::super::raw::{Mapping, Stores};
use super::{Gauge, RUN_BYTES_MAX, Scale, copy_threads, together};

/// Runs that are copied at a time, up to [`RUN_BYTES_MAX`] together.
struct Slice {
    to: Arc<Mapping>,
    from: Arc<Mapping>,
    runs: Vec<Run>,
}

/// See the head of this file.
pub(super) struct Copying {
    slices: Arc<Vec<Slice>>,
    stores: Stores,
    threads: usize,
}

impl Copying {
    /// One for each kind of stores.
    ///
    /// # Errors
    /// The kernel's, when there is no memory.
    pub(super) fn scales(case: &Case, links: &Links, threads: Threads) -> Result<Vec<Scale>> {
        let theirs = links.owners.iter().map(there).collect::<Result<Vec<_>>>()?;
        let mut slices = Vec::new();
        for (link, runs) in links.links.iter().zip(links.runs(RUN_BYTES_MAX)?) {
            let here = Arc::new(Mapping::of(&link.local)?);
            let there = Arc::clone(theirs.get(link.owner).context("no such owner")?);
            let (to, from) = if case.op == Op::Read { (here, there) } else { (there, here) };
            for runs in slices_of(&runs) {
                let runs = runs.iter().map(|run| turned(run, case.op)).collect();
                slices.push(Slice { to: Arc::clone(&to), from: Arc::clone(&from), runs });
            }
        }
        let (slices, threads) = (Arc::new(slices), copy_threads(case, threads));
        let threads = threads.clamp(1, slices.len().max(1));
        let scale = |stores: Stores| Scale {
            gauge: Box::new(Self { slices: Arc::clone(&slices), stores, threads }),
            threads,
            note: format!(
                "{} stores, the same runs between {}, threads: {threads}",
                if stores == Stores::Streaming { "streaming" } else { "cached" },
                if links.owners.iter().all(|owner| owner.abroad.is_some()) {
                    "the same memories"
                } else {
                    "two local memories"
                }
            ),
            bytes: case.bytes(),
            times: Vec::new(),
        };
        Ok([Stores::Cached, Stores::Streaming].map(scale).into())
    }
}

impl Gauge for Copying {
    fn rounds(&mut self, rounds: u32) -> Result<Vec<std::time::Duration>> {
        let turns: Vec<AtomicUsize> = (0..rounds).map(|_| AtomicUsize::new(0)).collect();
        let work = || {
            let (slices, stores, mut turns) = (&self.slices, self.stores, turns.iter());
            move || {
                let next = turns.next().context("more rounds than were asked for")?;
                while let Some(Slice { to, from, runs }) = slices.get(next.fetch_add(1, Ordering::Relaxed)) {
                    to.copy_from(from, runs, stores)?;
                }
                Ok(())
            }
        };
        together((0..self.threads).map(|_| work()).collect(), rounds)
    }
}

/// The owner's memory, or one like it.
fn there(owner: &Far) -> Result<Arc<Mapping>> {
    if let Some(abroad) = &owner.abroad {
        return Ok(Arc::new(Mapping::of_another(abroad)?));
    }
    let memory = Memory::allocate_for("bench-limit", owner.region_bytes, Access::PeersWrite)?;
    pattern::fill(&memory, Seed(0))?;
    Ok(Arc::new(Mapping::of(&memory)?))
}

/// A run whose local end is where a copy goes to.
fn turned(run: &Run, op: Op) -> Run {
    let Run { local, remote, len } = *run;
    if op == Op::Read { *run } else { Run { local: remote, remote: local, len } }
}

/// Consecutive runs that are at most a slice together. Each run alone is.
pub(super) fn slices_of(runs: &[Run]) -> Vec<&[Run]> {
    let mut slices = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (index, run) in runs.iter().enumerate() {
        if index > start && bytes + run.len > RUN_BYTES_MAX {
            slices.push(&runs[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += run.len;
    }
    slices.extend((start < runs.len()).then(|| &runs[start..]));
    slices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(value: u8) -> (Memory, Arc<Mapping>) {
        let memory = Memory::allocate_for("copying", 1 << 20, Access::PeersWrite).unwrap();
        memory.write_from(0, &vec![value; 1 << 20]).unwrap();
        let mapping = Arc::new(Mapping::of(&memory).unwrap());
        (memory, mapping)
    }

    #[test]
    fn every_slice_is_copied_in_every_round_by_some_thread() {
        let ((source, from), (target, to)) = (mapped(1), mapped(0));
        let run = |index: u64| Run { local: index * 4096, remote: (255 - index) * 4096, len: 4096 };
        let slice = |index| Slice { to: Arc::clone(&to), from: Arc::clone(&from), runs: vec![run(index)] };
        let slices = Arc::new((0..256).map(slice).collect::<Vec<_>>());
        for (stores, threads, value) in [(Stores::Cached, 1, 2), (Stores::Streaming, 3, 3)] {
            source.write_from(0, &vec![value; 1 << 20]).unwrap();
            let mut copying = Copying { slices: Arc::clone(&slices), stores, threads };
            assert_eq!(copying.rounds(2).unwrap().len(), 2);
            let mut found = vec![0; 1 << 20];
            target.read_into(0, &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == value), "{stores:?}");
        }
    }

    #[test]
    fn slices_cover_every_run_once_within_bounds() {
        let runs: Vec<Run> =
            (0..1000).map(|index| Run { local: 0, remote: 0, len: 1 + index % 7 * 100_000 }).collect();
        let slices = slices_of(&runs);
        assert_eq!(slices.concat(), runs);
        let bytes = |slice: &[Run]| slice.iter().map(|run| run.len).sum::<u64>();
        assert!(slices.iter().all(|slice| bytes(slice) <= RUN_BYTES_MAX));
        assert!(slices.len() > 1 && slices_of(&[]).is_empty());
    }
}
