//! The threads that copy.
//!
//! **Cost.** A slice of 2 MiB is copied in a few hundred µs; handing it over takes a lock and, when a thread sleeps, one
//! wake-up (5 to 100 µs to its first byte, which is why small slices are copied inline). Threads sleep on a condition
//! variable when there is nothing to do, after looking around if the last sleep was short ([`Spin`]).

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use towline_wire::blocks::Run;
use towline_wire::frame::Status;
use towline_wire::receipt::Op;

use super::foreign::Foreign;
use super::{CMA_RAIL, MAPPING_RAIL};
use crate::io::Spin;
use crate::region::{Memory, Piece, RangeError, Stores};
use crate::transport::{Moved, PathError, Slice};

/// Slices up to this are copied by whoever posts them: about 10 µs, twice what handing over costs.
pub(super) const INLINE_BYTES: u64 = 64 * 1024;

/// Transfers from this size on are copied past the caches: what is larger than a core's own cache has left it before the
/// reader comes to it, and in the shared one it would push out the weights.
const STREAM_BYTES: u64 = 8 << 20;

/// Bytes of a mapping whose pages are entered at a time: about 1 ms, which is what a slice may have to wait.
const POPULATE_BYTES: u64 = 16 << 20;

/// Most threads: beyond, no memory system here copies faster.
const THREADS_MAX: usize = 64;

/// How the peer's region is reached.
pub(super) enum Reach {
    /// It is mapped here.
    Mapping(Arc<Memory>),
    /// It is foreign: the kernel copies by address.
    Address(Arc<Foreign>),
}

/// A slice with what it needs.
pub(crate) struct Work {
    pub(super) slice: Slice,
    pub(super) reach: Reach,
    pub(super) closed: Arc<AtomicBool>,
}

impl Work {
    /// Copies the slice, unless its path was closed or nobody wants it, and completes it.
    pub(super) fn run(self) {
        let outcome = if self.closed.load(Ordering::Acquire) {
            Err(PathError::Closed("the path was closed".into()))
        } else if !self.slice.is_wanted() {
            Err(PathError::Unwanted)
        } else {
            self.copy()
        };
        // What is read after the completion, a fence slot above all, is read after the data.
        fence(Ordering::SeqCst);
        let Self { slice, reach, .. } = self;
        drop(reach);
        slice.complete(outcome);
    }

    fn copy(&self) -> Result<Moved, PathError> {
        let (bytes, rail) = match &self.reach {
            Reach::Mapping(remote) => (self.copy_mapped(remote)?, MAPPING_RAIL),
            Reach::Address(foreign) => (foreign.copy(&self.slice)?, CMA_RAIL),
        };
        Ok(Moved { bytes, rail })
    }

    fn copy_mapped(&self, remote: &Memory) -> Result<u64, PathError> {
        let Some(local) = self.slice.local() else { return Ok(0) };
        let stores =
            if self.slice.part_of_bytes() < STREAM_BYTES { Stores::Cached } else { Stores::Streaming };
        let runs = self.slice.runs().iter();
        let copied = match self.slice.op() {
            // The kernel copies, as pages of a file may be gone.
            op if local.is_file() => runs.map(|run| copy_run(op, run, (local, remote))).sum(),
            Op::Read => {
                let pieces = runs.map(|run| Piece { to: run.local, from: run.remote, len: run.len });
                local.copy_pieces(remote, pieces, stores)
            }
            Op::Write => {
                let pieces = runs.map(|run| Piece { to: run.remote, from: run.local, len: run.len });
                remote.copy_pieces(local, pieces, stores)
            }
        };
        copied.map_err(|_| PathError::Refused(Status::OutOfRange))
    }
}

/// Copies one run; gives its bytes.
fn copy_run(op: Op, run: &Run, (local, remote): (&Memory, &Memory)) -> Result<u64, RangeError> {
    match op {
        Op::Read => local.copy_from(run.local, remote, run.remote, run.len),
        Op::Write => remote.copy_from(run.remote, local, run.local, run.len),
    }
    .map(|()| run.len)
}

