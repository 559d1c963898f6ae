//! Memory that is a part of a file.
//!
//! The file is mapped shared: a transfer moves its bytes without a buffer between, and what a peer writes is in the file. To
//! peers of this host it is foreign memory, read and written by address: the file itself is handed to nobody.
//!
//! **A file may be cut short at any time**, by anybody who may write it, and its disk may be full or fail. Touching a page
//! that isn't there any more ends a process with `SIGBUS`. So nothing here touches the bytes: the kernel does, in calls that
//! then fail (`pread` and `pwrite` for copies in this process, `sendmsg`, `recvmsg` and `process_vm_readv` for transfers), and
//! each request is held against the file's present size before.
//!
//! **Cost.** A system call for each piece that is copied by this process, and an `fstat` (0.2 µs) for each piece of any
//! transfer.

use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::{Access, Backing, Memory, RegisterError, pages, size_of};

/// A part of a file, and where it is mapped. Unmapped and closed when dropped.
#[derive(Debug)]
pub(super) struct MappedFile {
    /// Of the mapping, which starts with a page.
    base: NonNull<u8>,
    mapped: usize,
    file: OwnedFd,
    /// Of the part, in the file.
    offset: u64,
    len: u64,
}

// SAFETY: the address is only used to unmap, by the last holder; the file is the kernel's to share.
unsafe impl Send for MappedFile {}
// SAFETY: as above.
unsafe impl Sync for MappedFile {}

impl Memory {
    /// Maps `len` bytes of a file from `offset`, which need be no multiple of anything. With [`Access::PeersRead`] the file is
    /// opened for reading, and the memory takes no writes from here either; with [`Access::PeersWrite`] for both.
    ///
    /// What is written is in the file at once, for whoever reads it, and on the disk when somebody syncs it. If the file is
    /// shorter later, requests for what is gone fail, and so do those for a disk that is full or fails. Of the page in which it
    /// ends, a peer of this host reads zeros after the end, and loses what it writes there. Fences ([`Memory::load_u64`]) can't
    /// be in a file.
    ///
    /// # Errors
    /// [`RegisterError::Size`]; [`RegisterError::File`] with the kernel's reason; [`RegisterError::NotAFile`];
    /// [`RegisterError::FileEnds`] when it has not as many bytes: it is not made longer here.
    pub fn open_file(path: &Path, offset: u64, len: u64, access: Access) -> Result<Self, RegisterError> {
        let size = size_of(len)?;
        let file = Arc::new(MappedFile::open(path, offset, len, access)?);
        // SAFETY: within the mapping, by less than a page.
        let base = unsafe { file.base.add(file.mapped - size) };
        let guard: Arc<dyn Any + Send + Sync> = Arc::<MappedFile>::clone(&file);
        // SAFETY: mapped until the guard is dropped. Nothing refers to the bytes, nor touches them but through the kernel, and
        // only for what the mapping and `writable` below allow.
        let mut memory = unsafe { Self::foreign(base, len, access, guard) }?;
        memory.writable = access == Access::PeersWrite;
        if let Some(Backing::Foreign(foreign)) = Arc::get_mut(&mut memory.backing) {
            foreign.file = Some(file);
        }
        Ok(memory)
    }
}

