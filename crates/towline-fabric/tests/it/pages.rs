//! Memory as the host grants it: huge pages, and none at all.

use std::fs::{File, read_to_string, write};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towline_fabric::{Access, Memory, MemoryOptions, Pages, RegionOptions, RegisterError};
use towline_wire::receipt::Op;

use crate::child::passes;
use crate::skips;
use crate::support::*;

const POOL: &str = "/proc/sys/vm/nr_hugepages";
const GATHERS: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const HUGE: u64 = 2 << 20;

/// A setting of the host: locked against other runs of these tests, and put back when dropped.
struct Setting {
    path: &'static str,
    words: String,
    before: Option<String>,
    _lock: File,
}

impl Setting {
    /// `None` on a host that has no such setting.
    fn lock(path: &'static str) -> Option<Self> {
        let lock = File::open(path).ok()?;
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let words = read_to_string(path).ok()?;
        Some(Self { path, words, before: None, _lock: lock })
    }

    /// False when that is not allowed.
    fn set(&mut self, before: &str, value: &str) -> bool {
        let set = write(self.path, value).is_ok();
        self.before = set.then(|| before.into());
        set
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            write(self.path, before).unwrap();
        }
    }
}

fn free_pages() -> u64 {
    let text = read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:")).unwrap();
    line.trim().parse().unwrap()
}

fn made(len: u64, access: Access, pages: Pages) -> Result<Memory, RegisterError> {
    Memory::allocate_with("pages", len, MemoryOptions { access, pages })
}

/// One test for all, as the pool is the host's.
#[test]
fn huge_pages_are_used_when_the_host_grants_them_and_the_reason_is_kept_when_not() {
    let check = "huge pages";
    let Some(mut pool) = Setting::lock(POOL) else {
        return skips::note(check, "this kernel has none");
    };
    // More than any pool has left.
    let much = (free_pages() + 1) * HUGE;
    let error = made(much, Access::PeersRead, Pages::Huge).unwrap_err();
    assert!(matches!(error, RegisterError::HugePages { .. }), "{error}");
    if free_pages() == 0 {
        let memory = made(8192, Access::PeersRead, Pages::HugeIfGranted).unwrap();
        let why = memory.why_normal_pages().unwrap();
        assert!(why.contains("no huge pages") && memory.page_bytes() == 4096, "{why}");
    }
    let count: u64 = pool.words.trim().parse().unwrap();
    let wanted = free_pages() + 4;
    if !pool.set(&count.to_string(), &(count + 4).to_string()) {
        return skips::note(check, "only root can reserve them");
    }
    let free = free_pages();
    if free < wanted {
        return skips::note(check, "the host has no four free pages of 2 MiB");
    }
    for access in [Access::PeersRead, Access::PeersWrite] {
        let memory = made(3 << 20, access, Pages::HugeIfGranted).unwrap();
        assert_eq!((memory.page_bytes(), memory.why_normal_pages()), (HUGE, None));
        assert_eq!(free_pages(), free - 2, "3 MiB and a nonce");
        is_moved(memory);
        assert_eq!(free_pages(), free, "they are given back");
    }
    // The nonce takes a page of its own when the bytes fill theirs.
    let memory = made(HUGE, Access::PeersRead, Pages::Huge).unwrap();
    assert_eq!(free_pages(), free - 2);
    let file = || memory.fd().unwrap().try_clone_to_owned().unwrap();
    assert!(Memory::map_peer(file(), HUGE, Access::PeersWrite).is_err(), "the kernel keeps the seal");
    assert!(matches!(
        Memory::map_peer(file(), 2 * HUGE, Access::PeersRead),
        Err(RegisterError::Length { promised, .. }) if promised == 3 * HUGE
    ));
    let second = made(HUGE * (free - 2), Access::PeersRead, Pages::HugeIfGranted).unwrap();
    let why = second.why_normal_pages().unwrap();
    assert!(why.contains("fallocate") && why.contains("No space"), "{why}");
    assert_eq!(second.page_bytes(), 4096);
}

/// A region of it is read over both transports, and written if it may be.
fn is_moved(memory: Memory) {
    let (memory, bytes) = (std::sync::Arc::new(memory), 3 << 20);
    let peer_writable = memory.access() == Access::PeersWrite;
    for kind in KINDS {
        let options = RegionOptions { peer_writable, ..RegionOptions::default() };
        let pair = Pair::to(kind, memory.clone(), options);
        let local = crate::support::memory(bytes);
        let list = || blocks(bytes, [0]);
        let run = |op| {
            let mut transfer = pair.peer.transfer(pair.request(op, &local, (list(), list()))).unwrap();
            transfer.wait(PATIENCE).unwrap().unwrap()
        };
        memory.write_from(0, &pattern(4, bytes)).unwrap();
        run(Op::Read);
        assert!(contents(&local) == pattern(4, bytes));
        if peer_writable {
            local.write_from(0, &pattern(5, bytes)).unwrap();
            run(Op::Write);
            assert!(contents(&memory) == pattern(5, bytes));
        }
    }
}

#[test]
fn normal_pages_are_gathered_into_huge_ones_where_the_host_allows_it() {
    let check = "transparent huge pages";
    let Some(mut setting) = Setting::lock(GATHERS) else {
        return skips::note(check, "this kernel has none");
    };
    let chosen = setting.words.split(['[', ']']).nth(1).unwrap().to_owned();
    if !setting.set(&chosen, "advise") {
        return skips::note(check, "only root can allow them");
    }
    if free_pages() > 0 {
        return skips::note(check, "reserved ones are free, and come first");
    }
    let memory = made(64 << 20, Access::PeersRead, Pages::HugeIfGranted).unwrap();
    let why = memory.why_normal_pages().unwrap();
    assert!(why.contains("gather"), "{why}");
    let maps = read_to_string("/proc/self/smaps").unwrap();
    let ours = maps.split("/memfd:pages").nth(1).unwrap();
    let line = ours.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
    if line.trim() == "0 kB" {
        skips::note(check, "the kernel found no 2 MiB together");
    }
}

#[test]
fn memory_that_limits_forbid_is_a_typed_error() {
    passes("pages::child_is_limited");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_is_limited() {
    let mapped = read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = mapped.split(' ').next().unwrap().parse().unwrap();
    let used = pages * rustix::param::page_size() as u64;
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(used + (32 << 20)), ..before }).unwrap();
    let error = Memory::allocate("large", 64 << 20).unwrap_err();
    let nomem = matches!(error, RegisterError::Allocate { step: "mmap", errno: Errno::NOMEM, .. });
    assert!(nomem, "{error}");
    Memory::allocate("small", 1 << 20).unwrap();
    setrlimit(Resource::As, before).unwrap();
    let files = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..files }).unwrap();
    let error = Memory::allocate("file", 4096).unwrap_err();
    let full = matches!(error, RegisterError::Allocate { step: "memfd_create", errno: Errno::MFILE, .. });
    assert!(full, "{error}");
    setrlimit(Resource::Nofile, files).unwrap();
    // Nothing is left behind of what failed, and the next one is made.
    Memory::allocate("large", 64 << 20).unwrap();
}
