//! Logs: lines for a person or JSON for a program, on standard error, never on standard output.
//!
//! JSON lines are flat (`{"timestamp", "level", "target", "message", fields…}`): `up` reads those of its children, and
//! so can any collector. Two targets have a fixed form, because `up` shows them: [`PROGRESS`] and [`KV_TRANSFER`].

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use crate::cli::{Format, Global};

/// Target of a worker's start: `step`, `done`, `total`.
pub(crate) const PROGRESS: &str = "progress";
/// Target of a decode worker's pulls: the fields of a receipt.
pub(crate) const KV_TRANSFER: &str = "kv_transfer";

/// Starts logging for this process. Called once.
pub(crate) fn start(global: &Global) -> Result<()> {
    let filter = EnvFilter::try_new(&global.log)
        .with_context(|| format!("--log {:?}: write a level (info) or target=level pairs", global.log))?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match global.format {
        Format::Human => logs.with_ansi(std::io::stderr().is_terminal()).with_target(false).init(),
        Format::Json => {
            logs.json().flatten_event(true).with_current_span(false).with_span_list(false).init();
            std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
        }
    }
    Ok(())
}
