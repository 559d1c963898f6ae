//! Own memory: a sealed file without a name, mapped; and a peer's such file, mapped after checks.
//!
//! ```text
//!   0               len        file_bytes − 4096   file_bytes
//!   | the bytes ... | unused ... | nonce | unused  |          file_bytes: whole pages of the file's kind
//! ```
//! **Seals.** No file changes its size any more, so that a mapping never dies of `SIGBUS` for that; and one that peers may
//! only read takes no new writable mapping. Files of huge pages take seals since Linux 4.16, but kept the second promise
//! only since 5.13: so there it is tried, and a host that breaks it has no huge pages as far as this is concerned.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::pages::{Pages, Stock, system_bytes};
use super::{
    Access, Backing, Memory, MemoryOptions, NONCE_BYTES, Nonce, RegisterError, fresh_nonce, size_of,
};

/// The nonce stands this far before the end of the file.
const NONCE_ROOM: u64 = 4096;

/// What `fstatfs` says of a file of huge pages: `HUGETLBFS_MAGIC` of `linux/magic.h`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A file and where it is mapped. Unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    /// Of the whole file.
    bytes: usize,
    fd: OwnedFd,
    page_bytes: u64,
    why_normal: Option<String>,
}

impl Memory {
    /// Allocates `len` zeroed bytes of normal pages that peers may read, and seals their size. `name` shows in
    /// `/proc/PID/maps`.
    ///
    /// # Errors
    /// As [`Memory::allocate_with`].
    pub fn allocate(name: &str, len: u64) -> Result<Self, RegisterError> {
        Self::allocate_with(name, len, MemoryOptions::default())
    }

    /// Allocates `len` zeroed bytes of normal pages for what `access` says, and seals their size.
    ///
    /// # Errors
    /// As [`Memory::allocate_with`].
    pub fn allocate_for(name: &str, len: u64, access: Access) -> Result<Self, RegisterError> {
        Self::allocate_with(name, len, MemoryOptions { access, ..MemoryOptions::default() })
    }

    /// Allocates `len` zeroed bytes as `options` say, and seals their size.
    ///
    /// # Errors
    /// [`RegisterError::Size`] for zero or more than [`REGION_BYTES_MAX`](super::REGION_BYTES_MAX);
    /// [`RegisterError::Allocate`] with the kernel's reason, `ENOMEM` and `ENOSPC` included: the pages are reserved here,
    /// not at first touch; [`RegisterError::HugePages`] when there must be huge ones and are not.
    pub fn allocate_with(name: &str, len: u64, options: MemoryOptions) -> Result<Self, RegisterError> {
        let size = size_of(len)?;
        let make = |stock| Mapping::make(name, len, options.access, stock);
        let (mapping, nonce) = match options.pages {
            Pages::Normal => make(Stock::Normal)?,
            Pages::Huge => make(Stock::Reserved)?,
            Pages::HugeIfGranted => match make(Stock::Reserved) {
                Ok(made) => made,
                Err(refused) => {
                    let stock = Stock::second_best();
                    let (mut mapping, nonce) = make(stock)?;
                    mapping.why_normal = Some(explain(&refused, stock));
                    (mapping, nonce)
                }
            },
        };
        let (base, backing) = (mapping.base, Backing::Own(mapping));
        Ok(Self::new((base, size), (true, options.access), nonce, backing))
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
        let page_bytes = page_bytes_of(&fd).map_err(failed("fstatfs"))?;
        let promised = file_bytes(len, page_bytes);
        let found = rustix::fs::fstat(&fd).map_err(failed("fstat"))?.st_size;
        if u64::try_from(found) != Ok(promised) {
            return Err(RegisterError::Length { promised, found });
        }
        let writable = access == Access::PeersWrite;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let (base, bytes) = map(&fd, promised, protection, MapFlags::SHARED).map_err(failed("mmap"))?;
        let mapping = Mapping { base, bytes, fd, page_bytes, why_normal: None };
        let nonce = mapping.nonce();
        Ok(Self::new((base, size), (writable, access), nonce, Backing::Peer(mapping)))
    }
}

