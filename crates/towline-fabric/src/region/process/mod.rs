//! Memory of another process of this host, by address: the kernel copies between the two (cross-memory attach,
//! `process_vm_readv` and `process_vm_writev`).
//!
//! **Cost of N bytes.** One copy, by the kernel, with the string instructions it has: no non-temporal stores and nothing
//! asked for ahead. For each page of the owner its page table is walked and the page pinned (some 50 ns); for each call,
//! of up to 1,023 pieces, the right to do it is checked (1 µs). Expected: 0.6 to 0.8 of a mapping's rate in long pieces,
//! where two threads of one reader contend for the owner's lock on its mappings; about half in pages of 4 KiB. A slice of
//! 2 MiB in pages of 4 KiB is one call.
//!
//! **What shows that the right bytes came.** With the data, last in the same call, the nonce that the card promised is read
//! at the address that the owner told. The kernel takes the address space once a call: so the bytes come from the process
//! that has that nonce there, and as the owner wipes it before it lets go of the memory, from memory that was lent. The
//! process must also be alive after the copy, else its number may have been another's.
//!
//! **Writes** can't carry that proof along: the nonce is read right before and right after.

mod batch;
mod identity;

pub(crate) use identity::{Process, peer_pid};

use std::ffi::c_ulong;
use std::fs::read_to_string;
use std::io;
use std::sync::Arc;

use batch::Batch;
use rustix::io::Errno;
use thiserror::Error;

use super::{Memory, NONCE_BYTES, Nonce, Piece, Place, RangeError};

/// A range of another process's memory that its owner lent.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    pub(crate) process: Arc<Process>,
    pub(crate) place: Place,
    /// Bytes from the place's base on.
    pub(crate) len: u64,
    /// What must stand at the place's mark.
    pub(crate) nonce: Nonce,
}

