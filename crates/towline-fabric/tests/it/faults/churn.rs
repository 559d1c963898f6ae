//! Peers that come and go, a thousand times, and what is left of them: nothing.

use std::fs::{read_dir, read_to_string};

use towline_fabric::{Agent, Region, RegionOptions};
use towline_wire::receipt::{Op, TransportKind};

use super::ends::GOOD;
use super::process::{Process, say, variable};
use crate::support::*;

/// Connects over each transport.
const TIMES: usize = 500;
/// Connects before the first count: buffers, arenas and stacks have their size then.
const WARM: usize = 50;
/// Resident bytes that may be more afterwards: half of what 500 leaks of 4 KiB would be.
const GROWTH: u64 = 1 << 20;
const BYTES: u64 = 1 << 20;
const KIND: &str = "TOWLINE_TEST_KIND";

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    files: usize,
    mappings: usize,
    threads: usize,
}

impl Held {
    fn now() -> Self {
        let entries = |path| read_dir(path).unwrap().count();
        Self {
            files: entries("/proc/self/fd"),
            mappings: read_to_string("/proc/self/maps").unwrap().lines().count(),
            threads: entries("/proc/self/task"),
        }
    }
}

/// Anonymous memory in use, in bytes.
fn resident() -> u64 {
    let status = read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// In a process of its own, so that nothing else is counted.
pub(super) fn play(kind: TransportKind) -> &'static str {
    let process = Process::start("faults::churn::child_churns", &[(KIND, kind.to_string())]);
    assert_eq!(process.answer(), "done");
    GOOD
}

struct Pairing {
    owner: Agent,
    book: std::sync::Arc<Book>,
    region: Region,
    reader: Agent,
    local: std::sync::Arc<towline_fabric::Memory>,
    kind: TransportKind,
}

impl Pairing {
    /// Connects, reads and disconnects; every third read is dropped in the middle.
    fn come_and_go(&self, times: usize) {
        let before = self.gone();
        for round in 0..times {
            let peer = wait(self.reader.connect(self.owner.address(), only(self.kind))).unwrap();
            let list = || blocks(BYTES, [0]);
            let request = request(Op::Read, &self.local, self.region.id(), (list(), list()));
            let mut transfer = peer.transfer(request).unwrap();
            if round % 3 > 0 {
                transfer.wait(PATIENCE).unwrap().unwrap();
            }
        }
        self.book.wait_for(|heard| (heard.gone == before + times).then_some(()));
        eventually("every place is free", || {
            let (reader, owner) = (self.reader.stats(), self.owner.stats());
            (reader.peers, reader.transfers, owner.sessions, owner.unauthenticated) == (0, 0, 0, 0)
        });
    }

    fn gone(&self) -> usize {
        self.book.wait_for(|heard| Some(heard.gone))
    }
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_churns() {
    let (owner, book) = start(config("owner"));
    let (reader, _) = start(config("reader"));
    let region = owner.register(memory(BYTES), RegionOptions::default()).unwrap();
    let kind = TransportKind::parse(&variable(KIND)).unwrap();
    let pairing = Pairing { owner, book, region, reader, local: memory(BYTES), kind };
    pairing.come_and_go(WARM);
    let (held, bytes) = (Held::now(), resident());
    pairing.come_and_go(TIMES);
    eventually("files, mappings and threads are those of before", || {
        let now = Held::now();
        // The allocator may merge its own mappings, or split them; those of peers would be more by hundreds.
        (now.files, now.threads) == (held.files, held.threads) && now.mappings <= held.mappings + 4
    });
    let grown = resident().saturating_sub(bytes);
    assert!(grown <= GROWTH, "{grown} bytes more are in use after {TIMES} peers");
    say("done");
}
