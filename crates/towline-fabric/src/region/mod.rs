//! Memory that peers may address.
//!
//! [`Memory`] is the bytes. Registering it with an agent makes it a region. It is of one of these kinds:
//! - *own*: an anonymous file (`memfd`) that is allocated, sealed against resizing and mapped, so that a peer on the same
//!   host can map it too and trust its size (`mapping.rs`; `pages.rs` says with which pages);
//! - *foreign*: a pointer and a length into memory that somebody else made, an engine's own buffer (`foreign.rs`). It has
//!   no file; peers of the same host have the kernel copy it between the two processes (`process/`);
//! - a *file's*: a part of a file, mapped; to peers it is foreign (`file.rs`).
//!
//! **Concurrency.** A transfer may write a range while the owner reads another, and a peer process may write into a
//! region made for it. No safe slice of the memory is therefore ever handed out: safe access copies, through
//! [`Memory::read_into`] and [`Memory::write_from`]; an engine that keeps blocks apart by its own bookkeeping uses the
//! unsafe [`Memory::bytes`] and argues why.
//!
//! **Proof.** Each memory has a random nonce: own memory in one more page behind its bytes, foreign memory beside itself.
//! The nonce travels in the card, over the authenticated control session; the file, or the address, travels over a Unix
//! socket. A peer that reads the card's nonce through its mapping, or out of the process at that address, has shown that
//! what it reached is the memory the card speaks of, whatever sockets and namespaces lay between.
//!
//! Memory of a device will be a further kind; transports see only what [`Memory`] offers them.
#![expect(unsafe_code, reason = "maps memory, and copies it by address here and in other processes")]

mod attached;
mod copy;
mod error;
mod file;
mod foreign;
mod io;
mod mapping;
mod pages;
mod process;
mod zerocopy;

pub(crate) use attached::Attacher;
pub(crate) use copy::{Piece, Stores};
pub use error::{RangeError, RegisterError};
pub(crate) use foreign::Place;
pub(crate) use io::Payload;
pub use pages::Pages;
pub(crate) use process::{Process, ProcessMemory, ReachError, peer_pid};
pub(crate) use zerocopy::ZeroCopy;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use attached::Attached;
use file::MappedFile;
use foreign::Foreign;
use mapping::Mapping;

/// Largest single region: 1 TiB, more than a host's memory here, so that offsets never overflow.
pub const REGION_BYTES_MAX: u64 = 1 << 40;

/// Bytes that peers may address; the agent keeps it alive while a transfer uses it.
#[derive(Debug)]
pub struct Memory {
    // Before the backing: fields are dropped in this order.
    attached: Attached,
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    access: Access,
    nonce: Nonce,
    backing: Arc<Backing>,
}

/// What keeps the bytes in their place, and is let go of when the memory is dropped.
#[derive(Debug)]
enum Backing {
    /// A file made here.
    Own(Mapping),
    /// A peer's file.
    Peer(Mapping),
    /// Somebody else's, in this process.
    Foreign(Foreign),
}

// SAFETY: it only keeps the bytes: what it knows of them is used to unmap, by its last holder, and to read a nonce atomically.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

/// What proves that a mapping, or an address, is the memory a card speaks of.
pub type Nonce = [u8; NONCE_BYTES];

/// Bytes of a [`Nonce`]: random, so never equal by chance.
pub const NONCE_BYTES: usize = 16;

/// What peers of this host may do with the memory. Of own memory fixed by the kernel's seals when it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Read it: through a mapping nobody but this process can ever write.
    #[default]
    PeersRead,
    /// Read and write it: for regions made to receive.
    PeersWrite,
}

/// How own memory is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryOptions {
    /// What peers may do.
    pub access: Access,
    /// Which pages it is to have.
    pub pages: Pages,
}

