//! Foreign memory: an engine's own buffer, read and written where it lies, by agents of this and of other processes.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use rustix::process::Signal;
use towline_fabric::{Access, Agent, ConnectOptions, Memory, Peer, RegionOptions, TransferError};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, TransportKind};

use crate::child::{Serving, command};
use crate::skips;
use crate::support::*;

const BYTES: u64 = 8 << 20;

fn writable() -> RegionOptions {
    RegionOptions { peer_writable: true, ..RegionOptions::default() }
}

/// Reads the whole of a region into fresh memory.
fn read(peer: &Peer, region: RegionId, bytes: u64) -> Result<(String, Arc<Memory>), TransferError> {
    let local = memory(bytes);
    let list = || blocks(bytes, [0]);
    let outcome = peer.transfer(request(Op::Read, &local, region, (list(), list())))?.wait(PATIENCE);
    outcome.expect("an outcome in time").map(|receipt| (receipt.verified_by, local))
}

#[test]
fn a_path_reaches_own_and_foreign_regions_each_in_its_way_and_receipts_say_which() {
    let (owner, _) = start(config("owner"));
    let own = owner.register(memory(BYTES), RegionOptions::default()).unwrap();
    let lent = owner.register(foreign(BYTES, Access::PeersWrite).0, writable()).unwrap();
    for (region, seed) in [(&own, 1), (&lent, 2)] {
        region.memory().write_from(0, &pattern(seed, BYTES)).unwrap();
    }
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Shm))).unwrap();
    assert_eq!(peer.evidence().source, "mapping+cma");
    for (region, seed, word) in [(&own, 1, "mapping"), (&lent, 2, "cma")] {
        let (said, local) = read(&peer, region.id(), BYTES).unwrap();
        assert!(said == word && contents(&local) == pattern(seed, BYTES), "{word}");
    }
    // Local memory may be foreign as well.
    let (local, _) = foreign(BYTES, Access::PeersRead);
    local.write_from(0, &pattern(3, BYTES)).unwrap();
    let list = || blocks(BYTES, [0]);
    let write = peer.transfer(request(Op::Write, &local, lent.id(), (list(), list()))).unwrap();
    let receipt = { write }.wait(PATIENCE).unwrap().unwrap();
    assert!(contents(lent.memory()) == pattern(3, BYTES));
    let rails: Vec<_> = receipt.rails.iter().map(|rail| (rail.name.as_str(), rail.bytes)).collect();
    assert_eq!((receipt.evidence.source.as_str(), rails), ("cma", vec![("cma", BYTES)]));
}

/// Serves a foreign region until its input ends.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_lends() {
    let (owner, _) = start(config("child"));
    let region = owner.register(foreign(BYTES, Access::PeersWrite).0, writable()).unwrap();
    region.memory().write_from(0, &pattern(6, BYTES)).unwrap();
    println!("\nserving {} {}", owner.address(), region.id());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

#[test]
fn memory_of_another_process_is_read_and_written_by_address() {
    let serving = Serving::of(command("foreign::child_lends"));
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(&serving.address, only(TransportKind::Shm))).unwrap();
    let (said, local) = read(&peer, serving.region, BYTES).unwrap();
    assert!(said == "cma" && contents(&local) == pattern(6, BYTES));
    local.write_from(0, &pattern(9, BYTES)).unwrap();
    // Pages in an order of their own: more pieces than one call takes.
    let page = |count: u32| blocks(1024, (0..count).rev());
    let pages = u32::try_from(BYTES / 1024).unwrap();
    let write = request(Op::Write, &local, serving.region, (page(pages), page(pages)));
    peer.transfer(write).unwrap().wait(PATIENCE).unwrap().unwrap();
    let (_, back) = read(&peer, serving.region, BYTES).unwrap();
    assert!(contents(&back) == pattern(9, BYTES));
}

#[test]
fn a_stopped_owner_is_still_read_and_a_killed_one_is_not() {
    let serving = Serving::of(command("foreign::child_lends"));
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(&serving.address, only(TransportKind::Shm))).unwrap();
    serving.signal(Signal::STOP);
    let (_, local) = read(&peer, serving.region, BYTES).unwrap();
    assert!(contents(&local) == pattern(6, BYTES));
    serving.signal(Signal::KILL);
    // Whatever notices first, the copy, the loan or the control session: the owner is gone.
    let error = (0..1000).find_map(|_| read(&peer, serving.region, BYTES).err()).unwrap();
    assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
    eventually("the loss is noticed", || !peer.is_open());
}

