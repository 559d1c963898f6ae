//! Answers that come later, without an async runtime.
//!
//! A [`Pending`] can be awaited, polled, or waited for with a time limit; whichever suits the caller. It is a slot
//! behind a mutex, with a [`Waker`] for tasks and a condition variable for threads. The other half, the completer,
//! fills the slot once; dropped unused it fills it with the error that it was made with, so that nobody waits forever.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::io::look_around;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// A value that another thread will bring. Completes exactly once; after it was taken, it stays empty.
#[derive(Debug)]
#[must_use = "the answer is lost unless it is awaited or waited for"]
pub struct Pending<T> {
    slot: Arc<Slot<T>>,
}

#[derive(Debug)]
struct Slot<T> {
    state: Mutex<State<T>>,
    filled: Condvar,
}

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    done: bool,
    waker: Option<Waker>,
    /// Whether a thread sleeps for it: waking costs a system call.
    asleep: bool,
}

impl<T> Slot<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // A panic cannot leave the slot half-filled: every critical section is a plain assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fill(&self, value: T) -> bool {
        let (waker, asleep) = {
            let mut state = self.lock();
            if state.done {
                return false;
            }
            state.done = true;
            state.value = Some(value);
            (state.waker.take(), state.asleep)
        };
        if asleep {
            self.filled.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }
}

impl<T> Pending<T> {
    /// The value, if it is there and was not taken yet. Never blocks.
    pub fn try_take(&mut self) -> Option<T> {
        self.slot.lock().value.take()
    }

    /// Whether the value has come (taken or not).
    pub fn is_done(&self) -> bool {
        self.slot.lock().done
    }

    /// Blocks the calling thread until the value comes or `timeout` has passed; `None` then, or when it was taken
    /// before. Looks around for up to 100 µs before it sleeps: small transfers take less than waking a thread. Not for
    /// callbacks of [`Owner`](crate::Owner): they run on the thread that brings values.
    pub fn wait(&mut self, timeout: Duration) -> Option<T> {
        let until = Instant::now().checked_add(timeout);
        look_around(timeout, || self.is_done());
        let mut state = self.slot.lock();
        while !state.done {
            let left = until.map_or(timeout, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            state.asleep = true;
            state = self.slot.filled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.value.take()
    }
}

impl<T> Future for Pending<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut state = self.slot.lock();
        if let Some(value) = state.value.take() {
            return Poll::Ready(value);
        }
        if !state.done {
            state.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

/// Fills a [`Pending`], once.
pub(crate) struct Completer<T> {
    slot: Arc<Slot<T>>,
    lost: fn() -> T,
}

impl<T> Completer<T> {
    /// Fills the slot; later calls change nothing and give `false`.
    pub(crate) fn complete(&self, value: T) -> bool {
        self.slot.fill(value)
    }

    /// Whether somebody still holds the other half.
    pub(crate) fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.slot) > 1
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        self.slot.fill((self.lost)());
    }
}

/// An empty slot and what fills it. `lost` makes the value for when the completer is dropped unused.
pub(crate) fn pending<T>(lost: fn() -> T) -> (Completer<T>, Pending<T>) {
    let state = Mutex::new(State { value: None, done: false, waker: None, asleep: false });
    let slot = Arc::new(Slot { state, filled: Condvar::new() });
    (Completer { slot: Arc::clone(&slot), lost }, Pending { slot })
}

/// A slot that is filled from the start.
pub(crate) fn ready<T>(value: T) -> Pending<T> {
    let state = Mutex::new(State { value: Some(value), done: true, waker: None, asleep: false });
    Pending { slot: Arc::new(Slot { state, filled: Condvar::new() }) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[test]
    fn the_first_value_counts_and_is_taken_once() {
        let (completer, mut pending) = pending(|| 0);
        assert_eq!(pending.try_take(), None);
        assert_eq!(pending.wait(Duration::from_millis(1)), None);
        assert!(completer.complete(7));
        assert!(!completer.complete(8));
        assert_eq!(pending.wait(Duration::ZERO), Some(7));
        assert_eq!(pending.try_take(), None);
    }

    #[test]
    fn a_lost_completer_brings_its_error() {
        let (completer, mut pending) = pending(|| Err::<(), _>("lost"));
        drop(completer);
        assert_eq!(pending.wait(Duration::from_secs(1)), Some(Err("lost")));
    }

    #[test]
    fn a_waiting_thread_and_a_task_are_woken() {
        struct Count(AtomicUsize);
        impl Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let (completer, mut pending) = pending(|| 0);
        assert!(Pin::new(&mut pending).poll(&mut Context::from_waker(&waker)).is_pending());
        let other = std::thread::spawn(move || completer.complete(3));
        assert_eq!(pending.wait(Duration::from_secs(10)), Some(3));
        other.join().unwrap();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
    }
}