/// Why another process's memory could not be reached. The words are for the reason that a path is kept with.
#[derive(Debug, Error)]
pub(crate) enum ReachError {
    #[error("the owner's process is in a pid namespace that is not seen from this one: share it, or use tcp")]
    Hidden,
    #[error("the owner's process has ended")]
    Ended,
    #[error("the owner's process could not be named: {step}: {error}")]
    Unnamed { step: &'static str, error: io::Error },
    /// Another process, or the memory is no longer lent.
    #[error(
        "the owner's process does not show the card's nonce where it said: the memory is not there any more"
    )]
    NotThePeers,
    #[error("{call} was refused (EPERM): {why}")]
    Denied { call: &'static str, why: String },
    #[error("{call} failed after {moved} bytes: {errno}{}", if *errno == Errno::FAULT {
        " (the pages are not there, or not of a kind that the kernel copies, such as a device's)"
    } else {
        ""
    })]
    Copy { call: &'static str, moved: u64, errno: Errno },
    #[error(transparent)]
    Range(#[from] RangeError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

impl ProcessMemory {
    /// Shows that the memory is the one that the nonce names and that its ends can be read: before anything is claimed.
    ///
    /// # Errors
    /// What stands in the way.
    pub(crate) fn probe(&self) -> Result<(), ReachError> {
        let mut ends = [0u8; 2];
        let mut batch = Batch::default();
        let [first, last] = &mut ends;
        batch.push(&raw mut *first, self.address(0, 1)?, 1);
        batch.push(&raw mut *last, self.address(self.len.saturating_sub(1), 1)?, 1);
        self.check_alive()?;
        self.exchange(Direction::Read, &mut batch)?;
        self.check_alive()
    }

    /// Copies `pieces` to `into`, in order. Returns the bytes copied.
    ///
    /// # Errors
    /// [`ReachError`]; `into` may then hold some of the bytes, or another's.
    pub(crate) fn read(&self, into: &Memory, pieces: impl Iterator<Item = Piece>) -> Result<u64, ReachError> {
        let check = |piece: &Piece| {
            let here = into.check_writable(piece.to, piece.len)?;
            Ok((into.base.as_ptr().wrapping_add(here), self.address(piece.from, piece.len)?))
        };
        self.check_alive()?;
        let moved = self.copy(Direction::Read, pieces, check)?;
        self.check_alive()?;
        Ok(moved)
    }

    /// Copies `pieces` of `from` there, in order. Returns the bytes copied.
    ///
    /// # Errors
    /// [`ReachError`]; some of the bytes may have been written.
    pub(crate) fn write(
        &self,
        from: &Memory,
        pieces: impl Iterator<Item = Piece>,
    ) -> Result<u64, ReachError> {
        let check = |piece: &Piece| {
            let here = from.check(piece.from, piece.len)?;
            Ok((from.base.as_ptr().wrapping_add(here), self.address(piece.to, piece.len)?))
        };
        self.check_alive()?;
        self.check_nonce()?;
        let moved = self.copy(Direction::Write, pieces, check)?;
        self.check_nonce()?;
        self.check_alive()?;
        Ok(moved)
    }

    fn copy(
        &self,
        direction: Direction,
        mut pieces: impl Iterator<Item = Piece>,
        check: impl Fn(&Piece) -> Result<(*mut u8, u64), RangeError>,
    ) -> Result<u64, ReachError> {
        let (mut moved, mut batch) = (0, Batch::default());
        loop {
            while !batch.is_full()
                && let Some(piece) = pieces.next()
            {
                let (here, there) = check(&piece)?;
                batch.push(here, there, usize::try_from(piece.len).unwrap_or(usize::MAX));
            }
            if batch.is_empty() {
                return Ok(moved);
            }
            moved += self.exchange(direction, &mut batch)?;
        }
    }

    /// Copies a batch, in as many calls as it takes, and empties it. A read has the nonce at its end.
    fn exchange(&self, direction: Direction, batch: &mut Batch) -> Result<u64, ReachError> {
        let (bytes, mut shown) = (batch.bytes, Nonce::default());
        if direction == Direction::Read {
            batch.push((&raw mut shown).cast(), self.place.mark, NONCE_BYTES);
        }
        let (mut moved, all) = (0, batch.bytes);
        while moved < all {
            let count = self.call(direction, batch, moved)?;
            batch.advance(count);
            moved += count as u64;
        }
        *batch = Batch::default();
        if direction == Direction::Read && shown != self.nonce {
            return Err(ReachError::NotThePeers);
        }
        Ok(bytes)
    }

    /// One system call: at least one byte, fewer than asked for when a page is missing on the way.
    fn call(&self, direction: Direction, batch: &Batch, moved: u64) -> Result<usize, ReachError> {
        let ((local, remote), pid) = (batch.lists(), self.process.pid());
        let (here, there) = (local.as_ptr(), remote.as_ptr());
        let counts = [local.len(), remote.len()].map(|len| len as c_ulong);
        let (name, count) = match direction {
            Direction::Read => {
                // SAFETY: the local ranges are this crate's to write (checked, and kept by their memory or frame); the
                // kernel checks the remote ones, and only reads there.
                let count = unsafe { libc::process_vm_readv(pid, here, counts[0], there, counts[1], 0) };
                ("process_vm_readv", count)
            }
            Direction::Write => {
                // SAFETY: the local ranges are only read; the remote ones lie inside what the owner, which has just shown
                // its nonce, lent to be written, by a constructor whose caller promised that. Should the process be this
                // one, the same promise holds.
                let count = unsafe { libc::process_vm_writev(pid, here, counts[0], there, counts[1], 0) };
                ("process_vm_writev", count)
            }
        };
        match usize::try_from(count) {
            Ok(0) => Err(ReachError::Copy { call: name, moved, errno: Errno::FAULT }),
            Ok(count) => Ok(count),
            Err(_) => Err(self.explain(name, moved, &io::Error::last_os_error())),
        }
    }

    fn explain(&self, call: &'static str, moved: u64, error: &io::Error) -> ReachError {
        match Errno::from_io_error(error).unwrap_or(Errno::IO) {
            Errno::SRCH => ReachError::Ended,
            _ if !self.process.is_alive() => ReachError::Ended,
            Errno::PERM => ReachError::Denied { call, why: why_denied() },
            errno => ReachError::Copy { call, moved, errno },
        }
    }

    /// Reads the nonce alone.
    fn check_nonce(&self) -> Result<(), ReachError> {
        self.exchange(Direction::Read, &mut Batch::default()).map(drop)
    }

    fn check_alive(&self) -> Result<(), ReachError> {
        if self.process.is_alive() { Ok(()) } else { Err(ReachError::Ended) }
    }

    /// Where a range lies in the owner's process.
    fn address(&self, offset: u64, len: u64) -> Result<u64, RangeError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        let address =
            self.place.base.checked_add(offset).filter(|at| inside && at.checked_add(len).is_some());
        address.ok_or(RangeError { offset, len, memory_len: self.len, writable: true })
    }
}

/// What a person can do about it.
fn why_denied() -> String {
    let scope = read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "1" => "kernel.yama.ptrace_scope is 1 and the owner did not or could not name this process (PR_SET_PTRACER)".into(),
        "2" => "kernel.yama.ptrace_scope is 2: CAP_SYS_PTRACE is needed".into(),
        "3" => "kernel.yama.ptrace_scope is 3: nobody may".into(),
        _ => "the owner is of another user or has capabilities that this process lacks, or a seccomp filter forbids it".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::ptr::NonNull;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU8;

    use proptest::prelude::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

    use super::super::Access;
    use super::*;

    const LEN: u64 = 64 << 10;

    /// This process, as a socket tells it.
    fn this() -> Arc<Process> {
        let (near, _far) = UnixStream::pair().unwrap();
        Arc::new(Process::behind(near.as_fd()).unwrap())
    }

    /// Foreign memory and, by address, the same.
    fn both(fill: impl Fn(u64) -> u8) -> (Memory, ProcessMemory) {
        let memory = Memory::foreign_sample(LEN, Access::PeersWrite);
        memory.write_from(0, &(0..LEN).map(fill).collect::<Vec<_>>()).unwrap();
        let reach = reach(&memory);
        (memory, reach)
    }

    fn reach(memory: &Memory) -> ProcessMemory {
        let (place, len) = (memory.place().unwrap(), memory.len());
        ProcessMemory { process: this(), place, len, nonce: *memory.nonce() }
    }

    fn whole() -> [Piece; 1] {
        [Piece { to: 0, from: 0, len: LEN }]
    }

    fn bytes(memory: &Memory) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(memory.len()).unwrap()];
        memory.read_into(0, &mut bytes).unwrap();
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn pieces_arrive_whole_and_nothing_else_changes(
            write in any::<bool>(),
            pieces in prop::collection::vec((0..LEN, 0..LEN, prop_oneof![0..70u64, 0..5000u64]), 0..2500)
        ) {
            let (memory, there) = both(|at| (at * 7 % 251) as u8);
            let here = Memory::allocate("here", LEN).unwrap();
            here.write_from(0, &vec![0xaa; usize::try_from(LEN).unwrap()]).unwrap();
            let pieces: Vec<Piece> = pieces
                .into_iter()
                .map(|(to, from, len)| Piece { to, from, len: len.min(LEN - to).min(LEN - from) })
                .collect();
            let (source, target) = if write { (&here, &memory) } else { (&memory, &here) };
            let (source_bytes, mut expected) = (bytes(source), bytes(target));
            for Piece { to, from, len } in &pieces {
                let [to, from, len] = [to, from, len].map(|at| usize::try_from(*at).unwrap());
                expected[to..to + len].copy_from_slice(&source_bytes[from..from + len]);
            }
            let list = pieces.iter().copied();
            let copied = if write { there.write(&here, list) } else { there.read(&here, list) };
            prop_assert_eq!(copied.unwrap(), pieces.iter().map(|piece| piece.len).sum::<u64>());
            prop_assert!(bytes(target) == expected);
            prop_assert!(bytes(source) == source_bytes);
        }
    }

    #[test]
    fn a_probe_wants_the_cards_nonce() {
        let (memory, mut reach) = both(|_| 0);
        reach.probe().unwrap();
        reach.nonce[3] ^= 1;
        assert!(matches!(reach.probe(), Err(ReachError::NotThePeers)));
        let here = Memory::allocate("here", LEN).unwrap();
        assert!(matches!(reach.read(&here, whole().into_iter()), Err(ReachError::NotThePeers)));
        here.write_from(0, &[9]).unwrap();
        assert!(matches!(reach.write(&here, whole().into_iter()), Err(ReachError::NotThePeers)));
        assert!(bytes(&memory).iter().all(|byte| *byte == 0), "nothing is written before it is known where");
        reach.nonce = *memory.nonce();
        reach.place.mark = reach.place.base;
        assert!(matches!(reach.probe(), Err(ReachError::NotThePeers)));
        reach.place.mark = 16;
        let error = reach.probe().unwrap_err();
        assert!(matches!(error, ReachError::Copy { errno: Errno::FAULT, .. }), "{error}");
    }

    #[test]
    fn ranges_outside_are_refused_before_anything_moves() {
        let (memory, reach) = both(|_| 7);
        let here = Memory::allocate("here", LEN).unwrap();
        for piece in [
            Piece { to: 0, from: LEN - 1, len: 2 },
            Piece { to: LEN - 1, from: 0, len: 2 },
            Piece { to: 0, from: u64::MAX, len: 2 },
        ] {
            assert!(matches!(reach.read(&here, [piece].into_iter()), Err(ReachError::Range(_))));
            assert!(matches!(reach.write(&here, [piece].into_iter()), Err(ReachError::Range(_))));
        }
        assert!(bytes(&here).iter().all(|byte| *byte == 0) && bytes(&memory).iter().all(|byte| *byte == 7));
    }

    #[test]
    fn bytes_of_a_process_that_has_ended_do_not_count() {
        let (memory, reach) = both(|_| 7);
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let other = rustix::process::Pid::from_child(&child);
        let named = Process::numbered(other).unwrap();
        // As if the number had been given to this process, which has the nonce in the same place as after a fork.
        let process = Arc::new(named.with_number_of(rustix::process::getpid()));
        let stale = ProcessMemory { process: Arc::clone(&process), ..reach };
        let here = Memory::allocate("here", LEN).unwrap();
        stale.read(&here, whole().into_iter()).unwrap();
        // It ends while the pieces are being copied: every byte comes, and none counts.
        let during = whole().into_iter().inspect(|_| {
            child.kill().unwrap();
            child.wait().unwrap();
        });
        assert!(matches!(stale.read(&here, during), Err(ReachError::Ended)));
        assert!(matches!(stale.probe(), Err(ReachError::Ended)));
        assert!(matches!(stale.read(&here, whole().into_iter()), Err(ReachError::Ended)));
        assert!(matches!(stale.write(&here, whole().into_iter()), Err(ReachError::Ended)));
        assert!(bytes(&memory).iter().all(|byte| *byte == 7), "nothing is written into a stranger");
    }

    #[test]
    fn memory_that_was_let_go_of_shows_no_nonce_when_its_guard_goes() {
        /// Looks at the memory when it is dropped.
        struct Guard {
            _bytes: Vec<AtomicU8>,
            reach: Arc<Mutex<Option<ProcessMemory>>>,
            seen: Arc<Mutex<Option<Result<(), ReachError>>>>,
        }
        impl Drop for Guard {
            fn drop(&mut self) {
                *self.seen.lock().unwrap() = self.reach.lock().unwrap().as_ref().map(ProcessMemory::probe);
            }
        }
        let room: Vec<AtomicU8> = (0..LEN).map(|_| AtomicU8::new(0)).collect();
        let base = NonNull::new(room.as_ptr().cast_mut().cast()).unwrap();
        let (slot, seen) = (Arc::default(), Arc::default());
        let guard: Arc<dyn Any + Send + Sync> =
            Arc::new(Guard { _bytes: room, reach: Arc::clone(&slot), seen: Arc::clone(&seen) });
        // SAFETY: atomics, kept by the guard.
        let memory = unsafe { Memory::foreign(base, LEN, Access::PeersRead, guard) }.unwrap();
        let reach = reach(&memory);
        reach.probe().unwrap();
        *slot.lock().unwrap() = Some(reach);
        drop(memory);
        let seen = seen.lock().unwrap().take().unwrap();
        assert!(matches!(seen, Err(ReachError::NotThePeers)), "{seen:?}");
    }

    #[test]
    fn a_copy_that_meets_a_missing_page_fails_after_what_was_there() {
        let page = rustix::param::page_size();
        let len = 8 * page;
        let both_ways = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: fresh memory at an address of the kernel's choice.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, both_ways, MapFlags::PRIVATE) };
        let base = NonNull::new(base.unwrap().cast::<u8>()).unwrap();
        // SAFETY: readable and writable, until the test takes a page away; what is read then is not read from here.
        let memory = unsafe { Memory::foreign(base, len as u64, Access::PeersRead, Arc::new(())) }.unwrap();
        memory.write_from(0, &vec![5; len]).unwrap();
        let reach = reach(&memory);
        let here = Memory::allocate("here", len as u64).unwrap();
        let all = |len: usize| [Piece { to: 0, from: 0, len: len as u64 }].into_iter();
        assert_eq!(reach.read(&here, all(len)).unwrap(), len as u64);
        // SAFETY: 5 of 8 pages in.
        let hole = unsafe { base.add(5 * page) };
        // SAFETY: one page of this test's own mapping.
        unsafe { rustix::mm::mprotect(hole.as_ptr().cast(), page, MprotectFlags::empty()) }.unwrap();
        let error = reach.read(&here, all(len)).unwrap_err();
        let expected = 5 * page as u64;
        assert!(
            matches!(error, ReachError::Copy { errno: Errno::FAULT, moved, .. } if moved <= expected),
            "{error}"
        );
        assert_eq!(reach.read(&here, all(5 * page)).unwrap(), expected, "the rest is still there");
        // SAFETY: the whole of this test's own mapping, to which nothing refers any more.
        unsafe { rustix::mm::munmap(base.as_ptr().cast(), len) }.unwrap();
        assert!(matches!(reach.probe(), Err(ReachError::Copy { .. })));
        drop(memory);
    }
}
