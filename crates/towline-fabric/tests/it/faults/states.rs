//! The states of the matrix: how each is reached and held, and how what was under way ends.
//!
//! Each state is held, not hit by chance: over TCP a valve stops the bytes where the state wants it, over shared memory a
//! gate stops the reader's only copy thread. The fault happens while the state stands.

use std::sync::Arc;
use std::time::Instant;

use towline_fabric::{ConnectError, ControlError, Peer, Pending, Transfer, TransferRequest};
use towline_wire::receipt::{Op, TransportKind};

use super::ends::{self, GOOD, WRONG_BYTES};
use super::fault::State;
use super::gate::Gate;
use super::pool::{BLOCK, BYTES, Lent};
use super::reading::Reading;
use super::scene::{SEEDS, SHORT, SMALL, Scene};
use super::valve::{Lane, Valve, Way};
use crate::support::*;

/// Slices that one stream asks for at a time: so many of another transfer keep it busy.
const ASKED: u32 = 4;

/// What is under way when the fault comes.
pub(super) enum UnderWay {
    Connecting(Pending<Result<Peer, ConnectError>>),
    Idle(Peer),
    /// The data; `ahead` keeps the stream busy if there is one.
    Reading {
        peer: Peer,
        data: Reading,
        ahead: Option<Transfer>,
    },
    Writing {
        peer: Peer,
        data: Reading,
    },
    /// The data is in place; the read of the fence is under way unless it takes no time.
    Fencing {
        peer: Peer,
        lent: Arc<Lent>,
        slot: Option<Transfer>,
    },
    /// The data is in place; the notification can't leave.
    Notifying {
        peer: Peer,
        data: Reading,
    },
    Completed {
        peer: Peer,
        lent: Arc<Lent>,
    },
    Releasing {
        peer: Peer,
        call: Pending<Result<(), ControlError>>,
    },
}

impl UnderWay {
    pub(super) fn peer(&self) -> Option<&Peer> {
        match self {
            Self::Connecting(_) => None,
            Self::Idle(peer)
            | Self::Reading { peer, .. }
            | Self::Writing { peer, .. }
            | Self::Fencing { peer, .. }
            | Self::Notifying { peer, .. }
            | Self::Completed { peer, .. }
            | Self::Releasing { peer, .. } => Some(peer),
        }
    }
}

impl Scene {
    /// Brings the reader into `state` and holds it there.
    pub(super) fn reach(&mut self, state: State) -> UnderWay {
        match state {
            State::Handshake => self.get_stuck(&self.control.clone(), Lane::Control),
            State::Opening => self.get_stuck(&self.data_valve().clone(), Lane::Data),
            State::Idle => UnderWay::Idle(self.connected()),
            State::Queued => self.queue(),
            State::Moving => self.move_half(Op::Read),
            State::Writing => self.move_half(Op::Write),
            State::Fencing => {
                let peer = self.connected();
                let lent = self.arrived(&peer);
                // Over shared memory the 64 bytes are copied by the caller: the fault comes before.
                let slot = (self.kind == TransportKind::Tcp).then(|| {
                    self.control.hold(Lane::Data, Way::Up, 0);
                    let slot = self.post_fence(&peer, self.deadline).unwrap();
                    self.control.wait_held(Lane::Data, Way::Up);
                    slot
                });
                UnderWay::Fencing { peer, lent, slot }
            }
            State::Notifying => {
                let peer = self.connected();
                self.control.hold(Lane::Control, Way::Up, 0);
                let notify = Some(b"read".to_vec());
                let data = self.post(&peer, |request| TransferRequest { notify, ..request }).unwrap();
                self.control.wait_held(Lane::Control, Way::Up);
                UnderWay::Notifying { peer, data }
            }
            State::Completed => {
                let peer = self.connected();
                let lent = self.arrived(&peer);
                let slot = self.post_fence(&peer, PATIENCE).unwrap();
                assert_eq!(self.judge(slot, &lent), GOOD);
                UnderWay::Completed { peer, lent }
            }
            State::Releasing => {
                let peer = self.connected();
                self.control.hold(Lane::Control, Way::Up, 0);
                let call = peer.release(LEASE.0, LEASE.1);
                self.control.wait_held(Lane::Control, Way::Up);
                UnderWay::Releasing { peer, call }
            }
            other => panic!("{other:?} is no state of this scene"),
        }
    }

    /// A connect that isn't answered there. One that was over before it came so far, as the machine is busy with other things, is
    /// made again with more time.
    fn get_stuck(&mut self, valve: &Valve, lane: Lane) -> UnderWay {
        loop {
            valve.hold(lane, Way::Down, 0);
            let connecting = self.connect(self.deadline);
            let is_held = || valve.is_held(lane, Way::Down);
            eventually("it is stuck, or over", || is_held() || connecting.is_done());
            if is_held() {
                return UnderWay::Connecting(connecting);
            }
            valve.cut();
            self.deadline *= 2;
            assert!(self.deadline < PATIENCE, "nothing comes to the valve: {lane:?}");
        }
    }

