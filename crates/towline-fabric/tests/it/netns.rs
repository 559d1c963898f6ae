//! Agents in network namespaces of their own, joined by a virtual cable: what containers of one host look like.
//!
//! Needs root and `ip`; a visible skip without.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use towline_fabric::{
    Access, Agent, ConnectOptions, Memory, Peer, Region, RegionOptions, ShmConfig, TransferError,
};
use towline_wire::receipt::{Op, TransportKind};

use crate::support::*;

/// Two namespaces and the cable between them, gone when dropped.
struct Cable {
    names: [String; 2],
}

impl Cable {
    /// `None`, with a note, where namespaces can't be made. `test` tells the names of tests that run together apart.
    fn lay(test: &str) -> Option<Self> {
        let names = ["a", "b"].map(|end| format!("towline-{}-{test}-{end}", std::process::id()));
        let cable = Self { names };
        let [a, b] = &cable.names;
        let laid = ip(&["netns", "add", a])
            .and_then(|()| ip(&["netns", "add", b]))
            .and_then(|()| {
                let veth = ["link", "add", "cable", "netns", a, "type", "veth", "peer", "cable", "netns", b];
                ip(&veth)
            })
            .and_then(|()| cable.address(0))
            .and_then(|()| cable.address(1));
        match laid {
            Ok(()) => Some(cable),
            Err(reason) => {
                crate::skips::note("agents in network namespaces", &reason);
                None
            }
        }
    }

    fn address(&self, end: usize) -> Result<(), String> {
        let (name, host) = (&self.names[end], end + 1);
        let v4 = format!("10.77.0.{host}/24");
        let v6 = format!("fd77::{host}/64");
        ip(&["-n", name, "address", "add", &v4, "dev", "cable"])?;
        ip(&["-n", name, "address", "add", &v6, "dev", "cable", "nodad"])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        ip(&["-n", name, "link", "set", "cable", "up"])
    }

    fn unplug(&self) {
        ip(&["-n", &self.names[1], "link", "set", "cable", "down"]).unwrap();
    }

    /// What `work` gives in the namespace at that end. Threads that it starts stay there.
    fn at<T: Send>(&self, end: usize, work: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.names[end])).unwrap();
        std::thread::scope(|scope| {
            let inside = scope.spawn(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                work()
            });
            inside.join().unwrap()
        })
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "delete", name]); // it may not have been made
        }
    }
}

