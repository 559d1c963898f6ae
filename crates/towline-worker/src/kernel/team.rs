//! Threads that run a loop together: fork, join, and nothing in between.
//!
//! **Why not a task pool.** A decode step is some 150 parallel regions of tens of microseconds. Stealing queues cost
//! as much as the work; here a region starts with one store and ends with one counter. Members spin for a moment
//! after a region, since the next is near, then park: an idle engine uses no processor time.
//!
//! **Bounds.** 1 to [`MEMBERS_MAX`] members, named `towline-team-N`; the caller is member 0.
//!
//! **Cost.** Start and join while spinning: about 1 µs for two members (2-core VM). A wake-up from the park: 20–50
//! µs, once a step.
#![expect(
    unsafe_code,
    reason = "lends a closure on the caller's stack to threads that finish before it is gone"
)]

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

use super::shared::{Pieces, share};

/// Most members: beyond it memory bandwidth is long spent on any one host.
pub const MEMBERS_MAX: usize = 256;
/// Spins before parking: about 100 µs of `pause`, the gap between two decode steps.
const SPINS: u32 = 2_000;

type Job<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A fork-join team.
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    members: usize,
    /// Counts regions; a change is the signal to start.
    region: AtomicUsize,
    /// Members other than the caller that haven't finished the region.
    running: AtomicUsize,
    /// What to run. Written by the caller while `running` is 0, read by members between the signal and their finish.
    job: UnsafeCell<Option<*const Job<'static>>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    parked: Vec<AtomicBool>,
}

// SAFETY: `job` is written only while no member runs (`running` is 0, acquired) and read only after the release store
// of `region`; the pointer it holds is to a `Sync` closure. Everything else is atomic.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("members", &self.members).finish_non_exhaustive()
    }
}

