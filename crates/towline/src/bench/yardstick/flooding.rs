//! The limit of TCP: as many raw streams (`flood`) as the transfer has, between the same memories of the same processes.
//!
//! Tried with the kernel's socket buffers and with small ones, since which is faster depends on where the scheduler puts
//! the two ends of a stream; the better one counts.

use std::sync::Arc;

use anyhow::{Context, Result};

use super::super::case::Case;
use super::super::flood::{Plan, STREAMS_MAX, Stream};
use super::super::links::Links;
use super::super::owner::Threads;
use super::super::raw::Mapping;
use super::{Gauge, RUN_BYTES_MAX, Scale, together};

/// Transfers below it use one stream: from here on the fabric dials the others.
const SPREAD_BYTES: u64 = 4 << 20;

/// Buffers of half a core's own cache or less, on today's servers.
const SMALL_BUFFER_BYTES: u64 = 256 << 10;

/// See the head of this file.
pub(super) struct Flooding {
    streams: Vec<Stream>,
}

impl Flooding {
    /// One for each kind of buffers.
    ///
    /// # Errors
    /// When an owner serves no raw streams, or the kernel refuses one.
    pub(super) fn scales(case: &Case, links: &Links, threads: Threads) -> Result<Vec<Scale>> {
        [0, SMALL_BUFFER_BYTES].map(|bytes| Self::scale(case, (links, threads), bytes)).into_iter().collect()
    }

    fn scale(case: &Case, (links, threads): (&Links, Threads), buffer_bytes: u64) -> Result<Scale> {
        let each = (STREAMS_MAX / links.links.len().max(1)).clamp(1, threads.streams);
        let mut streams = Vec::new();
        for (link, runs) in links.links.iter().zip(links.runs(RUN_BYTES_MAX)?) {
            let owner = links.owners.get(link.owner).context("no such owner")?;
            let at = owner.flood.context("the owner serves no raw streams")?;
            let here = Arc::new(Mapping::of(&link.local)?);
            let bytes: u64 = runs.iter().map(|run| run.len).sum();
            let count = if bytes < SPREAD_BYTES { 1 } else { each };
            for runs in runs.chunks(runs.len().div_ceil(count).max(1)) {
                let plan = Plan { op: case.op, buffer_bytes, runs };
                streams.push(Stream::open(at, Arc::clone(&here), plan).context("raw streams")?);
            }
        }
        let threads = streams.len();
        let buffers =
            if buffer_bytes > 0 { format!("{buffer_bytes} bytes") } else { "the kernel's own".into() };
        let note = format!(
            "readv and writev of the same runs between the same memories, raw TCP streams: {threads}, \
             socket buffers: {buffers}"
        );
        let gauge = Box::new(Self { streams });
        Ok(Scale { gauge, threads, note, bytes: case.bytes(), times: Vec::new() })
    }
}

impl Gauge for Flooding {
    fn rounds(&mut self, rounds: u32) -> Result<Vec<std::time::Duration>> {
        together(self.streams.iter_mut().map(|stream| move || stream.round()).collect(), rounds)
    }
}