/// The copy threads of an agent and their queue, which the agent's bound on transfers bounds.
pub(crate) struct Copiers {
    count: usize,
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    filled: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Mappings whose pages are still to be entered, each with the offset to go on from.
    unpopulated: VecDeque<(Weak<Memory>, u64)>,
    stopped: bool,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.work.is_empty() && self.unpopulated.is_empty() && !self.stopped
    }
}

/// What a copy thread does next.
enum Task {
    Copy(Work),
    /// Enter the next pages of a mapping.
    Populate(Arc<Memory>, u64),
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Slices first; pages of new mappings only when nothing else is to be done.
    fn next(&self, spin: &mut Spin) -> Option<Task> {
        spin.look(|| !self.lock().is_empty());
        let mut queue = self.lock();
        loop {
            if queue.stopped {
                return None;
            }
            if let Some(work) = queue.work.pop_front() {
                // Each thread wakes the next one: whoever posts several slices wakes one thread, and is not pushed aside by the others
                // before it has returned.
                if !queue.work.is_empty() {
                    self.filled.notify_one();
                }
                return Some(Task::Copy(work));
            }
            if let Some((memory, offset)) = queue.unpopulated.pop_front() {
                match memory.upgrade() {
                    Some(memory) => return Some(Task::Populate(memory, offset)),
                    None => continue, // the peer is gone
                }
            }
            let started = Instant::now();
            queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
            spin.handle_sleep(started.elapsed());
        }
    }
}

impl Shared {
    /// One step, and the rest behind whatever came meanwhile.
    fn populate(&self, memory: &Arc<Memory>, offset: u64) {
        let step = POPULATE_BYTES.min(memory.len() - offset);
        memory.populate(offset, step);
        if offset + step < memory.len() {
            self.lock().unpopulated.push_back((Arc::downgrade(memory), offset + step));
        }
    }
}

impl Copiers {
    /// None runs yet.
    pub(crate) fn new(count: usize) -> Self {
        Self { count: count.clamp(1, THREADS_MAX), shared: Arc::default(), threads: Mutex::default() }
    }

    /// Starts the threads.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn start(&self) -> io::Result<()> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for index in 0..self.count {
            let shared = Arc::clone(&self.shared);
            let named = std::thread::Builder::new().name(format!("towline-copy-{index}"));
            threads.push(named.spawn(move || {
                let mut spin = Spin::default();
                while let Some(task) = shared.next(&mut spin) {
                    match task {
                        Task::Copy(work) => work.run(),
                        Task::Populate(memory, offset) => shared.populate(&memory, offset),
                    }
                }
            })?);
        }
        Ok(())
    }

    /// Has the pages of a peer's mapping entered while there is nothing to copy: without it the first pull of each
    /// block takes a fault for every 64 KiB, which doubled the time of a 45 MiB pull.
    pub(super) fn populate(&self, memory: &Arc<Memory>) {
        self.shared.lock().unpopulated.push_back((Arc::downgrade(memory), 0));
        self.shared.filled.notify_one();
    }

    /// Queues a slice; after a stop it completes with an error at once.
    pub(super) fn submit(&self, work: Work) {
        let mut queue = self.shared.lock();
        if queue.stopped {
            drop(queue);
            return work.slice.complete(Err(PathError::Closed("the agent stopped".into())));
        }
        let is_first = queue.work.is_empty();
        queue.work.push_back(work);
        drop(queue);
        // Whoever takes the one before wakes another for this one.
        if is_first {
            self.shared.filled.notify_one();
        }
    }

    /// Ends the threads, after the slices they are at; what waits completes with an error.
    pub(crate) fn stop(&self) {
        let waiting = {
            let mut queue = self.shared.lock();
            queue.stopped = true;
            std::mem::take(&mut queue.work)
        };
        self.shared.filled.notify_all();
        for work in waiting {
            work.slice.complete(Err(PathError::Closed("the agent stopped".into())));
        }
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A copy thread that let go of the last handle cannot join itself; it ends right after.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
