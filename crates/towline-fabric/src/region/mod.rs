//! Memory that peers may address.
//!
//! [`Memory`] is the bytes: an anonymous file (`memfd`) that is allocated, sealed against resizing and mapped, so that
//! a peer on the same host can map it too and trust its size. Registering it with an agent makes it a region.
//!
//! **Concurrency.** A transfer may write a range while the owner reads another, and a peer process may write into a
//! region made for it. No safe slice of the memory is therefore ever handed out: safe access copies, through
//! [`Memory::read_into`] and [`Memory::write_from`]; an engine that keeps blocks apart by its own bookkeeping uses the
//! unsafe [`Memory::bytes`] and argues why.
//!
//! **Proof.** Behind its bytes each memory has one more page, with a random nonce. The nonce travels in the card, over
//! the authenticated control session; the file travels over a Unix socket. A peer that reads the card's nonce through
//! its mapping has shown that the mapping is the memory the card speaks of, whatever sockets and namespaces lay between.
//!
//! **Foreign memory** (an engine's own buffer, device memory) will be further constructors here; transports see only
//! what [`Memory`] offers them.
#![expect(unsafe_code, reason = "maps memory and copies it by address")]

mod copy;
mod error;
mod io;
mod loan;

pub(crate) use copy::{Piece, Stores};
pub use error::{RangeError, RegisterError};
pub(crate) use io::Payload;
pub(crate) use loan::Loans;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
/// Largest single region: 1 TiB, more than a host's memory here, so that offsets never overflow.
pub const REGION_BYTES_MAX: u64 = 1 << 40;

/// A mapped, sealed memfd. Unmapped when dropped; the agent keeps it alive while a transfer uses it.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
    writable: bool,
    access: Access,
    nonce: Nonce,
}

/// What proves that a mapping is the memory a card speaks of.
pub type Nonce = [u8; NONCE_BYTES];

/// Bytes of a [`Nonce`]: random, so never equal by chance.
pub const NONCE_BYTES: usize = 16;

/// Size of the page behind the bytes that carries the nonce, and the unit to which the bytes before it are rounded.
const PAGE: u64 = 4096;

/// What peers that map the memory may do. Fixed by the kernel's seals when the memory is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Read it: nobody but this process's own mapping can ever write.
    #[default]
    PeersRead,
    /// Read and write it: for regions made to receive.
    PeersWrite,
}

