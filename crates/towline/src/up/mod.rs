//! `towline up`: a whole deployment on this machine, as separate processes of this binary.
//!
//! A prefill worker and a decode worker on free loopback ports, a router in front of them, and a fresh cluster key that
//! only they know. `deployment` starts and stops them and hears what they say, `child` is one process, `ears` reads its
//! lines, `prompt` sends the one request of `--prompt`, `report` writes what a person or a program reads.
//!
//! The children take nothing from the configuration file or from `TOWLINE_WORKER_*`: what `[up]` says is all they are.

mod child;
mod deployment;
mod ears;
mod http;
mod prompt;
mod report;

use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use tokio_util::sync::CancellationToken;

use crate::cli::{Global, UpArgs};
use crate::stop;
pub(crate) use child::is_setting;
use deployment::Deployment;
use ears::Event;
pub(crate) use ears::Progress;
use report::Reporter;

pub(crate) fn run(global: &Global, args: &UpArgs, matches: &ArgMatches) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("can't start")?;
    let outcome = runtime.block_on(drive(global, args, matches));
    runtime.shutdown_background();
    outcome
}

async fn drive(global: &Global, args: &UpArgs, matches: &ArgMatches) -> Result<()> {
    let stop = stop::watch(false)?;
    let reporter = Reporter::new(global, args);
    let mut deployment = Deployment::new(global, args, matches)?;
    let outcome = live(&mut deployment, &reporter, args, &stop).await;
    deployment.stop().await;
    outcome
}

/// Starts everything and serves until told to stop, or until the one request of `--prompt` is answered.
async fn live(
    deployment: &mut Deployment,
    reporter: &Reporter,
    args: &UpArgs,
    stop: &CancellationToken,
) -> Result<()> {
    reporter.starting();
    let started = tokio::select! {
        started = deployment.start(reporter) => started?,
        () = stop.cancelled() => return interrupted(args),
    };
    if let Some(text) = &args.prompt {
        let answer = prompt::ask(&started, text, args);
        tokio::select! {
            answer = answer => reporter.answer(&answer?),
            failure = attend(deployment, reporter, Receipts::Unseen) => failure,
            () = stop.cancelled() => interrupted(args),
        }
    } else {
        reporter.ready(&started)?;
        tokio::select! {
            failure = attend(deployment, reporter, Receipts::Shown) => failure,
            () = stop.cancelled() => Ok(()),
        }
    }
}

/// Whether each transfer's receipt is told.
#[derive(Clone, Copy, PartialEq)]
enum Receipts {
    Shown,
    /// The answer to `--prompt` carries its own.
    Unseen,
}

/// Hears the children out until one ends, which is a failure of them all.
async fn attend(deployment: &mut Deployment, reporter: &Reporter, receipts: Receipts) -> Result<()> {
    loop {
        match deployment.next().await? {
            Event::Transfer(receipt) if receipts == Receipts::Shown => reporter.transfer(&receipt)?,
            Event::Log(line) => reporter.log(&line),
            _ => {}
        }
    }
}

fn interrupted(args: &UpArgs) -> Result<()> {
    if args.prompt.is_some() {
        bail!("interrupted before the answer");
    }
    Ok(())
}