fn ip(words: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(words).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

const BYTES: u64 = 4 << 20;

fn start_at(cable: &Cable, end: usize, name: &str, listen: &str, shm: &ShmConfig) -> Agent {
    let mut config = config(name);
    config.listen = listen.parse().unwrap();
    config.shm = shm.clone();
    cable.at(end, || start(config).0)
}

/// An owner at one end with a region that takes writes, a reader at the other, and the reader's peer.
fn meet(cable: &Cable, listen: &str, shm: &ShmConfig) -> (Agent, Region, Agent, Peer) {
    let owner = start_at(cable, 0, "owner", listen, shm);
    let memory = Arc::new(Memory::allocate_for("remote", BYTES, Access::PeersWrite).unwrap());
    let options = RegionOptions { peer_writable: true, ..RegionOptions::default() };
    let region = owner.register(memory, options).unwrap();
    let reader = start_at(cable, 1, "reader", "127.0.0.1:0", shm);
    let peer = connect_at(cable, 1, &reader, owner.address());
    (owner, region, reader, peer)
}

fn connect_at(cable: &Cable, end: usize, agent: &Agent, address: &str) -> Peer {
    let options = ConnectOptions { deadline: PATIENCE, ..ConnectOptions::default() };
    cable.at(end, || wait(agent.connect(address, options)).unwrap())
}

#[test]
fn agents_in_two_network_namespaces_use_tcp_and_say_why_not_shared_memory() {
    let Some(cable) = Cable::lay("tcp") else { return };
    for listen in ["10.77.0.1:0", "[fd77::1]:0"] {
        let owner = start_at(&cable, 0, "owner", listen, &ShmConfig::Abstract);
        let memory = Arc::new(Memory::allocate_for("remote", BYTES, Access::PeersWrite).unwrap());
        let options = RegionOptions { peer_writable: true, ..RegionOptions::default() };
        let region = owner.register(Arc::clone(&memory), options).unwrap();
        let reader = start_at(&cable, 1, "reader", "127.0.0.1:0", &ShmConfig::Abstract);
        let peer = connect_at(&cable, 1, &reader, owner.address());
        assert_eq!(peer.transport(), TransportKind::Tcp);
        let passed_over = peer.passed_over().to_string();
        assert!(passed_over.contains("socket cannot be reached"), "{passed_over}");
        for (op, seed) in [(Op::Read, 1), (Op::Write, 2)] {
            let local = memory_of(seed);
            memory.write_from(0, &pattern(seed + 10, BYTES)).unwrap();
            let list = || blocks(1 << 16, (0..64).rev());
            let mut transfer = peer.transfer(request(op, &local, region.id(), (list(), list()))).unwrap();
            let receipt = transfer.wait(PATIENCE).unwrap().unwrap();
            assert_eq!(receipt.bytes, BYTES);
            assert!(contents(&local) == contents(&memory), "{op:?}");
        }
        let zero_copy = [owner.stats().tcp.bytes_zero_copy, reader.stats().tcp.bytes_zero_copy];
        assert!(zero_copy.iter().all(|bytes| *bytes > 0), "both ends send to another host so: {zero_copy:?}");
    }
}

fn memory_of(seed: u8) -> Arc<Memory> {
    let local = memory(BYTES);
    local.write_from(0, &pattern(seed, BYTES)).unwrap();
    local
}

#[test]
fn a_shared_folder_reaches_across_network_namespaces() {
    let Some(cable) = Cable::lay("shm") else { return };
    let folder = std::env::temp_dir().join(format!("towline-netns-{}", std::process::id()));
    let (_owner, region, _reader, peer) = meet(&cable, "10.77.0.1:0", &ShmConfig::Dir(folder.clone()));
    assert_eq!(peer.transport(), TransportKind::Shm);
    let local = memory(BYTES);
    region.memory().write_from(0, &pattern(3, BYTES)).unwrap();
    let list = || blocks(BYTES, [0]);
    let mut transfer = peer.transfer(request(Op::Read, &local, region.id(), (list(), list()))).unwrap();
    transfer.wait(PATIENCE).unwrap().unwrap();
    assert!(contents(&local) == contents(region.memory()));
    drop(peer);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_link_that_dies_stalls_its_own_transfers_and_nobody_elses() {
    let Some(cable) = Cable::lay("cut") else { return };
    let (owner, region, _reader, far) = meet(&cable, "10.77.0.1:0", &ShmConfig::Off);
    let near = start_at(&cable, 0, "near", "127.0.0.1:0", &ShmConfig::Off);
    let near = connect_at(&cable, 0, &near, owner.address());
    let list = || blocks(BYTES, [0]);
    let (held, seen) = hold();
    cable.unplug();
    let mut stalled = request(Op::Read, &memory(BYTES), region.id(), (list(), list()));
    (stalled.deadline, stalled.hold) = (Duration::from_millis(300), Some(held));
    let mut stalled = far.transfer(stalled).unwrap();
    let local = memory(BYTES);
    let mut moves = near.transfer(request(Op::Read, &local, region.id(), (list(), list()))).unwrap();
    assert_eq!(moves.wait(PATIENCE).unwrap().unwrap().bytes, BYTES);
    let error = stalled.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    eventually("what was held comes back", || seen.upgrade().is_none());
    assert!(stalled.is_drained() && !far.is_open() && near.is_open());
}
