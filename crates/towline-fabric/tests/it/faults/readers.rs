//! The reader is the one that dies, stands still or falls silent: it runs in a process of its own, the owner is here, goes on
//! without it, and counts what it leaves.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use rustix::process::Signal;
use towline_fabric::{
    Access, Agent, Memory, Region, RegionOptions, ShmConfig, Transfer, TransferError, TransferRequest,
};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, TransportKind};

use super::ends::{self, CONNECT_UNREACHABLE, EXPIRED, GONE, GOOD, NOT_GREETED, UNREACHABLE};
use super::fault::{Fault, State};
use super::owner::Lender;
use super::pool::{BLOCK, BLOCKS, BYTES, poison};
use super::process::{Process, orders, say, variable};
use super::scene::single;
use super::valve::{Lane, Valve, Way};
use crate::support::*;

const ADDRESS: &str = "TOWLINE_TEST_ADDRESS";
const KIND: &str = "TOWLINE_TEST_KIND";
const REGION: &str = "TOWLINE_TEST_REGION";

/// Connects, and does what it is told until it is killed.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_reads() {
    let kind = TransportKind::parse(&variable(KIND)).unwrap();
    let region = RegionId(variable(REGION).parse().unwrap());
    let (reader, _) = start(single("reader"));
    let peer = match wait(reader.connect(&variable(ADDRESS), only(kind))) {
        Ok(peer) => peer,
        Err(error) => return say(ends::of_connect(&error)),
    };
    let local = memory(BYTES);
    let post = |op| {
        let list = || blocks(BLOCK, 0..BLOCKS);
        peer.transfer(TransferRequest { lease: Some(LEASE), ..request(op, &local, region, (list(), list())) })
    };
    let finish = |mut transfer: Transfer| transfer.wait(PATIENCE).expect("an outcome in time").map(drop);
    let mut kept = Vec::new();
    say("connected");
    for order in orders() {
        match order.as_str() {
            "read" => finish(post(Op::Read).unwrap()).unwrap(),
            "post a read" => kept.push(post(Op::Read).unwrap()),
            "post a write" => kept.push(post(Op::Write).unwrap()),
            "finish" => {
                let end = finish(kept.remove(0));
                say(end.map_or_else(|error| ends::of_transfer(&error), |()| GOOD));
                continue;
            }
            "release" => drop(peer.release(LEASE.0, LEASE.1)),
            "read on" | "write on" => {
                let op = if order == "read on" { Op::Read } else { Op::Write };
                let again = || -> Result<(), TransferError> { finish(post(op)?) };
                again().unwrap();
                say(&order);
                while again().is_ok() {}
                continue;
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
    lender: Arc<Lender>,
    region: Region,
    control: Valve,
    socket: Valve,
    address: String,
}

impl Stand {
    fn new(kind: TransportKind, folder: &Path) -> Self {
        let mut config = config("owner");
        config.shm = ShmConfig::Dir(folder.into());
        let lender = Arc::new(Lender::default());
        let owner = Agent::start(config, Arc::<Lender>::clone(&lender)).unwrap();
        let memory = Arc::new(Memory::allocate_for("remote", BYTES, Access::PeersWrite).unwrap());
        let options = RegionOptions { peer_writable: true, leased: true, ..RegionOptions::default() };
        let region = owner.register(memory, options).unwrap();
        let (control, address) = Valve::tcp(owner.bound());
        let socket = Valve::unix(&folder.join(format!("{:016x}.sock", owner.boot_epoch().0)));
        Self { kind, owner, lender, region, control, socket, address: address.to_string() }
    }

    fn valves(&self) -> impl Iterator<Item = &Valve> {
        [&self.control, &self.socket].into_iter()
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
    fn reach(&self, fault: Fault, state: State) -> Process {
        let shm = self.kind == TransportKind::Shm;
        // A reader that falls silent has begun to prove itself: what is held is its proof, not the answer to its hello.
        let stuck = if fault == Fault::ReaderSilent { Way::Up } else { Way::Down };
        match state {
            State::Handshake => self.stuck(&self.control, (Lane::Control, stuck)),
            State::Opening => self.stuck(if shm { &self.socket } else { &self.control }, (Lane::Data, stuck)),
            State::Idle => self.connected(),
            State::Queued => self.held(Way::Down, BLOCK / 2, "post a read"),
            State::Moving if shm => self.told("read on"),
            State::Writing if shm => self.told("write on"),
            State::Moving => self.held(Way::Down, BLOCK * 3 / 2, "post a read"),
            State::Writing => self.held(Way::Up, BLOCK * 3 / 2, "post a write"),
            State::Fencing => {
                let mut reader = self.told("read");
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

    /// One whose connection gets stuck there.
    fn stuck(&self, valve: &Valve, (lane, way): (Lane, Way)) -> Process {
        valve.hold(lane, way, 0);
        let reader = self.reader();
        valve.wait_held(lane, way);
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

    /// No sign of life comes from the reader any more.
    fn lose(&self, reader: &Process, (fault, state): (Fault, State)) {
        match fault {
            Fault::ReaderStopped => {
                reader.signal(Signal::STOP);
                self.valves().for_each(Valve::resume);
            }
            Fault::ReaderSilent => {
                self.valves().for_each(Valve::silence);
                if state == State::Idle {
                    eventually("keep-alive will ask", || is_keepalive_armed(self.owner.bound()));
                }
            }
            other => panic!("{other:?} leaves no reader to be heard again"),
        }
    }

    /// What the owner does while the reader gives no sign of life, and whether it was told of anything.
    fn go_on(&self, state: State) -> &'static str {
        let end = match state {
            State::Handshake | State::Opening => {
                self.wait_given_up();
                NOT_GREETED
            }
            _ => GOOD,
        };
        self.lender.expire();
        // What a peer may write is its own until its session has ended.
        let reused = state != State::Writing;
        if reused {
            self.region.memory().write_from(0, &poison(BYTES)).unwrap();
        }
        let found = self.serve_another();
        assert!(!reused || found == poison(BYTES), "another reader finds what the owner wrote");
        let keeps_sessions = state != State::Handshake;
        eventually("the other one's places are free", || (self.owner.stats().sessions > 0) == keeps_sessions);
        assert_eq!(self.lender.gone(), 1, "the other one has gone, and nobody else");
        end
    }

    /// Another reader comes, reads under the lease of now, and goes.
    fn serve_another(&self) -> Vec<u8> {
        let gone = self.lender.gone();
        let (other, _) = start(config("other"));
        let peer = wait(other.connect(self.owner.address(), only(self.kind))).unwrap();
        let local = memory(BYTES);
        let list = || blocks(BLOCK, 0..BLOCKS);
        let read = request(Op::Read, &local, self.region.id(), (list(), list()));
        let read = TransferRequest { lease: Some(self.lender.lease()), ..read };
        peer.transfer(read).unwrap().wait(PATIENCE).unwrap().unwrap();
        drop(peer);
        eventually("it has gone", || self.lender.gone() == gone + 1);
        contents(&local)
    }

    /// The reader goes on, or its connections come to their end.
    fn hear_again(&self, reader: &mut Process, (fault, state): (Fault, State)) {
        let stopped = fault == Fault::ReaderStopped;
        if stopped {
            reader.signal(Signal::CONT);
        } else {
            self.valves().for_each(Valve::cut);
        }
        match state {
            State::Handshake | State::Opening => assert_eq!(reader.answer(), CONNECT_UNREACHABLE),
            // Over shared memory it reads or writes on and on, and nobody judges that.
            State::Moving | State::Writing if self.kind == TransportKind::Shm => {}
            State::Queued | State::Moving | State::Writing | State::Fencing => {
                reader.order("finish");
                assert_eq!(reader.answer(), if stopped { EXPIRED } else { UNREACHABLE });
            }
            State::Releasing if stopped => eventually("the release is heard", || self.lender.releases() == 1),
            State::Releasing => assert_eq!(self.lender.releases(), 0, "it was lost"),
            _ => {}
        }
    }

    /// What the owner saw of the reader's end.
    fn farewell(&self, (fault, state): (Fault, State)) -> &'static str {
        if state == State::Handshake {
            self.wait_given_up();
            return NOT_GREETED;
        }
        let others = usize::from(fault != Fault::ReaderKilled);
        eventually("it has gone", || self.lender.gone() == others + 1);
        GONE
    }

    fn wait_given_up(&self) {
        eventually("the handshake is given up", || self.owner.stats().handshakes_refused == 1);
    }

    /// What must hold once the reader is no more.
    fn settle(&self) {
        eventually("its places are free", || {
            let stats = self.owner.stats();
            (stats.sessions, stats.unauthenticated) == (0, 0)
        });
        eventually("the memory is let go of", || Arc::strong_count(self.region.memory()) == 1);
        self.region.memory().write_from(0, &poison(BYTES)).unwrap();
        assert!(self.serve_another() == poison(BYTES), "something was written after the writer had gone");
    }
}

/// Whether the kernel will ask, within 30 s, if those that are connected to `owner` are there: what `/proc/net/tcp` says of the
/// timers (`tr`, and `when` in hundredths of a second) of its established sockets.
fn is_keepalive_armed(owner: SocketAddr) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let port = format!(":{:04X}", owner.port());
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let ours: Vec<_> = lines.filter(|words| words[1].ends_with(&port) && words[3] == "01").collect();
    let asks = |timer: &str| {
        let when = timer.strip_prefix("02:").and_then(|when| u64::from_str_radix(when, 16).ok());
        when.is_some_and(|when| when <= 30 * 100)
    };
    !ours.is_empty() && ours.iter().all(|words| asks(words[5]))
}

/// Inflicts `fault` on a reader in `state`; what the owner saw.
pub(super) fn play((fault, state): (Fault, State), kind: TransportKind) -> &'static str {
    let folder = tempfile::tempdir().unwrap();
    let stand = Stand::new(kind, folder.path());
    let mut reader = stand.reach(fault, state);
    let end = if fault == Fault::ReaderKilled {
        reader.kill();
        stand.valves().for_each(Valve::resume);
        None
    } else {
        stand.lose(&reader, (fault, state));
        let end = stand.go_on(state);
        stand.hear_again(&mut reader, (fault, state));
        reader.kill();
        Some(end)
    };
    let farewell = stand.farewell((fault, state));
    stand.settle();
    end.unwrap_or(farewell)
}
