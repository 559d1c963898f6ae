//! Every interleaving of the threads that meet in the fabric's queues, by loom: no lost wake-up, nothing lost or seen twice.
//!
//! The files under test are the fabric's own, compiled here a second time with loom's locks behind `crate::sync`:
//! `pending.rs`, `io/inbox.rs`, `io/mailbox.rs` and `io/timers.rs`. What they touch besides (the io threads, the eventfd, the error) is
//! stood in for by [`io`] and [`error`], which keep what the real ones promise. A thread that is never woken is a
//! deadlock to loom, and fails. `fence` is different: the fabric's stores and loads of a fence slot, restated.
//!
//! ```sh
//! scripts/sanitize.sh loom            # all of them
//! scripts/sanitize.sh loom letter     # those whose name has the word
//! ```
//!
//! **Bounds.** At most four threads, and two preemptions an execution: what more than two switches at the wrong places
//! would need is not found. `LOOM_MAX_PREEMPTIONS=5` looks further, for hours. Timeouts never pass here.

#![forbid(unsafe_code)]

mod answers;
mod error;
mod fence;
mod io;
#[allow(dead_code, reason = "the fabric's file; the models call a part of it")]
#[path = "../../src/pending.rs"]
mod pending;

/// What `src/sync.rs` takes from std.
mod sync {
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
}

// `io/timers.rs` names the eventfd that it writes to `mio::Waker`.
extern crate self as mio;
pub(crate) use io::Waker;

use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use loom::model::Builder;

/// Preemptions of an execution.
const PREEMPTIONS: usize = 2;
/// Most switches of an execution: ten times what the longest model takes; beyond it, it spins.
const SWITCHES_MAX: usize = 5_000;

/// A sentence that is true when the function, tried in every interleaving, neither panics nor deadlocks.
type Model = (&'static str, fn());

const MODELS: &[&[Model]] = &[answers::MODELS, io::LETTERS, io::MAIL, io::DEADLINES, fence::MODELS];

/// Tries `model` in every interleaving within the bounds; how many there were.
fn explore(model: fn()) -> u64 {
    let mut builder = Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(PREEMPTIONS));
    builder.max_branches = SWITCHES_MAX;
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    count.load(Ordering::Relaxed)
}

/// Whether some interleaving of `model` fails. What it says when it does is nobody's trouble.
fn is_caught(model: fn()) -> bool {
    let loud = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let caught = panic::catch_unwind(|| explore(model)).is_err();
    panic::set_hook(loud);
    caught
}

fn main() {
    let word = std::env::args().nth(1).unwrap_or_default();
    let chosen = |(name, _): &&Model| name.contains(&word);
    let mut ran = 0;
    for (name, model) in MODELS.iter().copied().flatten().filter(chosen) {
        let began = Instant::now();
        print!("{name} ... "); // first: a model that fails ends the run, with its own words
        let count = explore(*model);
        println!("ok ({count} interleavings, {:.1} s)", began.elapsed().as_secs_f64());
        ran += 1;
    }
    for (name, mutant) in fence::MUTANTS.iter().filter(chosen) {
        assert!(is_caught(*mutant), "not caught: {name}");
        println!("caught: {name}");
        ran += 1;
    }
    assert!(ran > 0, "no model's name has {word:?}");
}
