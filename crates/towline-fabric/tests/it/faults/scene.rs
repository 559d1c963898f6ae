//! One owner in a process of its own, a reader here, the valves between them, and a second owner that has nothing to do
//! with any of it: what a fault of the matrix is played on.
//!
//! ```text
//!   reach a state ──> inflict the fault ──> how the operation ends ──> what must hold afterwards
//! ```
//! The states are in [`states`](super::states), the reads in [`reading`](super::reading).

use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use towline_fabric::{
    Agent, AgentConfig, ConnectError, ConnectOptions, Memory, Peer, Pending, Region, RegionOptions,
};
use towline_wire::fence::SLOT_BYTES;
use towline_wire::receipt::{Op, TransportKind};

use super::ends::{EXPIRED, GOOD, UNKNOWN_REGION};
use super::fault::{Fault, State};
use super::gate::Gate;
use super::owner::Lending;
use super::pool::{BYTES, Pool};
use super::states::UnderWay;
use super::valve::{Upstream, Valve};
use crate::support::*;

/// The deadline of operations that are expected to run into it: fifty times what reaching the state takes.
pub(super) const SHORT: Duration = Duration::from_millis(500);
/// Bytes of small transfers; the smallest that is handed to a copy thread has more than 64 KiB.
pub(super) const SMALL: u64 = 128 << 10;
/// Seeds of what the owner lends, before and after it was started anew.
pub(super) const SEEDS: [u64; 2] = [1, 2];

/// See the head of this file.
pub(super) struct Scene {
    pub(super) kind: TransportKind,
    pub(super) owner: Lending,
    pub(super) control: Valve,
    pub(super) socket: Valve,
    /// Where the reader dials the owner.
    pub(super) address: String,
    pub(super) reader: Agent,
    pub(super) pool: Pool,
    pub(super) landing: Arc<Memory>,
    pub(super) gate: Option<Gate>,
    /// Time for what the fault should hit.
    pub(super) deadline: Duration,
    pub(super) other: Other,
    pub(super) folder: TempDir,
}

/// An owner that no fault touches.
pub(super) struct Other {
    agent: Agent,
    region: Region,
}

/// A reader whose states can be held: one copy thread, one stream.
pub(super) fn single(name: &str) -> AgentConfig {
    AgentConfig { copy_threads: 1, tcp_streams: 1, ..config(name) }
}

impl Other {
    pub(super) fn new() -> Self {
        let (agent, _) = start(config("other"));
        let region = agent.register(memory(SMALL), RegionOptions::default()).unwrap();
        region.memory().write_from(0, &pattern(7, SMALL)).unwrap();
        Self { agent, region }
    }

    /// `reader` connects to it and reads.
    pub(super) fn serves(&self, reader: &Agent, kind: TransportKind) {
        let peer = wait(reader.connect(self.agent.address(), only(kind))).unwrap();
        let local = memory(SMALL);
        let list = || blocks(SMALL, [0]);
        let request = request(Op::Read, &local, self.region.id(), (list(), list()));
        peer.transfer(request).unwrap().wait(PATIENCE).unwrap().unwrap();
        assert!(contents(&local) == pattern(7, SMALL), "the reader works with others as before");
    }
}

impl Scene {
    /// For `state`; `runs_out` says that the operation is expected to run into its deadline.
    pub(super) fn new(kind: TransportKind, state: State, runs_out: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // An inbox of that size takes time to make, and is needed by few.
        let inbox_bytes = if state == State::Writing { BYTES } else { SLOT_BYTES };
        let owner = Lending::start(folder.path(), SEEDS[0], inbox_bytes);
        let (control, address) = Valve::tcp(owner.address);
        let socket = Valve::unix(&owner.socket);
        let (reader, _) = start(single("reader"));
        let deadline = if runs_out { SHORT } else { PATIENCE };
        Self {
            kind,
            owner,
            control,
            socket,
            address: address.to_string(),
            reader,
            pool: Pool::new(),
            landing: memory(SLOT_BYTES),
            gate: None,
            deadline,
            other: Other::new(),
            folder,
        }
    }