impl MappedFile {
    fn open(path: &Path, offset: u64, len: u64, access: Access) -> Result<Self, RegisterError> {
        let failed = |step| move |errno| RegisterError::File { path: path.into(), step, errno };
        let (mode, protection) = match access {
            Access::PeersRead => (OFlags::RDONLY, ProtFlags::READ),
            Access::PeersWrite => (OFlags::RDWR, ProtFlags::READ | ProtFlags::WRITE),
        };
        // A pipe would wait for its other end.
        let flags = mode | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(failed("open"))?;
        let stat = rustix::fs::fstat(&file).map_err(failed("fstat"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(RegisterError::NotAFile { path: path.into() });
        }
        let found = u64::try_from(stat.st_size).unwrap_or(0);
        if offset.checked_add(len).is_none_or(|end| end > found) {
            return Err(RegisterError::FileEnds { path: path.into(), offset, len, found });
        }
        let into_page = offset % pages::system_bytes();
        let mapped = usize::try_from(len + into_page).map_err(|_| failed("mmap")(Errno::NOMEM))?;
        let (nowhere, from) = (std::ptr::null_mut(), offset - into_page);
        // SAFETY: a fresh shared mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { rustix::mm::mmap(nowhere, mapped, protection, MapFlags::SHARED, &file, from) }
            .map_err(failed("mmap"))?;
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM).map_err(failed("mmap"))?;
        Ok(Self { base, mapped, file, offset, len })
    }

    /// Bytes of the part that the file has now.
    pub(super) fn present(&self) -> u64 {
        let size = rustix::fs::fstat(&self.file).map_or(0, |stat| stat.st_size);
        u64::try_from(size).unwrap_or(0).saturating_sub(self.offset).min(self.len)
    }

    /// Copies `len` bytes from `at` to `into`.
    ///
    /// # Errors
    /// The kernel's; the file ends before. `into` may then hold some of the bytes.
    ///
    /// # Safety
    /// `into` is mapped, or was a mapped file that ends now, and nothing refers to its `len` bytes but the caller.
    pub(super) unsafe fn read(&self, at: u64, into: *mut u8, len: usize) -> io::Result<()> {
        self.all(len, |done| {
            let (into, left) = (into.wrapping_add(done), len - done);
            // SAFETY: the caller's, from `done` on; what is not mapped the kernel refuses.
            unsafe { libc::pread64(self.file.as_raw_fd(), into.cast(), left, self.position(at, done)) }
        })
    }

    /// Copies `len` bytes of `from` to `at`.
    ///
    /// # Errors
    /// The kernel's. Some of the bytes may have been written.
    ///
    /// # Safety
    /// As [`MappedFile::read`], of `from`.
    pub(super) unsafe fn write(&self, at: u64, from: *const u8, len: usize) -> io::Result<()> {
        self.all(len, |done| {
            let (from, left) = (from.wrapping_add(done), len - done);
            // SAFETY: the caller's, from `done` on; what is not mapped the kernel refuses.
            unsafe { libc::pwrite64(self.file.as_raw_fd(), from.cast(), left, self.position(at, done)) }
        })
    }

    /// Where in the file a byte is; past every file if the number can't say it.
    fn position(&self, at: u64, done: usize) -> i64 {
        i64::try_from(self.offset.saturating_add(at).saturating_add(done as u64)).unwrap_or(i64::MAX)
    }

    /// Calls `step` with the bytes done until all `len` are.
    fn all(&self, len: usize, step: impl Fn(usize) -> isize) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            match usize::try_from(step(done)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the whole of a mapping of this file, which its only holder gives up.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use tempfile::TempDir;

    use super::*;

    const LEN: u64 = 20_000;

    /// A file of `LEN` bytes that tell their place.
    fn file() -> (TempDir, PathBuf) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("kv");
        fs::write(&path, (0..LEN).map(|at| (at % 251) as u8).collect::<Vec<_>>()).unwrap();
        (folder, path)
    }

    fn cut(path: &Path, len: u64) {
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
    }