impl Team {
    /// A team of `members` (1 to [`MEMBERS_MAX`], clamped), the caller included.
    ///
    /// # Errors
    /// The system's, when a thread cannot be started.
    pub fn new(members: usize) -> std::io::Result<Self> {
        let members = members.clamp(1, MEMBERS_MAX);
        let shared = Arc::new(Shared {
            members,
            region: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            parked: (0..members).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut team = Self { shared, workers: Vec::with_capacity(members - 1) };
        for member in 1..members {
            let shared = Arc::clone(&team.shared);
            let builder = std::thread::Builder::new().name(format!("towline-team-{member}"));
            team.workers.push(builder.spawn(move || work(&shared, member))?);
        }
        Ok(team)
    }

    /// Members, the caller included.
    pub fn members(&self) -> usize {
        self.shared.members
    }

    /// Runs `job(member, members)` once on every member and waits for all.
    ///
    /// # Panics
    /// With the caller's own panic, or with a message if another member panicked; never before all have finished.
    pub fn run<F: Fn(usize, usize) + Sync>(&mut self, job: F) {
        if self.workers.is_empty() {
            return job(0, 1);
        }
        let borrowed: *const Job<'_> = &raw const job;
        // SAFETY: only the lifetime changes. The pointer is used by members before they decrement `running`, and this
        // function doesn't return, by panic either, before `running` is 0 (`join` below).
        let lent: *const Job<'static> = unsafe { std::mem::transmute(borrowed) };
        self.start(lent);
        let mine = catch_unwind(AssertUnwindSafe(|| job(0, self.shared.members)));
        self.join();
        match mine {
            Err(panic) => resume_unwind(panic),
            Ok(()) => {
                assert!(!self.shared.panicked.swap(false, Ordering::AcqRel), "a member of the team panicked")
            }
        }
    }

    /// Runs `each(index, chunk)` for every `width` elements of `whole` (the last chunk may be shorter), chunks spread
    /// over the members; on the caller alone when there are too few to be worth a region.
    pub fn chunks<T: Send, F: Fn(usize, &mut [T]) + Sync>(&mut self, whole: &mut [T], width: usize, each: F) {
        let (len, width) = (whole.len(), width.max(1));
        let count = len.div_ceil(width);
        if count < 2 * self.members() {
            return whole.chunks_mut(width).enumerate().for_each(|(index, chunk)| each(index, chunk));
        }
        let pieces = Pieces::new(whole);
        self.run(|member, members| {
            for index in share(count, member, members) {
                // SAFETY: shares of the members are disjoint, and so are the chunks within.
                each(index, unsafe { pieces.piece(index * width..((index + 1) * width).min(len)) });
            }
        });
    }

    fn start(&mut self, job: *const Job<'static>) {
        // SAFETY: `running` is 0: no member reads the cell.
        let cell = unsafe { &mut *self.shared.job.get() };
        *cell = Some(job);
        self.shared.running.store(self.workers.len(), Ordering::Relaxed);
        // SeqCst pairs with the worker's store of `parked` and load of `region`: one of the two sees the other.
        self.shared.region.fetch_add(1, Ordering::SeqCst);
        for (worker, parked) in self.workers.iter().zip(self.shared.parked.iter().skip(1)) {
            if parked.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }

    fn join(&self) {
        let mut spins = 0;
        while self.shared.running.load(Ordering::Acquire) != 0 {
            spins += 1;
            // A member that lost its processor needs ours.
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.region.fetch_add(1, Ordering::SeqCst);
        self.workers.iter().map(JoinHandle::thread).for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            // A member catches the panics of its jobs, so there is no other end than a clean one.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, member: usize) {
    let mut seen = 0;
    loop {
        seen = wait(shared, member, seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the caller wrote the cell before the signal just seen and writes it again only after `running` is 0.
        let job = unsafe { *shared.job.get() };
        let ran = catch_unwind(AssertUnwindSafe(|| {
            if let Some(job) = job {
                // SAFETY: the caller keeps the closure alive until `running` is 0, which waits for us.
                let job = unsafe { &*job };
                job(member, shared.members);
            }
        }));
        if ran.is_err() {
            shared.panicked.store(true, Ordering::Release);
        }
        shared.running.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits for a region after `seen`: spins, then parks. Returns its number.
fn wait(shared: &Shared, member: usize, seen: usize) -> usize {
    for _ in 0..SPINS {
        let region = shared.region.load(Ordering::Acquire);
        if region != seen {
            return region;
        }
        std::hint::spin_loop();
    }
    let parked = &shared.parked[member];
    parked.store(true, Ordering::SeqCst);
    loop {
        let region = shared.region.load(Ordering::SeqCst);
        if region != seen {
            parked.store(false, Ordering::SeqCst);
            return region;
        }
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_runs_every_region_once() {
        for members in 1..5 {
            let mut team = Team::new(members).unwrap();
            for region in 0..200 {
                let ran: Vec<AtomicUsize> = (0..members).map(|_| AtomicUsize::new(0)).collect();
                team.run(|member, count| {
                    assert_eq!(count, members);
                    ran[member].fetch_add(1, Ordering::Relaxed);
                });
                assert!(ran.iter().all(|ran| ran.load(Ordering::Relaxed) == 1), "region {region}");
            }
        }
    }

    #[test]
    fn a_panic_on_any_member_reaches_the_caller_and_the_team_lives_on() {
        let mut team = Team::new(3).unwrap();
        for culprit in 0..3 {
            let outcome =
                catch_unwind(AssertUnwindSafe(|| team.run(|member, _| assert_ne!(member, culprit))));
            assert!(outcome.is_err());
            team.run(|_, _| ());
        }
    }

    #[test]
    fn chunks_are_each_visited_once_with_their_index() {
        for count in [0, 1, 5, 64] {
            let mut whole = vec![0; count * 3];
            Team::new(3).unwrap().chunks(&mut whole, 3, |index, row| row.fill(index + 1));
            let expected: Vec<usize> = (0..count * 3).map(|i| i / 3 + 1).collect();
            assert_eq!(whole, expected);
        }
    }
}
