//! Many peers: no thread each, bounded memory, nothing done when idle, and all of it given back.

use std::fs::read_to_string;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towline_fabric::{Agent, Limits, Peer};
use towline_wire::id::LeaseId;
use towline_wire::receipt::TransportKind;

use crate::child::passes;
use crate::resources::{count, switches};
use crate::support::*;

const PEERS: usize = 1000;
/// Files of a peer in this process, which is both ends: control and one stream, twice.
const FILES: usize = 4;
/// Fewer at a time than the owner lets be strangers.
const AT_ONCE: usize = 32;
/// Most resident memory of a connected peer over TCP, both ends, in bytes: two sessions and a stream a side. Measured: 7 KiB.
/// What the kernel keeps for a socket is not in it.
const CONNECTED_BYTES_MAX: u64 = 16 * 1024;
/// Most resident memory of a peer whose session rests, in bytes: its handle and its card. Measured: 4 KiB.
const RESTING_BYTES_MAX: u64 = 8 * 1024;

fn resident_bytes() -> u64 {
    let status = read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Makes room for `files` open files; false when the hard limit forbids it.
fn raise_files(files: u64) -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= files) {
        return true;
    }
    if maximum.is_some_and(|maximum| maximum < files) {
        return false;
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum }).is_ok()
}

fn connect_all(reader: &Agent, owner: &Agent, count: usize) -> Vec<Peer> {
    let mut peers = Vec::with_capacity(count);
    while peers.len() < count {
        let batch = AT_ONCE.min(count - peers.len());
        let dialled: Vec<_> =
            (0..batch).map(|_| reader.connect(owner.address(), only(TransportKind::Tcp))).collect();
        peers.extend(dialled.into_iter().map(|peer| wait(peer).unwrap()));
    }
    peers
}

#[test]
fn a_thousand_peers_cost_no_thread_each_and_little_memory_and_all_come_back() {
    passes("many::child_a_thousand_peers");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_a_thousand_peers() {
    if !raise_files((PEERS * FILES + 256) as u64) {
        return crate::skips::note("1,000 peers", "the hard limit on open files is below 4,256");
    }
    let (owner, _) = start(config("owner"));
    let region = offer(&owner, 1, 4096);
    let (reader, _) = start(config("reader"));
    let mut peak = 0;
    for round in 0..2 {
        // What the first peers of a process bring with them is not counted as theirs.
        drop(connect_all(&reader, &owner, AT_ONCE));
        eventually("all are gone", || (reader.stats().peers, owner.stats().sessions) == (0, 0));
        let (before, resident) = (count(), resident_bytes());
        let peers = connect_all(&reader, &owner, PEERS);
        let with = count();
        assert_eq!((reader.stats().peers, owner.stats().sessions), (1000, 2000));
        assert_eq!(with.2, before.2, "no thread a peer");
        assert!(with.0 - before.0 <= PEERS * FILES, "{} files", with.0 - before.0);
        let each = resident_bytes().saturating_sub(resident) / PEERS as u64;
        println!("round {round}: {} files and {each} bytes a connected peer, both ends", FILES);
        assert!(each <= CONNECTED_BYTES_MAX, "{each} bytes a peer");
        for peer in peers.iter().step_by(97) {
            assert_eq!(read(peer, region.id(), 4096), Ok(pattern(1, 4096)));
        }
        if round == 0 {
            peak = resident_bytes();
        } else {
            let more = resident_bytes().saturating_sub(peak);
            assert!(more < PEERS as u64 * 2048, "a second round takes {more} bytes more");
        }
        drop(peers);
        eventually("all are gone", || (reader.stats().peers, owner.stats().sessions) == (0, 0));
        eventually("all is given back", || count() == before);
    }
}

#[test]
fn a_thousand_peers_at_rest_keep_no_files_and_wake_one_by_one() {
    passes("many::child_a_thousand_at_rest");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_a_thousand_at_rest() {
    if !raise_files((PEERS * FILES + 256) as u64) {
        return crate::skips::note("1,000 peers at rest", "the hard limit on open files is below 4,256");
    }
    let (owner, _) = start(config("owner"));
    let region = offer(&owner, 1, 4096);
    let short = Duration::from_millis(100);
    let mut quick = config("reader");
    quick.limits = Limits { path_idle: short, session_idle: short, ..Limits::default() };
    let (reader, _) = start(quick);
    drop(connect_all(&reader, &owner, AT_ONCE));
    eventually("all are gone", || (reader.stats().peers, owner.stats().sessions) == (0, 0));
    let (before, resident) = (count(), resident_bytes());
    let peers = connect_all(&reader, &owner, PEERS);
    eventually("all rest", || (reader.stats().peers, owner.stats().sessions) == (0, 0));
    eventually("no files are kept", || count() == before);
    let each = resident_bytes().saturating_sub(resident) / PEERS as u64;
    println!("{each} bytes a peer at rest");
    assert!(each <= RESTING_BYTES_MAX, "{each} bytes a peer at rest");
    assert!(peers.iter().all(Peer::is_open));
    for peer in peers.iter().step_by(97) {
        assert_eq!(read(peer, region.id(), 4096), Ok(pattern(1, 4096)));
    }
}

#[test]
fn a_hundred_idle_peers_with_one_lease_wake_nobody_but_for_its_heartbeats() {
    passes("many::child_a_hundred_idle");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_a_hundred_idle() {
    let (owner, book) = start(config("owner"));
    let mut config = config("reader");
    config.limits = Limits { heartbeat: Duration::from_millis(200), ..Limits::default() };
    let (reader, _) = start(config);
    let peers = connect_all(&reader, &owner, 100);
    let _held = peers[0].hold(LeaseId(1)).unwrap();
    book.wait_for(|heard| (heard.beats.len() >= 3).then_some(()));
    // Past what came before: handshakes and their deadlines.
    pause(Duration::from_millis(500));
    let total = || switches().iter().map(|(_, switches, _)| switches).sum::<u64>();
    let (woken, beats) = (total(), reader.stats().heartbeats);
    pause(Duration::from_secs(2));
    let (woken, beats) = (total() - woken, reader.stats().heartbeats - beats);
    println!("{woken} wake-ups for {beats} heartbeats");
    // One of the reader's thread and one of the owner's for each; the rest is for one that was under way at the edges.
    assert!(beats >= 1 && woken <= 2 * beats + 4, "{woken} wake-ups for {beats} heartbeats");
}