    #[test]
    fn a_part_of_a_file_is_its_bytes_and_no_others() {
        for offset in [0, 1, 4095, 4096, 5000] {
            let (_folder, path) = file();
            let memory = Memory::open_file(&path, offset, 6000, Access::PeersWrite).unwrap();
            let mut seen = [0; 6000];
            memory.read_into(0, &mut seen).unwrap();
            assert!(seen.iter().zip(offset..).all(|(byte, at)| u64::from(*byte) == at % 251), "{offset}");
            assert!(memory.read_into(1, &mut seen).is_err() && memory.fd().is_none());
            memory.write_from(7, b"kv").unwrap();
            let there = Memory::allocate("there", 100).unwrap();
            there.copy_from(50, &memory, 7, 2).unwrap();
            memory.copy_from(1000, &there, 50, 2).unwrap();
            let (now, start) = (fs::read(&path).unwrap(), usize::try_from(offset).unwrap());
            assert_eq!((&now[start + 7..][..2], &now[start + 1000..][..2]), (&b"kv"[..], &b"kv"[..]));
            let changed = (0..LEN).zip(&now).filter(|(at, byte)| at % 251 != u64::from(**byte)).count();
            assert!(changed <= 4, "nothing else");
            assert!(memory.load_u64(0).is_err() && memory.store_u64(0, 1).is_err());
        }
    }

    #[test]
    fn a_file_for_reading_takes_no_writes() {
        let (_folder, path) = file();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
        let memory = Memory::open_file(&path, 0, LEN, Access::PeersRead).unwrap();
        assert!(!memory.is_writable() && memory.write_from(0, b"x").is_err());
        assert!(memory.copy_from(0, &Memory::allocate("from", 1).unwrap(), 0, 1).is_err());
        assert!(memory.read_into(0, &mut [0; 8]).is_ok());
    }

    #[test]
    fn what_was_cut_off_is_refused_and_what_is_left_is_there() {
        let (_folder, path) = file();
        let memory = Memory::open_file(&path, 1000, 10_000, Access::PeersWrite).unwrap();
        cut(&path, 5500);
        let error = memory.read_into(4000, &mut [0; 1000]).unwrap_err();
        assert_eq!((error.offset, error.len, error.memory_len), (4000, 1000, 4500));
        assert!(memory.write_from(4499, b"kv").is_err() && memory.write_from(9000, b"kv").is_err());
        let there = Memory::allocate("there", 10_000).unwrap();
        assert!(there.copy_from(0, &memory, 0, 10_000).is_err());
        assert!(memory.copy_from(0, &there, 0, 10_000).is_err());
        memory.read_into(0, &mut [0; 4500]).unwrap();
        memory.write_from(4498, b"kv").unwrap();
        assert!(fs::read(&path).unwrap().ends_with(b"kv"));
        // Even if it happens after the check.
        let Backing::Foreign(foreign) = &*memory.backing else { panic!("a file is foreign memory") };
        let mut bytes = [0; 1000];
        // SAFETY: a buffer of this test's.
        let read = unsafe { foreign.file.as_ref().unwrap().read(9000, bytes.as_mut_ptr(), 1000) };
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        // SAFETY: as `memory`'s, whose pages are gone.
        let read =
            unsafe { foreign.file.as_ref().unwrap().read(0, memory.base.as_ptr().wrapping_add(9000), 8) };
        assert_eq!(read.unwrap_err().raw_os_error(), Some(libc::EFAULT));
        fs::remove_file(&path).unwrap();
        memory.read_into(0, &mut [0; 4500]).unwrap();
    }

    #[test]
    fn what_is_no_such_file_is_refused() {
        let (folder, path) = file();
        let open = |path: &Path, offset, len| Memory::open_file(path, offset, len, Access::PeersRead);
        let missing = open(&folder.path().join("none"), 0, 1);
        assert!(matches!(missing, Err(RegisterError::File { step: "open", errno: Errno::NOENT, .. })));
        for (offset, len) in [(0, LEN + 1), (LEN, 1), (u64::MAX, 1)] {
            let ends = open(&path, offset, len);
            assert!(matches!(ends, Err(RegisterError::FileEnds { found: LEN, .. })), "{offset}+{len}");
        }
        assert!(matches!(open(&path, 0, 0), Err(RegisterError::Size { .. })));
        assert!(matches!(open(folder.path(), 0, 1), Err(RegisterError::NotAFile { .. })));
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        assert!(matches!(open(&pipe, 0, 1), Err(RegisterError::NotAFile { .. })));
    }
}