// SAFETY: the bytes stay where they are until drop (own: this value's mapping; foreign: the constructor's contract), and
// every access through `&self` is either a raw copy or unsafe with its caller's argument for exclusion.
unsafe impl Send for Memory {}
// SAFETY: as above; no method hands out a reference to the bytes without the caller's argument.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(
        (base, len): (NonNull<u8>, usize),
        (writable, access): (bool, Access),
        nonce: Nonce,
        backing: Backing,
    ) -> Self {
        let (attached, backing) = (Attached::default(), Arc::new(backing));
        Self { attached, base, len, writable, access, nonce, backing }
    }

    /// What was drawn when the memory was made; a card's key for transports that map.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }

    /// The nonce as it stands beside the bytes now.
    pub fn mapped_nonce(&self) -> Nonce {
        match &*self.backing {
            Backing::Own(mapping) | Backing::Peer(mapping) => mapping.nonce(),
            Backing::Foreign(foreign) => foreign.nonce(),
        }
    }

    /// What peers may do.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether it takes writes from here: always but for a peer's that was not made for them, and a file opened for reading.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether it is a peer's, mapped here.
    pub fn is_peers(&self) -> bool {
        matches!(*self.backing, Backing::Peer(_))
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Never true: a memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the pages behind it: 2 MiB where the host granted huge ones. Of foreign memory, which this can't know,
    /// the system's.
    pub fn page_bytes(&self) -> u64 {
        self.mapping().map_or_else(pages::system_bytes, Mapping::page_bytes)
    }

    /// Why memory that should have huge pages if they are granted has normal ones, in words for a log.
    pub fn why_normal_pages(&self) -> Option<&str> {
        self.mapping().and_then(Mapping::why_normal)
    }

    /// The file, to be passed to a peer on the same host; foreign memory has none.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.mapping().map(Mapping::fd)
    }

    /// Where foreign memory lies, for peers on the same host.
    pub(crate) fn place(&self) -> Option<Place> {
        match &*self.backing {
            Backing::Foreign(foreign) => Some(foreign.place(self.base)),
            Backing::Own(_) | Backing::Peer(_) => None,
        }
    }

    /// Whether it is a part of a file: its pages may go at any time, and only the kernel may touch them.
    pub(crate) fn is_file(&self) -> bool {
        self.file().is_some()
    }

    /// Bytes that are there now: all, but for a file that was cut short.
    pub(crate) fn present(&self) -> u64 {
        self.file().map_or(self.len(), |file| file.present())
    }

    fn file(&self) -> Option<&MappedFile> {
        match &*self.backing {
            Backing::Foreign(foreign) => foreign.file.as_deref(),
            Backing::Own(_) | Backing::Peer(_) => None,
        }
    }

    fn mapping(&self) -> Option<&Mapping> {
        match &*self.backing {
            Backing::Own(mapping) | Backing::Peer(mapping) => Some(mapping),
            Backing::Foreign(_) => None,
        }
    }

    /// Enters the pages of `len` bytes from `offset`, a multiple of the page size, into this process's page table, so
    /// that copying them later takes no faults. Only a hint: what can't be done now happens at first touch, and foreign
    /// memory is left as it is.
    pub fn populate(&self, offset: u64, len: u64) {
        let (Ok(start), Some(_)) = (self.check(offset, len), self.mapping()) else { return };
        let size = usize::try_from(len).unwrap_or(0);
        // SAFETY: `check` keeps the range inside the memory.
        let at = unsafe { self.base.add(start) };
        let advice = rustix::mm::Advice::LinuxPopulateRead;
        // SAFETY: this value's own mapping; the advice reads pages and changes none. Kernels before 5.14 refuse it.
        _ = unsafe { rustix::mm::madvise(at.as_ptr().cast(), size, advice) };
    }

    /// Copies `into.len()` bytes from `offset`. What another thread or process writes at the same time may arrive
    /// torn: fences and digests tell.
    ///
    /// # Errors
    /// [`RangeError`] when the range leaves the memory.
    pub fn read_into(&self, offset: u64, into: &mut [u8]) -> Result<(), RangeError> {
        let start = self.check(offset, into.len() as u64)?;
        if let Some(file) = self.file() {
            // SAFETY: `into` is exclusive.
            let read = unsafe { file.read(offset, into.as_mut_ptr(), into.len()) };
            return read.map_err(|_| self.outside(offset, into.len() as u64));
        }
        // SAFETY: `check` keeps the range inside the memory.
        let source = unsafe { self.base.add(start) };
        // SAFETY: source is valid for the length (above), `into` is exclusive and does not overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// [`RangeError`] when the range leaves the memory or the memory is a peer's, mapped for reading.
    pub fn write_from(&self, offset: u64, from: &[u8]) -> Result<(), RangeError> {
        let start = self.check_writable(offset, from.len() as u64)?;
        if let Some(file) = self.file() {
            // SAFETY: `from` is a slice.
            let written = unsafe { file.write(offset, from.as_ptr(), from.len()) };
            return written.map_err(|_| self.outside(offset, from.len() as u64));
        }
        // SAFETY: `check_writable` keeps the range inside the memory.
        let target = unsafe { self.base.add(start) };
        // SAFETY: target is valid for writes of the length (above); `from` is a slice elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), target.as_ptr(), from.len()) };
        Ok(())
    }

    /// Copies `len` bytes from `source` at `source_offset` to `offset` here, memory to memory.
    ///
    /// # Errors
    /// [`RangeError`] when either range leaves its memory or this one is mapped for reading.
    pub fn copy_from(
        &self,
        offset: u64,
        source: &Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), RangeError> {
        let target = self.check_writable(offset, len)?;
        let start = source.check(source_offset, len)?;
        // SAFETY: checked above.
        let target = unsafe { self.base.add(target) };
        // SAFETY: checked above.
        let start = unsafe { source.base.add(start) };
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        if let Some(file) = self.file() {
            // SAFETY: checked above.
            let written = unsafe { file.write(offset, start.as_ptr(), size) };
            return written.map_err(|_| self.outside(offset, len));
        }
        if let Some(file) = source.file() {
            // SAFETY: checked above.
            let read = unsafe { file.read(source_offset, target.as_ptr(), size) };
            return read.map_err(|_| source.outside(source_offset, len));
        }
        // SAFETY: both ranges are inside their mappings; `copy` allows overlap, should both be the same memory.
        unsafe { std::ptr::copy(start.as_ptr(), target.as_ptr(), size) };
        Ok(())
    }

    /// An aligned u64, read at once and before everything after it.
    ///
    /// # Errors
    /// [`RangeError`] when the range leaves the memory or starts at no multiple of 8 (of `offset`, where the memory is own),
    /// and of a file's always.
    pub fn load_u64(&self, offset: u64) -> Result<u64, RangeError> {
        Ok(self.atomic(offset)?.load(Ordering::Acquire))
    }

    /// Stores an aligned u64 at once and after everything before it.
    ///
    /// # Errors
    /// [`RangeError`] as [`Memory::load_u64`], or when the memory is a peer's.
    pub fn store_u64(&self, offset: u64, value: u64) -> Result<(), RangeError> {
        self.check_writable(offset, 8)?;
        self.atomic(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// The bytes of `range` as a slice, for an engine's kernels.
    ///
    /// # Errors
    /// [`RangeError`] when the range leaves the memory.
    ///
    /// # Safety
    /// While the slice lives nothing may write the range: no transfer, no peer, no other thread; and a file's may not be
    /// cut short. An engine gets this from its block table: a block is written by its sequence alone until it is full, and
    /// never after.
    pub unsafe fn bytes(&self, range: Range<u64>) -> Result<&[u8], RangeError> {
        let len = range.end.saturating_sub(range.start);
        let start = self.check(range.start, len)?;
        // SAFETY: checked above.
        let start = unsafe { self.base.add(start) };
        // SAFETY: inside the mapping, which lives as long as `self`; the caller argues that nothing writes.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), usize::try_from(len).unwrap_or(0)) })
    }

    fn atomic(&self, offset: u64) -> Result<&AtomicU64, RangeError> {
        let start = self.check(offset, 8)?;
        // SAFETY: checked above.
        let at = unsafe { self.base.add(start) };
        if !at.cast::<AtomicU64>().is_aligned() || self.is_file() {
            return Err(self.outside(offset, 8));
        }
        // SAFETY: inside the memory and aligned; every access to fence slots is atomic.
        Ok(unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) })
    }

    fn check_writable(&self, offset: u64, len: u64) -> Result<usize, RangeError> {
        let start = self.check(offset, len)?;
        if self.writable { Ok(start) } else { Err(self.outside(offset, len)) }
    }

    fn check(&self, offset: u64, len: u64) -> Result<usize, RangeError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.present());
        if inside {
            usize::try_from(offset).map_err(|_| self.outside(offset, len))
        } else {
            Err(self.outside(offset, len))
        }
    }

    fn outside(&self, offset: u64, len: u64) -> RangeError {
        RangeError { offset, len, memory_len: self.present(), writable: self.writable }
    }
}

fn size_of(len: u64) -> Result<usize, RegisterError> {
    let size = usize::try_from(len).ok().filter(|_| (1..=REGION_BYTES_MAX).contains(&len));
    size.ok_or(RegisterError::Size { len })
}

fn fresh_nonce() -> rustix::io::Result<Nonce> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|_| rustix::io::Errno::IO)?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_are_refused_without_overflow() {
        let memory = Memory::allocate("test", 4096).unwrap();
        for (offset, len) in [(4096, 1), (u64::MAX, 2), (1, 4096)] {
            let mut into = vec![0; usize::try_from(len).unwrap()];
            assert!(memory.read_into(offset, &mut into).is_err(), "{offset}+{len}");
        }
        assert!(memory.load_u64(4).is_err(), "unaligned");
    }
}
