//! `src/io/timers.rs`: the io thread never sleeps past a deadline that another thread set meanwhile.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use loom::thread;

use super::Waker;
use super::timers::{Timed, Timers};
use crate::Model;

pub(crate) const MODELS: &[Model] = &[
    ("the first deadline of all wakes an io thread that sleeps for ever", the_first_deadline),
    ("an earlier deadline wakes an io thread that sleeps until a later one", an_earlier_deadline),
    ("of two deadlines set at once the io thread sleeps until the earlier", two_deadlines),
];

struct Nobody;

impl Timed for Nobody {
    fn handle_deadline(&self) {}
}

/// As the reactor does: asks until when it may sleep, sleeps. Time stands still, so a sleep ends only when woken; it
/// returns when the sleep would be until `wanted` or before, and deadlocks when it sleeps on.
fn sleep_until(timers: &Timers, waker: &Waker, wanted: Instant) {
    while timers.sleep().is_none_or(|until| until > wanted) {
        waker.sleep();
        timers.awake();
    }
}

fn fixture() -> (Arc<Waker>, Arc<Timers>, impl Fn(u64) -> Instant + Copy + Send + 'static) {
    let waker = Arc::new(Waker::new());
    let timers = Arc::new(Timers::new(Arc::clone(&waker)));
    let now = Instant::now();
    (waker, timers, move |seconds| now + Duration::from_secs(seconds))
}

fn the_first_deadline() {
    let (waker, timers, after) = fixture();
    let setter = Arc::clone(&timers);
    let other = thread::spawn(move || {
        setter.insert(after(1), Weak::<Nobody>::new());
    });
    sleep_until(&timers, &waker, after(1));
    other.join().unwrap();
}

fn an_earlier_deadline() {
    let (waker, timers, after) = fixture();
    timers.insert(after(9), Weak::<Nobody>::new());
    let setter = Arc::clone(&timers);
    let other = thread::spawn(move || {
        setter.insert(after(1), Weak::<Nobody>::new());
    });
    sleep_until(&timers, &waker, after(1));
    other.join().unwrap();
}

fn two_deadlines() {
    let (waker, timers, after) = fixture();
    let others = [1, 2].map(|seconds| {
        let setter = Arc::clone(&timers);
        thread::spawn(move || {
            setter.insert(after(seconds), Weak::<Nobody>::new());
        })
    });
    sleep_until(&timers, &waker, after(1));
    for other in others {
        other.join().unwrap();
    }
}