impl Mapping {
    /// A new file of zeros with a nonce, mapped here for writing and sealed for what `access` says.
    fn make(name: &str, len: u64, access: Access, stock: Stock) -> Result<(Self, Nonce), RegisterError> {
        let failed = |step| {
            move |errno| match stock {
                Stock::Normal | Stock::Gathered => RegisterError::Allocate { len, step, errno },
                Stock::Reserved => RegisterError::HugePages { len, step, errno },
            }
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | stock.flags();
        let fd = rustix::fs::memfd_create(name, flags).map_err(failed("memfd_create"))?;
        let file = file_bytes(len, stock.page_bytes());
        rustix::fs::ftruncate(&fd, file).map_err(failed("ftruncate"))?;
        // Huge pages are gathered at first touch, through a mapping that asks for them, and the rest is reserved after; all
        // others are reserved first, and the mapping populated: a transfer into it then takes no faults.
        let gathers = stock == Stock::Gathered;
        if !gathers {
            reserve(&fd, file).map_err(failed("fallocate"))?;
        }
        let flags = if gathers { MapFlags::SHARED } else { MapFlags::SHARED | MapFlags::POPULATE };
        let (base, bytes) =
            map(&fd, file, ProtFlags::READ | ProtFlags::WRITE, flags).map_err(failed("mmap"))?;
        let mapping = Self { base, bytes, fd, page_bytes: stock.page_bytes(), why_normal: None };
        if gathers {
            mapping.gather();
            reserve(&mapping.fd, file).map_err(failed("fallocate"))?;
        }
        let nonce = fresh_nonce().map_err(failed("getrandom"))?;
        mapping.set_nonce(&nonce);
        mapping.seal(access).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Ok((mapping, nonce))
    }

    /// Asks for transparent huge pages, and touches all so that they are made. Hints: what can't be had is made normally.
    fn gather(&self) {
        for advice in [Advice::LinuxHugepage, Advice::LinuxPopulateWrite] {
            // SAFETY: a fresh mapping of zeros; the advice adds pages of zeros and changes no byte.
            _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.bytes, advice) };
        }
    }

    /// Seals the file. After our own writable mapping exists: if peers may only read, they can then map for reading only.
    fn seal(&self, access: Access) -> rustix::io::Result<()> {
        let size = SealFlags::SHRINK | SealFlags::GROW;
        if access == Access::PeersWrite {
            return rustix::fs::fcntl_add_seals(&self.fd, size);
        }
        rustix::fs::fcntl_add_seals(&self.fd, size | SealFlags::FUTURE_WRITE)?;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        match map(&self.fd, self.bytes as u64, both, MapFlags::SHARED) {
            Err(_) => Ok(()),
            Ok((base, bytes)) => {
                unmap(base, bytes);
                Err(Errno::OPNOTSUPP)
            }
        }
    }

    /// Bytes of the file's pages.
    pub(super) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// See [`Memory::why_normal_pages`].
    pub(super) fn why_normal(&self) -> Option<&str> {
        self.why_normal.as_deref()
    }

    /// The file.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The nonce as the mapping shows it now.
    pub(super) fn nonce(&self) -> Nonce {
        let mut nonce = [0; NONCE_BYTES];
        let source = self.nonce_at();
        // SAFETY: the room has 4096 bytes, `nonce` is exclusive and elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), nonce.as_mut_ptr(), NONCE_BYTES) };
        nonce
    }

    /// Of a mapping for writing that nobody else knows yet.
    fn set_nonce(&self, nonce: &Nonce) {
        let target = self.nonce_at();
        // SAFETY: the room has 4096 bytes, and `make`, which alone calls this, mapped them for writing.
        unsafe { std::ptr::copy_nonoverlapping(nonce.as_ptr(), target.as_ptr(), NONCE_BYTES) };
    }

    fn nonce_at(&self) -> NonNull<u8> {
        let room = usize::try_from(NONCE_ROOM).unwrap_or(self.bytes);
        // SAFETY: every file has at least the room, so this stays inside the mapping.
        unsafe { self.base.add(self.bytes - room) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.base, self.bytes);
    }
}

/// Size of the file behind a memory of `len` bytes: the bytes and the nonce's room, in whole pages.
fn file_bytes(len: u64, page_bytes: u64) -> u64 {
    (len.next_multiple_of(NONCE_ROOM) + NONCE_ROOM).next_multiple_of(page_bytes)
}

/// Bytes of the pages of a file that somebody else made.
fn page_bytes_of(fd: &OwnedFd) -> rustix::io::Result<u64> {
    let system = rustix::fs::fstatfs(fd)?;
    let huge = u64::try_from(system.f_type) == Ok(HUGETLBFS_MAGIC);
    Ok(if huge { u64::try_from(system.f_bsize).unwrap_or(0).max(1) } else { system_bytes() })
}