    /// Does the fault, and lets go of what held the state.
    pub(super) fn inflict(&mut self, fault: Fault, under_way: &UnderWay) {
        let hold_on = matches!(fault, Fault::Silent | Fault::Cut);
        match fault {
            Fault::OwnerKilled => self.owner.process.kill(),
            Fault::OwnerStopped => self.owner.stop(),
            Fault::Restarted => {
                self.owner.process.kill();
                self.owner = Lending::start(self.folder.path(), SEEDS[1], SLOT_BYTES);
                self.control.point_at(Upstream::Tcp(self.owner.address));
                self.socket.point_at(Upstream::Unix(self.owner.socket.clone()));
            }
            Fault::LeaseExpired => self.owner.process.tell("expire"),
            Fault::Deregistered => {
                let is_write = matches!(under_way, UnderWay::Writing { .. });
                self.owner.process.tell(if is_write { "deregister the inbox" } else { "deregister" });
            }
            Fault::Cut => self.valves().for_each(Valve::cut),
            Fault::Silent => self.valves().for_each(Valve::silence),
            other => panic!("{other:?} is no fault of this scene"),
        }
        if !hold_on {
            self.valves().for_each(Valve::resume);
        }
        let lost = matches!(fault, Fault::OwnerKilled | Fault::Restarted | Fault::Cut);
        if let Some(peer) = under_way.peer().filter(|_| lost) {
            eventually("the loss is noticed", || !peer.is_open());
        }
        self.gate = None;
    }

    /// What must hold whatever happened: the pool is whole, nothing lands in it any more, and the reader works on.
    pub(super) fn settle(mut self, (fault, state): (Fault, State), (end, peer): (&str, Option<Peer>)) {
        eventually("every block is back", || self.pool.is_whole());
        // At once: were the blocks back too early, what is still under way would now land in the poison.
        self.pool.poison();
        // Late bytes get their chance.
        if fault == Fault::OwnerStopped {
            self.owner.go_on();
        }
        self.valves().for_each(Valve::resume);
        if let Some(peer) = peer.as_ref().filter(|peer| peer.is_open()) {
            // Answers come in order: behind this one nothing is left.
            let slot = self.post_fence(peer, PATIENCE).unwrap().wait(PATIENCE).unwrap();
            assert!(slot.is_ok() || !peer.is_open(), "{slot:?}");
        }
        drop(peer);
        match state {
            State::Notifying => self.check_notification(fault),
            State::Writing if end == GOOD => self.owner.process.tell("find the write"),
            _ => {}
        }
        if fault != Fault::OwnerKilled {
            self.owner.process.tell("settle");
        }
        let inbox = state == State::Writing && !matches!(fault, Fault::OwnerKilled | Fault::Restarted);
        if inbox {
            if matches!(end, EXPIRED | UNKNOWN_REGION) && self.kind == TransportKind::Tcp {
                self.owner.process.tell("find what was admitted");
            }
            self.owner.process.tell("poison the inbox");
        }
        assert!(self.pool.is_poisoned(), "something was written into memory that had been given back");
        self.other.serves(&self.reader, self.kind);
        if inbox {
            self.owner.process.tell("find the poison");
        }
        if fault == Fault::Restarted {
            self.meets_the_new_owner();
        }
        eventually("every place is free", || {
            let stats = self.reader.stats();
            (stats.peers, stats.transfers) == (0, 0)
        });
    }

    /// A notification arrives if the connection lived, and never at another incarnation.
    fn check_notification(&mut self, fault: Fault) {
        match fault {
            Fault::OwnerKilled | Fault::Cut => {}
            Fault::Restarted => self.owner.process.tell("hear nothing"),
            _ => self.owner.process.tell("hear one notification"),
        }
    }

    /// The new incarnation is told apart, and read as what it is.
    fn meets_the_new_owner(&self) {
        let peer = wait(self.reader.connect(&self.address, only(self.kind))).unwrap();
        assert_eq!(peer.card().boot_epoch, self.owner.epoch);
        let lent = self.arrived(&peer);
        assert!(self.pool.holds(&lent, self.owner.seed), "the new owner's bytes");
    }

    fn valves(&self) -> impl Iterator<Item = &Valve> {
        [&self.control, &self.socket].into_iter()
    }

    /// What data goes through, while the path opens.
    pub(super) fn data_valve(&self) -> &Valve {
        if self.kind == TransportKind::Shm { &self.socket } else { &self.control }
    }

    /// To the owner whose ticket this is.
    pub(super) fn connect(&self, deadline: Duration) -> Pending<Result<Peer, ConnectError>> {
        let boot_epoch = Some(self.owner.epoch);
        self.reader.connect(&self.address, ConnectOptions { boot_epoch, deadline, ..only(self.kind) })
    }

    pub(super) fn connected(&self) -> Peer {
        let peer = wait(self.connect(PATIENCE)).unwrap();
        assert_eq!(peer.transport(), self.kind);
        peer
    }
}