#[test]
fn a_region_that_is_dropped_is_not_read_any_more_and_its_buffer_goes_back() {
    let (owner, _) = start(config("owner"));
    let (memory, buffer) = foreign(BYTES, Access::PeersRead);
    let region = owner.register(memory, RegionOptions::default()).unwrap();
    let other = owner.register(foreign(4096, Access::PeersRead).0, RegionOptions::default()).unwrap();
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Shm))).unwrap();
    let id = region.id();
    let local = crate::support::memory(BYTES);
    let list = || blocks(BYTES, [0]);
    let mut transfer = peer.transfer(request(Op::Read, &local, id, (list(), list()))).unwrap();
    drop(region);
    match transfer.wait(PATIENCE).unwrap() {
        // It may have been through, or be stopped between two slices.
        Ok(receipt) => assert_eq!(receipt.bytes, BYTES),
        Err(error) => assert_eq!(error, TransferError::UnknownRegion { region: id }),
    }
    eventually("the buffer is let go of", || buffer.upgrade().is_none());
    assert_eq!(read(&peer, id, BYTES).unwrap_err(), TransferError::UnknownRegion { region: id });
    read(&peer, other.id(), 4096).unwrap();
    assert!(peer.is_open(), "one region less harms nothing else");
}

/// Connects and holds on until its input ends.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_borrows() {
    let (reader, _) = start(config("borrower"));
    let address = std::env::var("TOWLINE_TEST_OWNER").unwrap();
    let peer = wait(reader.connect(&address, only(TransportKind::Shm))).unwrap();
    println!("\nserving {} 0", peer.evidence().source);
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

#[test]
fn a_buffer_is_kept_while_a_stopped_peer_may_be_in_the_middle_of_a_copy() {
    for (signal, agent_stops) in
        [(Signal::CONT, false), (Signal::KILL, false), (Signal::CONT, true), (Signal::KILL, true)]
    {
        let (owner, _) = start(config("owner"));
        let (memory, buffer) = foreign(4096, Access::PeersWrite);
        let region = owner.register(memory, writable()).unwrap();
        let mut borrower = command("foreign::child_borrows");
        borrower.env("TOWLINE_TEST_OWNER", owner.address());
        let borrower = Serving::of(borrower);
        assert_eq!(borrower.address, "cma");
        borrower.signal(Signal::STOP);
        drop(region);
        if agent_stops {
            drop(owner);
        }
        pause(Duration::from_millis(100));
        assert!(buffer.upgrade().is_some(), "it was stopped while it had the address");
        borrower.signal(signal);
        eventually("the buffer is let go of", || buffer.upgrade().is_none());
    }
}

#[test]
#[expect(unsafe_code, reason = "it takes a page away under a region")]
fn a_read_that_meets_a_missing_page_fails_and_harms_no_other() {
    let len = usize::try_from(BYTES).unwrap();
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: fresh memory at an address of the kernel's choice.
    let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, both, MapFlags::PRIVATE) };
    let base = NonNull::new(base.unwrap().cast::<u8>()).unwrap();
    // SAFETY: not unmapped in this test; where a page is taken away, only the kernel goes.
    let memory = unsafe { Memory::foreign(base, BYTES, Access::PeersRead, Arc::new(())) }.unwrap();
    memory.write_from(0, &pattern(8, BYTES)).unwrap();
    let pair = Pair::to(TransportKind::Shm, Arc::new(memory), RegionOptions::default());
    // SAFETY: inside the mapping.
    let hole = unsafe { base.add(len / 2) };
    let page = rustix::param::page_size();
    // SAFETY: a page of this test's own.
    unsafe { rustix::mm::mprotect(hole.as_ptr().cast(), page, MprotectFlags::empty()) }.unwrap();
    let error = read(&pair.peer, pair.region.id(), BYTES).unwrap_err();
    assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("process_vm_readv failed after") && text.contains("Bad address"), "{text}");
    let (_, local) = read(&pair.peer, pair.region.id(), BYTES / 2).unwrap();
    assert!(contents(&local) == pattern(8, BYTES)[..len / 2]);
}

/// Says how it reaches the owner, and reads.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_reads() {
    let owner = std::env::var("TOWLINE_TEST_OWNER").unwrap();
    let (address, region) = owner.split_once(' ').unwrap();
    let (reader, _) = start(config("stranger"));
    match wait(reader.connect(address, only(TransportKind::Shm))) {
        Ok(peer) => println!("\nshm reaches it by {}", peer.evidence().source),
        Err(error) => println!("\nshm does not: {error}"),
    }
    let peer = wait(reader.connect(address, ConnectOptions::default())).unwrap();
    let region = RegionId(region.parse().unwrap());
    let (said, local) = read(&peer, region, BYTES).unwrap();
    assert!(contents(&local) == pattern(6, BYTES));
    println!("read over {} ({said}), passed over: {}", peer.transport(), peer.passed_over());
}