/// Why there are no reserved huge pages, and what was done instead.
fn explain(refused: &RegisterError, instead: Stock) -> String {
    match instead {
        Stock::Gathered => format!("{refused}; the kernel was asked to gather normal ones"),
        Stock::Normal | Stock::Reserved => refused.to_string(),
    }
}

/// Has the kernel make the file's pages, all or none.
fn reserve(fd: &OwnedFd, bytes: u64) -> rustix::io::Result<()> {
    rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, bytes))
}

fn map(
    fd: &OwnedFd,
    bytes: u64,
    protection: ProtFlags,
    flags: MapFlags,
) -> rustix::io::Result<(NonNull<u8>, usize)> {
    let bytes = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
    // SAFETY: a fresh shared mapping at an address of the kernel's choice touches no memory of ours.
    let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) }?;
    Ok((NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, bytes))
}

/// Of a mapping that this file made, and that nothing refers to any more.
fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the whole of a mapping of this file, which its only holder gives up.
    let unmapped = unsafe { rustix::mm::munmap(base.as_ptr().cast(), bytes) };
    debug_assert!(unmapped.is_ok());
}

#[cfg(test)]
mod tests {
    use super::super::pages::HUGE_BYTES;
    use super::*;

    fn file(memory: &Memory) -> OwnedFd {
        memory.fd().unwrap().try_clone_to_owned().unwrap()
    }

    #[test]
    fn what_is_written_is_read_back_by_a_peer_mapping() {
        let memory = Memory::allocate("test", 8192).unwrap();
        memory.write_from(100, b"kv").unwrap();
        let peer = Memory::map_peer(file(&memory), 8192, Access::PeersRead).unwrap();
        let mut seen = [0; 2];
        peer.read_into(100, &mut seen).unwrap();
        assert_eq!(&seen, b"kv");
        assert!(peer.write_from(0, b"x").is_err(), "a peer's mapping is read-only");
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
        let mapped = Memory::map_peer(file(&memory), 8192, Access::PeersRead);
        assert!(matches!(mapped, Err(RegisterError::Length { .. })));
    }

    #[test]
    fn the_nonce_shows_through_the_mapping_and_differs_between_memories() {
        let (memory, other) = (Memory::allocate("a", 5000).unwrap(), Memory::allocate("b", 5000).unwrap());
        let peer = Memory::map_peer(file(&memory), 5000, Access::PeersRead).unwrap();
        assert_eq!(&peer.mapped_nonce(), memory.nonce());
        assert_ne!(memory.nonce(), other.nonce());
    }

    #[test]
    fn the_nonce_is_not_among_the_bytes() {
        for len in [1, 4095, 4096, HUGE_BYTES - 4096, HUGE_BYTES - 4095, HUGE_BYTES] {
            for page_bytes in [4096, 16 << 10, HUGE_BYTES] {
                let file = file_bytes(len, page_bytes);
                assert!(file - NONCE_ROOM >= len && file.is_multiple_of(page_bytes), "{len} in {page_bytes}");
                assert!(file - len < page_bytes + 2 * NONCE_ROOM, "{len} in {page_bytes}: no page too many");
            }
        }
    }

    #[test]
    fn only_memory_made_for_it_can_be_mapped_for_writing() {
        let sealed = Memory::allocate("sealed", 4096).unwrap();
        assert!(Memory::map_peer(file(&sealed), 4096, Access::PeersWrite).is_err(), "the kernel refuses");
        let open = Memory::allocate_for("open", 4096, Access::PeersWrite).unwrap();
        let peer = Memory::map_peer(file(&open), 4096, Access::PeersWrite).unwrap();
        peer.write_from(8, b"pushed").unwrap();
        let mut seen = [0; 6];
        open.read_into(8, &mut seen).unwrap();
        assert_eq!(&seen, b"pushed");
    }

    #[test]
    fn normal_pages_gathered_or_not_hold_zeros_and_are_sealed() {
        for stock in [Stock::Normal, Stock::Gathered] {
            let (mapping, nonce) = Mapping::make("stock", 3 << 20, Access::PeersRead, stock).unwrap();
            assert_eq!(mapping.nonce(), nonce);
            let peer = Memory::map_peer(mapping.fd.try_clone().unwrap(), 3 << 20, Access::PeersRead).unwrap();
            let mut bytes = vec![1; 3 << 20];
            peer.read_into(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0));
        }
    }
}
