//! `towline bench`: figures of this machine, each beside the limit that was measured in the same run.
//!
//! `bench kv` moves a KV cache between processes. `flags` is what may be asked, `case` what it comes to, `model` the
//! shapes of real models, `shape` where the pages of a transfer lie, `pattern` what they hold and how a wrong byte is
//! found; `reshard` moves a prompt between engines of different ranks, `kv` says what each rank must hold.
//! The owner of the remote memory is this binary again: `owner` serves, `message` is what it is told and answers,
//! `child` starts it, `remote` steers it. `sweep` runs the cases, which `pairing` lays out and `links` connects, and has
//! `start` time an agent's first steps; `yardstick` measures the limits between the repetitions, by the bare means of
//! `raw` and over the streams of `flood`; `cpu` counts processor time. `row` is a result; `report` prints it, `baseline`
//! compares it, `chart` draws it; `machine` says where it was measured.

mod baseline;
mod case;
mod chart;
mod child;
mod cpu;
mod flags;
mod flood;
mod kv;
mod links;
mod machine;
mod message;
mod model;
mod owner;
mod pairing;
mod pattern;
mod raw;
mod remote;
mod report;
mod reshard;
mod row;
mod shape;
mod start;
mod sweep;
mod yardstick;

use std::time::Duration;

use anyhow::{Result, bail};
use clap::{ArgMatches, Args, Subcommand};

use crate::cli::Global;
use flags::KvArgs;

/// Schema number of every JSON line of `bench`.
pub(crate) const SCHEMA: u32 = 1;
/// Longest wait for one transfer or one step of an owner: filling some GiB takes seconds on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// `towline bench`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: What,
}

/// What is measured.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum What {
    /// Move a KV cache between processes and check every byte
    Kv(KvArgs),
}

pub(crate) fn run(global: &Global, args: &BenchArgs, matches: &ArgMatches) -> Result<()> {
    let What::Kv(kv) = &args.what;
    let matches = matches.subcommand_matches("kv").unwrap_or(matches);
    if kv.listen.is_some() && !kv.connect.is_empty() {
        bail!("--listen serves and --connect measures: give one of them to each of two processes");
    }
    if kv.listen.is_some() { owner::run(global, kv, matches) } else { sweep::run(global, kv, matches) }
}