// SAFETY: the mapping belongs to this value alone, stays where it is until drop, and every access through `&self`
// is either a raw copy or unsafe with its caller's argument for exclusion.
unsafe impl Send for Memory {}
// SAFETY: as above; no method hands out a reference to the bytes without the caller's argument.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates `len` zeroed bytes that peers may read, and seals their size. `name` shows in `/proc/PID/maps`.
    ///
    /// # Errors
    /// As [`Memory::allocate_for`].
    pub fn allocate(name: &str, len: u64) -> Result<Self, RegisterError> {
        Self::allocate_for(name, len, Access::PeersRead)
    }

    /// Allocates `len` zeroed bytes for what `access` says, and seals their size.
    ///
    /// # Errors
    /// [`RegisterError::Size`] for zero or more than [`REGION_BYTES_MAX`]; [`RegisterError::Allocate`] with the
    /// kernel's reason, `ENOMEM` and `ENOSPC` included: the pages are reserved here, not at first touch.
    pub fn allocate_for(name: &str, len: u64, access: Access) -> Result<Self, RegisterError> {
        let size = size_of(len)?;
        let failed = |step| move |errno| RegisterError::Allocate { len, step, errno };
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&fd, file_bytes(len)).map_err(failed("ftruncate"))?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, file_bytes(len))
            .map_err(failed("fallocate"))?;
        let nonce = fresh_nonce().map_err(failed("getrandom"))?;
        rustix::io::pwrite(&fd, &nonce, file_bytes(len) - PAGE).map_err(failed("pwrite"))?;
        // Populated: the pages exist already, and a transfer into them then takes no faults.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let base = map(&fd, len, ProtFlags::READ | ProtFlags::WRITE, flags).map_err(failed("mmap"))?;
        let mut seals = SealFlags::SHRINK | SealFlags::GROW;
        if access == Access::PeersRead {
            // After our own writable mapping exists: peers can then map for reading only.
            seals |= SealFlags::FUTURE_WRITE;
        }
        let memory = Self { base, len: size, fd, writable: true, access, nonce };
        rustix::fs::fcntl_add_seals(&memory.fd, seals).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Ok(memory)
    }

    /// Maps a peer's memfd, after checking what makes that safe: it is sealed against shrinking (else a read could
    /// die of `SIGBUS`) and has the promised size. Compare [`Memory::mapped_nonce`] with the card's before use.
    ///
    /// # Errors
    /// [`RegisterError::Unsealed`] or [`RegisterError::Length`] when the peer's file is not what it must be;
    /// [`RegisterError::Allocate`] when mapping fails.
    pub fn map_peer(fd: OwnedFd, len: u64, access: Access) -> Result<Self, RegisterError> {
        let size = size_of(len)?;
        let failed = |step| move |errno| RegisterError::Allocate { len, step, errno };
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(failed("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(RegisterError::Unsealed);
        }
        let stat = rustix::fs::fstat(&fd).map_err(failed("fstat"))?;
        if u64::try_from(stat.st_size) != Ok(file_bytes(len)) {
            return Err(RegisterError::Length { promised: file_bytes(len), found: stat.st_size });
        }
        let writable = access == Access::PeersWrite;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let base = map(&fd, len, protection, MapFlags::SHARED).map_err(failed("mmap"))?;
        let mut memory = Self { base, len: size, fd, writable, access, nonce: [0; NONCE_BYTES] };
        memory.nonce = memory.mapped_nonce();
        Ok(memory)
    }

    /// What was drawn when the memory was made; a card's key for transports that map.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }

    /// The nonce as the mapping shows it now.
    pub fn mapped_nonce(&self) -> Nonce {
        let at = usize::try_from(file_bytes(self.len()) - PAGE).unwrap_or(self.len);
        // SAFETY: the mapping has `file_bytes` bytes; the nonce's page is its last.
        let source = unsafe { self.base.add(at) };
        let mut nonce = [0; NONCE_BYTES];
        // SAFETY: the page has 4096 bytes, `nonce` is exclusive and elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), nonce.as_mut_ptr(), NONCE_BYTES) };
        nonce
    }

    /// What peers may do.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether this mapping takes writes: always for own memory, for a peer's only if it was made for them.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Never true: a memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The file, to be passed to a peer on the same host.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Enters the pages of `len` bytes from `offset`, a multiple of the page size, into this process's page table, so
    /// that copying them later takes no faults. Only a hint: what can't be done now happens at first touch.
    pub fn populate(&self, offset: u64, len: u64) {
        let Ok(start) = self.check(offset, len) else { return };
        let size = usize::try_from(len).unwrap_or(0);
        // SAFETY: `check` keeps the range inside the mapping.
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
        // SAFETY: `check` keeps the range inside the mapping.
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
        // SAFETY: `check_writable` keeps the range inside the mapping.
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
        // SAFETY: both ranges are inside their mappings; `copy` allows overlap, should both be the same memory.
        unsafe {
            std::ptr::copy(start.as_ptr(), target.as_ptr(), usize::try_from(len).unwrap_or(usize::MAX))
        };
        Ok(())
    }

    /// An aligned u64, read at once and before everything after it.
    ///
    /// # Errors
    /// [`RangeError`] when the range leaves the memory or `offset` is no multiple of 8.
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
    /// While the slice lives nothing may write the range: no transfer, no peer, no other thread. An engine gets this
    /// from its block table: a block is written by its sequence alone until it is full, and never after.
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
        if start % 8 != 0 {
            return Err(RangeError { offset, len: 8, memory_len: self.len(), writable: self.writable });
        }
        // SAFETY: checked above.
        let at = unsafe { self.base.add(start) };
        // SAFETY: inside the mapping and aligned (the base is page-aligned); every access to fence slots is atomic.
        Ok(unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) })
    }

    fn check_writable(&self, offset: u64, len: u64) -> Result<usize, RangeError> {
        let start = self.check(offset, len)?;
        if self.writable { Ok(start) } else { Err(self.outside(offset, len)) }
    }

    fn check(&self, offset: u64, len: u64) -> Result<usize, RangeError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        if inside {
            usize::try_from(offset).map_err(|_| self.outside(offset, len))
        } else {
            Err(self.outside(offset, len))
        }
    }

    fn outside(&self, offset: u64, len: u64) -> RangeError {
        RangeError { offset, len, memory_len: self.len(), writable: self.writable }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mapped = usize::try_from(file_bytes(self.len())).unwrap_or(self.len);
        // SAFETY: this value's own mapping, of this length; no slice outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), mapped) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Size of the file behind a memory of `len` bytes: whole pages, and the nonce's.
fn file_bytes(len: u64) -> u64 {
    len.next_multiple_of(PAGE) + PAGE
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

fn map(fd: &OwnedFd, len: u64, protection: ProtFlags, flags: MapFlags) -> rustix::io::Result<NonNull<u8>> {
    let size = usize::try_from(file_bytes(len)).map_err(|_| rustix::io::Errno::NOMEM)?;
    // SAFETY: a fresh shared mapping at an address of the kernel's choice touches no memory of ours.
    let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, protection, flags, fd, 0) }?;
    NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_by_a_peer_mapping() {
        let memory = Memory::allocate("test", 8192).unwrap();
        memory.write_from(100, b"kv").unwrap();
        let peer =
            Memory::map_peer(memory.fd().try_clone_to_owned().unwrap(), 8192, Access::PeersRead).unwrap();
        let mut seen = [0; 2];
        peer.read_into(100, &mut seen).unwrap();
        assert_eq!(&seen, b"kv");
        assert!(peer.write_from(0, b"x").is_err(), "a peer's mapping is read-only");
    }

    #[test]
    fn ranges_outside_are_refused_without_overflow() {
        let memory = Memory::allocate("test", 4096).unwrap();
        for (offset, len) in [(4096, 1), (u64::MAX, 2), (1, 4096)] {
            let mut into = vec![0; usize::try_from(len).unwrap()];
            assert!(memory.read_into(offset, &mut into).is_err(), "{offset}+{len}");
        }
        assert!(memory.load_u64(4).is_err(), "unaligned");
    }

    #[test]
    fn a_file_that_can_shrink_is_not_mapped() {
        let fd = rustix::fs::memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(matches!(Memory::map_peer(fd, 4096, Access::PeersRead), Err(RegisterError::Unsealed)));
    }

    #[test]
    fn a_wrong_promise_of_size_is_refused() {
        let memory = Memory::allocate("test", 4096).unwrap();
        let fd = memory.fd().try_clone_to_owned().unwrap();
        assert!(matches!(Memory::map_peer(fd, 8192, Access::PeersRead), Err(RegisterError::Length { .. })));
    }
    #[test]
    fn the_nonce_shows_through_the_mapping_and_differs_between_memories() {
        let (memory, other) = (Memory::allocate("a", 5000).unwrap(), Memory::allocate("b", 5000).unwrap());
        let peer =
            Memory::map_peer(memory.fd().try_clone_to_owned().unwrap(), 5000, Access::PeersRead).unwrap();
        assert_eq!(&peer.mapped_nonce(), memory.nonce());
        assert_ne!(memory.nonce(), other.nonce());
    }

    #[test]
    fn only_memory_made_for_it_can_be_mapped_for_writing() {
        let sealed = Memory::allocate("sealed", 4096).unwrap();
        let fd = sealed.fd().try_clone_to_owned().unwrap();
        assert!(Memory::map_peer(fd, 4096, Access::PeersWrite).is_err(), "the kernel refuses");
        let open = Memory::allocate_for("open", 4096, Access::PeersWrite).unwrap();
        let fd = open.fd().try_clone_to_owned().unwrap();
        let peer = Memory::map_peer(fd, 4096, Access::PeersWrite).unwrap();
        peer.write_from(8, b"pushed").unwrap();
        let mut seen = [0; 6];
        open.read_into(8, &mut seen).unwrap();
        assert_eq!(&seen, b"pushed");
    }
}
