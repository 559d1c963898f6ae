//! The reader is the one that dies: it runs in a process of its own, the owner is here and counts what it leaves.

use std::path::Path;
use std::sync::Arc;

use towline_fabric::{Access, Agent, Memory, Peer, Region, RegionOptions, ShmConfig, Transfer};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, TransportKind};

use super::ends::{GONE, NOT_GREETED};
use super::fault::State;
use super::pool::{BLOCK, BLOCKS, BYTES};
use super::process::{Process, orders, say, variable};
use super::scene::single;
use super::valve::{Lane, Valve, Way};
use crate::support::*;

const ADDRESS: &str = "TOWLINE_TEST_ADDRESS";
const KIND: &str = "TOWLINE_TEST_KIND";
const REGION: &str = "TOWLINE_TEST_REGION";
const POISON: u8 = 0x5a;

/// Connects, and does what it is told until it is killed.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_reads() {
    let kind = TransportKind::parse(&variable(KIND)).unwrap();
    let region = RegionId(variable(REGION).parse().unwrap());
    let (reader, _) = start(single("reader"));
    let peer = wait(reader.connect(&variable(ADDRESS), only(kind))).unwrap();
    let local = memory(BYTES);
    let post = |op, count| {
        let list = || blocks(BLOCK, 0..count);
        peer.transfer(request(op, &local, region, (list(), list()))).unwrap()
    };
    let finish = |mut transfer: Transfer| transfer.wait(PATIENCE).unwrap().unwrap();
    let mut kept = Vec::new();
    say("connected");
    for order in orders() {
        match order.as_str() {
            "read" => drop(finish(post(Op::Read, BLOCKS))),
            "post a read" => kept.push(post(Op::Read, BLOCKS)),
            "post a write" => kept.push(post(Op::Write, BLOCKS)),
            "release" => drop(peer.release(LEASE.0, LEASE.1)),
            "read on" | "write on" => {
                let op = if order == "read on" { Op::Read } else { Op::Write };
                finish(post(op, BLOCKS));
                say(&order);
                loop {
                    finish(post(op, BLOCKS));
                }
            }
            other => panic!("no such order: {other}"),
        }
        say(&order);
    }
}

/// An owner here, valves in front of it, and a reader elsewhere.
struct Stand {
    kind: TransportKind,
    owner: Agent,
    book: Arc<Book>,
    region: Region,
    control: Valve,
    socket: Valve,
    address: String,
}

impl Stand {
    fn new(kind: TransportKind, folder: &Path) -> Self {
        let mut config = config("owner");
        config.shm = ShmConfig::Dir(folder.into());
        let (owner, book) = start(config);
        let memory = Arc::new(Memory::allocate_for("remote", BYTES, Access::PeersWrite).unwrap());
        let options = RegionOptions { peer_writable: true, ..RegionOptions::default() };
        let region = owner.register(memory, options).unwrap();
        let (control, address) = Valve::tcp(owner.bound());
        let socket = Valve::unix(&folder.join(format!("{:016x}.sock", owner.boot_epoch().0)));
        Self { kind, owner, book, region, control, socket, address: address.to_string() }
    }

    fn reader(&self) -> Process {
        let variables = [
            (ADDRESS, self.address.clone()),
            (KIND, self.kind.to_string()),
            (REGION, self.region.id().to_string()),
        ];
        Process::start("faults::readers::child_reads", &variables)
    }

    fn connected(&self) -> Process {
        let reader = self.reader();
        assert_eq!(reader.answer(), "connected");
        reader
    }

    /// A reader that is in `state` and stays there.
    fn reach(&self, state: State) -> Process {
        let shm = self.kind == TransportKind::Shm;
        match state {
            State::Handshake => self.stuck(&self.control, Lane::Control),
            State::Opening => self.stuck(if shm { &self.socket } else { &self.control }, Lane::Data),
            State::Idle => self.connected(),
            State::Queued => {
                let mut reader = self.held(Way::Down, BLOCK / 2, "post a read");
                reader.tell("post a read");
                reader
            }
            State::Moving if shm => self.told("read on"),
            State::Writing if shm => self.told("write on"),
            State::Moving => self.held(Way::Down, BLOCK * 3 / 2, "post a read"),
            State::Writing => self.held(Way::Up, BLOCK * 3 / 2, "post a write"),
            State::Fencing => {
                let mut reader = self.connected();
                reader.tell("read");
                self.control.hold(Lane::Data, Way::Down, 0);
                reader.tell("post a read");
                self.control.wait_held(Lane::Data, Way::Down);
                reader
            }
            State::Completed => self.told("read"),
            State::Releasing => {
                let mut reader = self.connected();
                self.control.hold(Lane::Control, Way::Up, 0);
                reader.tell("release");
                self.control.wait_held(Lane::Control, Way::Up);
                reader
            }
            other => panic!("{other:?} is no state of a reader"),
        }
    }

    /// One whose connection of that lane isn't answered.
    fn stuck(&self, valve: &Valve, lane: Lane) -> Process {
        valve.hold(lane, Way::Down, 0);
        let reader = self.reader();
        valve.wait_held(lane, Way::Down);
        reader
    }

    /// One whose data is held after `bytes`.
    fn held(&self, way: Way, bytes: u64, order: &str) -> Process {
        let mut reader = self.connected();
        self.control.hold(Lane::Data, way, bytes);
        reader.tell(order);
        self.control.wait_held(Lane::Data, way);
        reader
    }

    /// One that has carried an order out; of those that go on and on, once.
    fn told(&self, order: &str) -> Process {
        let mut reader = self.connected();
        reader.tell(order);
        reader
    }

    /// What the owner saw of the reader's end.
    fn farewell(&self, state: State) -> &'static str {
        if state == State::Handshake {
            eventually("the handshake is given up", || self.owner.stats().handshakes_refused == 1);
            return NOT_GREETED;
        }
        self.book.wait_for(|heard| (heard.gone > 0).then_some(()));
        GONE
    }

    /// What must hold afterwards.
    fn settle(&self, state: State) {
        eventually("its places are free", || {
            let stats = self.owner.stats();
            (stats.sessions, stats.unauthenticated) == (0, 0)
        });
        eventually("the memory is let go of", || Arc::strong_count(self.region.memory()) == 1);
        let poison = vec![POISON; usize::try_from(BYTES).unwrap()];
        self.region.memory().write_from(0, &poison).unwrap();
        let (next, _) = start(config("next"));
        let peer = wait(next.connect(self.owner.address(), only(self.kind))).unwrap();
        assert!(self.read(&peer) == poison, "something was written after the writer had gone");
        drop(peer);
        let gone = if state == State::Handshake { 1 } else { 2 };
        self.book.wait_for(|heard| (heard.gone == gone).then_some(()));
    }

    fn read(&self, peer: &Peer) -> Vec<u8> {
        let local = memory(BYTES);
        let list = || blocks(BLOCK, 0..BLOCKS);
        let request = request(Op::Read, &local, self.region.id(), (list(), list()));
        peer.transfer(request).unwrap().wait(PATIENCE).unwrap().unwrap();
        contents(&local)
    }
}

/// Kills a reader in `state`; what the owner saw.
pub(super) fn play(state: State, kind: TransportKind) -> &'static str {
    let folder = tempfile::tempdir().unwrap();
    let stand = Stand::new(kind, folder.path());
    let mut reader = stand.reach(state);
    reader.kill();
    [&stand.control, &stand.socket].into_iter().for_each(Valve::resume);
    let end = stand.farewell(state);
    stand.settle(state);
    end
}
