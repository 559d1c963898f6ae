//! The machine's own ways to move bytes, by address: what the limits of `bench kv` are measured with.
//!
//! A limit says what the machine can do, so nothing of the engine under test may be in it: if the engine's copy loop
//! became slow, a limit that borrowed it would become slow as well, and the share would still read 100 %. The loops and
//! calls are therefore written here once more. The *memory* is the engine's: a [`Mapping`] maps the file of a
//! [`Memory`] a second time, here or of another process, so that allocator, page size and the very pages are those of the
//! transfer.
//!
//! `copy` copies between mappings, `crossing` through the kernel from another process (CMA), `vector` through sockets.
//! No slice of a mapping ever exists: everything goes by checked address and length.
#![expect(unsafe_code, reason = "maps memory and moves it by address")]

mod copy;
mod crossing;
mod vector;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use rustix::mm::{MapFlags, ProtFlags};
use towline_fabric::Memory;
use towline_wire::blocks::Extent;

pub(crate) use copy::Stores;
pub(crate) use crossing::Abroad;
pub(crate) use vector::{receive_all, send_all};

/// A second mapping of a memory's file, with every page entered.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the range belongs to this value until drop, and is only ever touched by raw copies and by the kernel.
unsafe impl Send for Mapping {}
// SAFETY: as above: no method makes a reference into the range.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all bytes of `memory`, which must be one that peers may write.
    ///
    /// # Errors
    /// The kernel's: `EPERM` for memory that is sealed against writing.
    pub(crate) fn of(memory: &Memory) -> Result<Self> {
        let file = memory.fd().context("the memory has no file")?;
        Self::map(file, memory.len()).context("can't map the memory a second time")
    }

    /// Maps all bytes of another process's memory, likewise, through the files that the kernel shows of it.
    ///
    /// # Errors
    /// The kernel's: `EACCES` for a process that this one may not trace.
    pub(crate) fn of_another(abroad: &Abroad) -> Result<Self> {
        let path = format!("/proc/{}/fd/{}", abroad.pid, abroad.place.file);
        let file = File::options().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("can't open {path}"))?;
        Self::map(file.as_fd(), abroad.len).with_context(|| format!("can't map {path}"))
    }

    fn map(file: BorrowedFd<'_>, bytes: u64) -> Result<Self> {
        let len = usize::try_from(bytes).context("more bytes than can be mapped")?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Populated, as the engine's own mapping is: a limit that takes faults is none.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: a fresh shared mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { rustix::mm::mmap(anywhere, len, protection, flags, file, 0) }?;
        Ok(Self { base: NonNull::new(base.cast()).context("mapped at address 0")?, len })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Where it lies in this process, for another one to read it by (`crossing`).
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// Refuses what leaves the mapping.
    ///
    /// # Errors
    /// Names the extent.
    pub(crate) fn check(&self, extent: Extent) -> Result<()> {
        self.at(extent).map(drop)
    }

    /// The address of an extent that lies inside.
    fn at(&self, extent: Extent) -> Result<*mut u8> {
        let Extent { offset, len } = extent;
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        ensure!(inside, "{len} bytes at {offset} leave a mapping of {} bytes", self.len);
        Ok(self.base.as_ptr().wrapping_add(usize::try_from(offset)?))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping, of this length; nothing refers to it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// For the tests of the files below.
#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use towline_fabric::Access;
    use towline_wire::blocks::Run;

    use super::super::message::Place;
    use super::*;

    /// A memory of `len` bytes that all differ from their neighbours, and its second mapping.
    pub(super) fn mapped(len: usize, salt: u8) -> (Memory, Mapping) {
        let memory = Memory::allocate_for("mapped", len as u64, Access::PeersWrite).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap() ^ salt).collect();
        memory.write_from(0, &bytes).unwrap();
        let mapping = Mapping::of(&memory).unwrap();
        (memory, mapping)
    }

    pub(super) fn bytes(memory: &Memory) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(memory.len()).unwrap()];
        memory.read_into(0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn memory_of_another_process_is_mapped_through_its_files() {
        let (memory, mapping) = mapped(8192, 0);
        let file = u64::try_from(memory.fd().unwrap().as_raw_fd()).unwrap();
        let place = Place { address: mapping.address(), file };
        let abroad = Abroad { pid: std::process::id(), place, len: 8192 };
        let second = Mapping::of_another(&abroad).unwrap();
        let (target, to) = mapped(8192, 0xff);
        let all = [Run { local: 0, remote: 0, len: 8192 }];
        to.copy_from(&second, &all, Stores::Cached).unwrap();
        assert!(bytes(&target) == bytes(&memory));
        let gone = Abroad { place: Place { file: u64::MAX, ..place }, ..abroad };
        assert!(Mapping::of_another(&gone).unwrap_err().to_string().contains("/proc/"));
    }

    #[test]
    fn extents_outside_and_sealed_memory_are_refused() {
        let (_memory, mapping) = mapped(8192, 0);
        assert!(mapping.check(Extent { offset: 4096, len: 4096 }).is_ok());
        for (offset, len) in [(4096, 4097), (u64::MAX, 2), (8193, 0)] {
            assert!(mapping.check(Extent { offset, len }).is_err(), "{offset}+{len}");
        }
        let sealed = Memory::allocate("sealed", 4096).unwrap();
        assert!(Mapping::of(&sealed).is_err());
    }
}
