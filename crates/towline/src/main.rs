//! The `towline` binary: the only place that reads flags and variables, prints, and ends the process.
//!
//! `cli` declares the flags, `config` settles what each one is, `logs` and `out` write; `worker`, `router`, `up` and
//! `bench` are the subcommands, each a thin shell around its crate. Exit codes, the same for every subcommand: 0 fine,
//! 1 findings, 2 usage or failure, 3 could not tell.

mod bench;
mod cli;
mod config;
mod logs;
mod out;
mod progress;
mod router;
mod stop;
mod up;
mod value;
mod worker;

use std::process::ExitCode;

use anyhow::Result;

use cli::Action;
use config::Invocation;
use out::{ClosedPipe, Findings};

/// It worked, and what it found is not as it should be.
const FINDINGS: u8 = 1;
/// Usage, or the tool failed.
const FAILURE: u8 = 2;

fn main() -> ExitCode {
    match config::parse(std::env::args_os().collect()).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => explain(&error),
    }
}

fn run(Invocation { mut cli, matches }: Invocation) -> Result<()> {
    if matches!(cli.action, Action::Bench(_)) && cli.global.log == cli::LOG_DEFAULT {
        cli.global.log = "warn".into(); // a line for each connection would stand between the figures
    }
    logs::start(&cli.global)?;
    match cli.action {
        Action::Up(args) => up::run(&cli.global, &args, &matches),
        Action::Worker(args) => worker::run(&cli.global, args, &matches),
        Action::Router(args) => router::run(&cli.global, args),
        Action::Bench(args) => bench::run(&cli.global, &args, &matches),
    }
}

/// Tells a person what went wrong, outermost first, and gives the exit code.
fn explain(error: &anyhow::Error) -> ExitCode {
    if error.is::<ClosedPipe>() {
        return ExitCode::SUCCESS;
    }
    if let Some(Findings(what)) = error.downcast_ref() {
        out::remark(&format!("found: {what}"));
        return ExitCode::from(FINDINGS);
    }
    if let Some(usage) = error.downcast_ref::<clap::Error>() {
        let _ = usage.print(); // help for a closed pipe is nobody's loss
        return ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(FAILURE));
    }
    out::remark(&format!("error: {error}"));
    for cause in error.chain().skip(1) {
        out::remark(&format!("  because: {cause}"));
    }
    ExitCode::from(FAILURE)
}

#[cfg(test)]
mod docs;