    /// A read of which nothing has been asked for, behind something that is stuck.
    fn queue(&mut self) -> UnderWay {
        let peer = self.connected();
        let ahead = if self.kind == TransportKind::Shm {
            let gate = self.gate(&peer);
            gate.wait_reached();
            self.gate = Some(gate);
            None
        } else {
            self.control.hold(Lane::Data, Way::Down, BLOCK / 2);
            let scratch = memory(BLOCK * u64::from(ASKED));
            let list = || blocks(BLOCK, 0..ASKED);
            let ahead = peer.transfer(self.leased(&scratch, (list(), list()))).unwrap();
            self.control.wait_held(Lane::Data, Way::Down);
            Some(ahead)
        };
        let data = self.post_data(&peer, self.deadline).unwrap();
        UnderWay::Reading { peer, data, ahead }
    }

    /// A transfer with some of its slices in place, some asked for, and some not posted.
    fn move_half(&mut self, op: Op) -> UnderWay {
        let peer = self.connected();
        let post = |scene: &Self| match op {
            Op::Read => scene.post_data(&peer, scene.deadline).unwrap(),
            Op::Write => scene.post_write(&peer).unwrap(),
        };
        let data = if self.kind == TransportKind::Shm {
            let first = self.gate(&peer);
            first.wait_reached();
            let data = post(self);
            // Behind the slices of the window and before those that follow.
            let half_way = self.gate(&peer);
            first.open();
            half_way.wait_reached();
            self.gate = Some(half_way);
            data
        } else {
            let way = if op == Op::Read { Way::Down } else { Way::Up };
            self.control.hold(Lane::Data, way, BLOCK * 3 / 2);
            let data = post(self);
            self.control.wait_held(Lane::Data, way);
            data
        };
        let moved = || {
            let stats = self.reader.stats();
            let both = [stats.shm, stats.tcp];
            both.iter().map(|traffic| traffic.bytes_read + traffic.bytes_written).sum::<u64>()
        };
        eventually("some slices are in place", || moved() >= BLOCK);
        assert!(moved() < BYTES, "some are not");
        match op {
            Op::Read => UnderWay::Reading { peer, data, ahead: None },
            Op::Write => UnderWay::Writing { peer, data },
        }
    }

    /// A gate in the reader's only copy thread, behind what is queued there now.
    fn gate(&self, peer: &Peer) -> Gate {
        let local = memory(SMALL);
        let list = || blocks(SMALL, [0]);
        let post = || peer.transfer(self.leased(&local, (list(), list()))).unwrap();
        (0..1000).find_map(|_| Gate::at(post())).expect("one copy is slower than this thread")
    }

    /// How the operation ends, in the words of the table; what is left of the connection.
    pub(super) fn finish(&self, under_way: UnderWay) -> (&'static str, Option<Peer>) {
        let began = Instant::now();
        let (end, peer) = match under_way {
            UnderWay::Connecting(mut connecting) => match connecting.wait(PATIENCE).expect("an answer") {
                Ok(peer) => (self.read(&peer), Some(peer)),
                Err(error) => (ends::of_connect(&error), None),
            },
            UnderWay::Idle(peer) => (self.read(&peer), Some(peer)),
            UnderWay::Reading { peer, data, ahead } => {
                let end = self.end(&peer, data);
                if let Some(mut ahead) = ahead {
                    ahead.wait(PATIENCE).expect("what was ahead ends too").ok();
                    eventually("it drains", || ahead.is_drained());
                }
                (end, Some(peer))
            }
            UnderWay::Fencing { peer, lent, slot } => {
                let slot = slot.map_or_else(|| self.post_fence(&peer, self.deadline), Ok);
                let end = slot.map_or_else(|error| ends::of_transfer(&error), |slot| self.judge(slot, &lent));
                (end, Some(peer))
            }
            UnderWay::Writing { peer, mut data } => {
                let outcome = data.transfer.wait(PATIENCE).expect("an outcome in time");
                (outcome.map_or_else(|error| ends::of_transfer(&error), |_| GOOD), Some(peer))
            }
            UnderWay::Notifying { peer, data } => {
                let Reading { mut transfer, lent } = data;
                let outcome = transfer.wait(PATIENCE).expect("an outcome in time");
                let good = |_| if self.pool.holds(&lent, SEEDS[0]) { GOOD } else { WRONG_BYTES };
                (outcome.map_or_else(|error| ends::of_transfer(&error), good), Some(peer))
            }
            UnderWay::Completed { peer, lent } => {
                (if self.pool.holds(&lent, SEEDS[0]) { GOOD } else { WRONG_BYTES }, Some(peer))
            }
            UnderWay::Releasing { peer, call } => (ends::of_call(wait(call)), Some(peer)),
        };
        // Many deadlines, for a machine that is busy with other things.
        let bound = if self.deadline == SHORT { 20 * SHORT } else { PATIENCE };
        assert!(began.elapsed() < bound, "it took {:?}", began.elapsed());
        (end, peer)
    }
}
