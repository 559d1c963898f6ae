//! The only place that writes for the reader: one line at a time, and a reader that went away is no failure.
//!
//! Results go to standard output, flushed line by line, because a parent or a script waits for the ready line.
//! Remarks go to standard error, where a failure to write is of no use to anybody.

use std::fmt;
use std::io::{self, Write};

use anyhow::Result;

/// Standard output has no reader any more (`towline … | head`). The process ends quietly, with success.
#[derive(Debug)]
pub(crate) struct ClosedPipe;

impl fmt::Display for ClosedPipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed by its reader")
    }
}

impl std::error::Error for ClosedPipe {}

/// The work was done and its result is bad: what was found, in a sentence. The process exits 1.
#[derive(Debug)]
pub(crate) struct Findings(pub(crate) String);

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Findings {}

/// Writes one line to standard output.
pub(crate) fn line(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => ClosedPipe.into(),
        _ => anyhow::Error::new(error).context("can't write to standard output"),
    })
}

/// Writes one line to standard error.
pub(crate) fn remark(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}
