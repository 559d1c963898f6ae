//! What agents leave behind, and what they cost when nothing happens.

use std::fs::{read_dir, read_to_string};
use std::time::Duration;

use towline_fabric::{Access, Agent, Peer, RegionOptions};
use towline_wire::receipt::Op;

use crate::child::passes;
use crate::support::*;

/// Open files, memory shared with peers, threads.
pub(crate) fn count() -> (usize, usize, usize) {
    let entries = |path| read_dir(path).unwrap().count();
    let maps = read_to_string("/proc/self/maps").unwrap();
    let shared = maps.lines().filter(|line| line.contains("/memfd:")).count();
    (entries("/proc/self/fd"), shared, entries("/proc/self/task"))
}

#[test]
fn nothing_is_left_of_agents_and_peers() {
    passes("resources::child_leaves_nothing");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_leaves_nothing() {
    let bare = count();
    {
        let (owner, book) = start(config("owner"));
        let (reader, _) = start(config("reader"));
        let region = owner.register(memory(1 << 20), RegionOptions::default()).unwrap();
        // Over shm mapped and lent.
        let _lent = owner.register(foreign(4096, Access::PeersRead).0, RegionOptions::default()).unwrap();
        let local = memory(1 << 20);
        eventually("listeners are up", || count().2 == bare.2 + 8);
        let with_agents = count();
        for (round, kind) in KINDS.iter().cycle().enumerate().take(200) {
            let peer = wait(reader.connect(owner.address(), only(*kind))).unwrap();
            let list = || blocks(1 << 20, [0]);
            let mut transfer =
                peer.transfer(request(Op::Read, &local, region.id(), (list(), list()))).unwrap();
            // Some are dropped in the middle.
            if round % 3 > 0 {
                transfer.wait(PATIENCE).unwrap().unwrap();
            }
        }
        book.wait_for(|heard| (heard.gone == 200).then_some(()));
        eventually("all is closed", || count() == with_agents);
        // A session gives up its place right after its socket.
        eventually("all places are free", || {
            (reader.stats().peers, reader.stats().transfers, owner.stats().sessions) == (0, 0, 0)
        });
    }
    eventually("all is gone", || count() == bare);
}

#[test]
fn an_idle_agent_does_not_wake_up() {
    passes("resources::child_sleeps");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_sleeps() {
    let (owner, _) = start(config("owner"));
    let (reader, _) = start(config("reader"));
    let region = owner.register(memory(1 << 20), RegionOptions::default()).unwrap();
    let _lent = owner.register(foreign(4096, Access::PeersRead).0, RegionOptions::default()).unwrap();
    let connect = |kind| wait(reader.connect(owner.address(), only(kind))).unwrap();
    let peers: Vec<(Peer, Agent)> = KINDS.map(|kind| (connect(kind), reader.clone())).into();
    for (peer, _) in &peers {
        let local = memory(1 << 20);
        let list = || blocks(1 << 20, [0]);
        peer.transfer(request(Op::Read, &local, region.id(), (list(), list())))
            .unwrap()
            .wait(PATIENCE)
            .unwrap()
            .unwrap();
    }
    // Past every deadline of what went before: handshakes, mapping sessions.
    pause(Duration::from_millis(500));
    let before = switches();
    assert_eq!(before.len(), 8, "four io threads, four copy threads");
    pause(Duration::from_millis(1200));
    assert_eq!(switches(), before, "a thread woke up");
}

/// Voluntary context switches and processor ticks of each of our threads.
pub(crate) fn switches() -> Vec<(String, u64, u64)> {
    let mut found = Vec::new();
    for task in read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let name = read_to_string(task.join("comm")).unwrap().trim().to_owned();
        if !name.starts_with("towline") {
            continue;
        }
        let status = read_to_string(task.join("status")).unwrap();
        let field = |key: &str| -> u64 {
            status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().parse().unwrap()
        };
        let stat = read_to_string(task.join("stat")).unwrap();
        let words: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks = words[11].parse::<u64>().unwrap() + words[12].parse::<u64>().unwrap();
        found.push((task.display().to_string(), field("voluntary_ctxt_switches:"), ticks));
    }
    found.sort();
    found
}
