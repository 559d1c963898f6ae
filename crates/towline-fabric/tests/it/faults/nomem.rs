//! Memory that can't be had: at the owner, which can't register, and at the reader, which can't map.
//!
//! Both happen in a process of their own, whose address space is bounded: the limit stays with the process.

use std::fs::read_to_string;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towline_fabric::{ConnectError, ConnectOptions, Memory, RegionOptions, RegisterError};
use towline_wire::receipt::TransportKind;

use super::ends::{self, ALLOCATE, CONNECT_NO_TRANSPORT};
use super::fault::State;
use super::process::{Process, say, variable};
use super::scene::Other;
use crate::child::passes;
use crate::support::*;

/// Bytes that don't fit.
const LARGE: u64 = 256 << 20;
/// Bytes that still do: stacks, buffers, what a test needs to fail with a message.
const ROOM: u64 = 128 << 20;
const ADDRESS: &str = "TOWLINE_TEST_ADDRESS";

/// Leaves the process `room` bytes of address space, or all there are. Threads that are just starting must have their
/// stacks first.
fn bound_memory(room: Option<u64>) {
    eventually("the other threads have started and sleep", others_sleep);
    let stat = read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = stat.split(' ').next().unwrap().parse().unwrap();
    let current = room.map(|room| pages * rustix::param::page_size() as u64 + room);
    let maximum = getrlimit(Resource::As).maximum;
    setrlimit(Resource::As, Rlimit { current, maximum }).unwrap();
}

fn others_sleep() -> bool {
    let own = rustix::thread::gettid().as_raw_pid().to_string();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap());
    tasks.filter(|task| task.file_name() != own.as_str()).all(|task| {
        // One that ended meanwhile is none.
        let stat = read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.trim_start().starts_with('S'))
    })
}

/// Plays it and says how it ended.
pub(super) fn play(state: State, kind: TransportKind) -> &'static str {
    match (state, kind) {
        (State::Registering, _) => {
            passes("faults::nomem::child_registers");
            ALLOCATE
        }
        (State::Opening, TransportKind::Shm) => {
            let (owner, _) = start(config("owner"));
            let _region = owner.register(memory(LARGE), RegionOptions::default()).unwrap();
            let variables = [(ADDRESS, owner.address().to_owned())];
            let reader = Process::start("faults::nomem::child_maps", &variables);
            assert_eq!(reader.answer(), "done");
            CONNECT_NO_TRANSPORT
        }
        other => panic!("{other:?} is not played here"),
    }
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_registers() {
    let (owner, _) = start(config("owner"));
    let other = Other::new();
    bound_memory(Some(ROOM));
    let error = Memory::allocate("large", LARGE).unwrap_err();
    assert_eq!(ends::of_registration(&error), ALLOCATE);
    let RegisterError::Allocate { len: LARGE, errno, .. } = error else { panic!("{error}") };
    assert_eq!(errno, rustix::io::Errno::NOMEM);
    // What fits is registered and served as ever.
    let small = owner.register(memory(1 << 20), RegionOptions::default()).unwrap();
    assert_eq!(owner.card().regions.len(), 1);
    for kind in KINDS {
        other.serves(&owner, kind);
    }
    drop(small);
    bound_memory(None);
    assert!(Memory::allocate("large", LARGE).is_ok(), "nothing of the attempt is left in the way");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_maps() {
    let address = variable(ADDRESS);
    let (reader, _) = start(config("reader"));
    let other = Other::new();
    bound_memory(Some(ROOM));
    let error = wait(reader.connect(&address, only(TransportKind::Shm))).unwrap_err();
    assert_eq!(ends::of_connect(&error), CONNECT_NO_TRANSPORT);
    let ConnectError::NoTransport { reasons } = error else { unreachable!() };
    assert!(reasons.to_string().contains("mmap failed for a region of"), "{reasons}");
    let peer = wait(reader.connect(&address, ConnectOptions::default())).unwrap();
    assert_eq!(peer.transport(), TransportKind::Tcp, "over what maps nothing");
    drop(peer);
    for kind in KINDS {
        other.serves(&reader, kind);
    }
    bound_memory(None);
    assert!(wait(reader.connect(&address, only(TransportKind::Shm))).is_ok());
    say("done");
}