/// What [`child_reads`] says, run by `wrapper` if there is one.
fn reads(mut command: Command, owner: &Agent, region: RegionId) -> String {
    command.env("TOWLINE_TEST_OWNER", format!("{} {region}", owner.address()));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
    text
}

fn lender() -> (Agent, towline_fabric::Region) {
    let (owner, _) = start(config("owner"));
    let region = owner.register(foreign(BYTES, Access::PeersRead).0, RegionOptions::default()).unwrap();
    region.memory().write_from(0, &pattern(6, BYTES)).unwrap();
    (owner, region)
}

/// The command, run by another program, `unshare` or so.
fn within(program: &str, arguments: &[&str], inner: &Command) -> Command {
    let mut outer = Command::new(program);
    outer.args(arguments).arg(inner.get_program()).args(inner.get_args());
    outer
}

#[test]
fn a_reader_of_another_user_is_told_why_and_goes_over_tcp() {
    let check = "cma of another user";
    if !rustix::process::getuid().is_root() {
        return skips::note(check, "only root can start a process of another user");
    }
    let nobody = 65534;
    let mut trial = Command::new(std::env::current_exe().unwrap());
    trial.arg("--list").uid(nobody).gid(nobody).stdout(Stdio::null()).stderr(Stdio::null());
    if !trial.status().is_ok_and(|status| status.success()) {
        return skips::note(check, "another user cannot run this binary where it lies");
    }
    let (owner, region) = lender();
    let mut stranger = command("foreign::child_reads");
    stranger.uid(nobody).gid(nobody);
    let text = reads(stranger, &owner, region.id());
    assert!(
        text.contains("shm does not: no transport reaches the peer: shm: region 1 is foreign memory"),
        "{text}"
    );
    assert!(text.contains("EPERM") && text.contains("another user"), "{text}");
    assert!(text.contains("read over tcp (socket), passed over: shm: region 1"), "{text}");
    // The loans that came to nothing are back.
    eventually("all places are free", || owner.stats().sessions == 0);
}

/// Whether this process may make a pid namespace.
fn makes_namespaces(check: &str) -> bool {
    let made = Command::new("unshare").args(["--pid", "--fork", "true"]).stderr(Stdio::null()).status();
    let makes = made.is_ok_and(|status| status.success());
    if !makes {
        skips::note(check, "unshare --pid is not there or not allowed");
    }
    makes
}

#[test]
fn a_reader_in_a_pid_namespace_cannot_name_an_owner_outside_and_goes_over_tcp() {
    if !makes_namespaces("cma out of a pid namespace") {
        return;
    }
    let (owner, region) = lender();
    let inside = within("unshare", &["--pid", "--fork"], &command("foreign::child_reads"));
    let text = reads(inside, &owner, region.id());
    assert!(text.contains("shm does not") && text.contains("pid namespace"), "{text}");
    assert!(text.contains("read over tcp"), "{text}");
}

#[test]
fn an_owner_in_a_pid_namespace_is_read_from_outside() {
    if !makes_namespaces("cma into a pid namespace") {
        return;
    }
    let inside = within("unshare", &["--pid", "--fork", "--kill-child"], &command("foreign::child_lends"));
    let serving = Serving::of(inside);
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(&serving.address, only(TransportKind::Shm))).unwrap();
    let (said, local) = read(&peer, serving.region, BYTES).unwrap();
    assert!(said == "cma" && contents(&local) == pattern(6, BYTES));
}

/// With `ptrace_scope` 1 a process without capabilities reaches its children only: here a sibling, which lets it.
#[test]
fn an_owner_lets_its_peers_past_yama() {
    let check = "cma past yama";
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if scope.trim() != "1" {
        return skips::note(check, "kernel.yama.ptrace_scope is not 1 here");
    }
    if !rustix::process::getuid().is_root() {
        let (owner, region) = lender();
        // A child is no ancestor: without the owner's word it is a stranger.
        for _ in 0..2 {
            let text = reads(command("foreign::child_reads"), &owner, region.id());
            assert!(text.contains("shm reaches it by cma"), "{text}");
        }
        return;
    }
    skips::note(check, "root passes yama anyway");
}
