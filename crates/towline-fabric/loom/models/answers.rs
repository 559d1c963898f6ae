//! `src/pending.rs`: an answer that comes reaches whoever waits for it, however they wait.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use loom::future::block_on;
use loom::thread;

use crate::Model;
use crate::pending::pending;

pub(crate) const MODELS: &[Model] = &[
    ("a thread that waits for an answer is woken", a_waiting_thread),
    ("a task that awaits an answer is woken", an_awaiting_task),
    ("a task that moved to another executor is woken there", a_moved_task),
    ("of two answers the first counts and the second learns that it came late", two_answers),
    ("an answer that is lost wakes a thread with the error", a_lost_answer),
    ("an answer that is done is there to take, once", a_done_answer),
];

/// Longer than any execution; loom knows no time.
const FOREVER: Duration = Duration::from_secs(1 << 30);
const LOST: u32 = 0;

fn a_waiting_thread() {
    let (completer, mut pending) = pending(|| LOST);
    let other = thread::spawn(move || assert!(completer.complete(7)));
    assert_eq!(pending.wait(FOREVER), Some(7));
    assert_eq!(pending.try_take(), None);
    other.join().unwrap();
}

fn an_awaiting_task() {
    let (completer, pending) = pending(|| LOST);
    let other = thread::spawn(move || assert!(completer.complete(7)));
    assert_eq!(block_on(pending), 7);
    other.join().unwrap();
}

fn a_moved_task() {
    let (completer, pending) = pending(|| LOST);
    let other = thread::spawn(move || assert!(completer.complete(7)));
    let mut pending = pin!(pending);
    let first = pending.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    if first.is_pending() {
        assert_eq!(block_on(pending), 7);
    }
    other.join().unwrap();
}

fn two_answers() {
    let (completer, mut pending) = pending(|| LOST);
    let completer = Arc::new(completer);
    let second = Arc::clone(&completer);
    let other = thread::spawn(move || second.complete(2));
    let first = completer.complete(1);
    let second = other.join().unwrap();
    assert!(first != second, "exactly one counts");
    assert_eq!(pending.try_take(), Some(if first { 1 } else { 2 }));
}

fn a_lost_answer() {
    let (completer, mut pending) = pending(|| LOST);
    let other = thread::spawn(move || drop(completer));
    assert_eq!(pending.wait(FOREVER), Some(LOST));
    other.join().unwrap();
}

fn a_done_answer() {
    let (completer, mut pending) = pending(|| LOST);
    let other = thread::spawn(move || assert!(completer.complete(7)));
    if pending.is_done() {
        assert_eq!(pending.try_take(), Some(7));
    }
    other.join().unwrap();
    assert!(pending.is_done());
}
