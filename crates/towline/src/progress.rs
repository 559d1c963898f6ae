//! Bars for the steps of the start, one for each child, on a terminal only.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use crate::cli::Format;
use crate::up::Progress;

/// The bars; hidden where nobody would see them move.
pub(crate) struct Bars {
    all: MultiProgress,
    each: Mutex<HashMap<&'static str, ProgressBar>>,
}

impl Bars {
    pub(crate) fn new(format: Format) -> Self {
        let seen = format == Format::Human && std::io::stderr().is_terminal();
        let target = if seen { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { all: MultiProgress::with_draw_target(target), each: Mutex::default() }
    }

    /// Moves a child's bar.
    pub(crate) fn set(&self, child: &'static str, progress: &Progress) {
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = each.entry(child).or_insert_with(|| self.all.add(bar(child)));
        bar.set_message(progress.step.clone());
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    }

    /// Lets something else be written without a bar in its middle.
    pub(crate) fn pause(&self, write: impl FnOnce()) {
        self.all.suspend(write);
    }

    /// Takes them away.
    pub(crate) fn clear(&self) {
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        each.drain().for_each(|(_, bar)| bar.finish_and_clear());
    }
}

/// A bar for the steps of one process.
pub(crate) fn bar(name: &'static str) -> ProgressBar {
    let form = "{prefix:>10} {bar:32} {percent:>3}% {msg}";
    let style = ProgressStyle::with_template(form).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::hidden())
        .with_style(style)
        .with_prefix(name)
        .with_finish(ProgressFinish::AndClear)
}
