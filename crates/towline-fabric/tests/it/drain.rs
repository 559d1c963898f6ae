//! How transfers end that do not end well: what the caller hears, when the memory is let go of, what may still land.

use std::io::Write;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use towline_fabric::{
    Agent, ConnectOptions, Memory, Peer, RegionOptions, Transfer, TransferError, TransferRequest,
};
use towline_wire::frame::FrameKind;
use towline_wire::receipt::{Op, TransportKind};

use crate::raw::{self, REGION, Raw, RawOwner};
use crate::support::*;

const BYTES: u64 = 1 << 20;

/// A reader with a read under way at an owner played by hand.
struct Scene {
    transfer: Transfer,
    data: Raw,
    local: Arc<Memory>,
    held: Weak<()>,
    peer: Peer,
    owner: RawOwner,
    reader: Agent,
}

fn scene(op: Op, bytes: u64, deadline: Duration) -> Scene {
    let owner = raw::owner();
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(&owner.address.to_string(), ConnectOptions::default())).unwrap();
    let local = memory(bytes);
    let (hold, held) = hold();
    let blocks = (blocks(bytes, [0]), blocks(bytes, [0]));
    let request = TransferRequest { hold: Some(hold), deadline, ..request(op, &local, REGION, blocks) };
    let transfer = peer.transfer(request).unwrap();
    let data = owner.data.recv_timeout(PATIENCE).unwrap();
    Scene { transfer, data, local, held, peer, owner, reader }
}

fn filled(byte: u8) -> Vec<u8> {
    vec![byte; usize::try_from(BYTES).unwrap()]
}

/// Starts the reply to the read and gives the call's number.
fn half_reply(data: &mut Raw) {
    let call = data.receive_request().call;
    data.reply(FrameKind::ReadReply, call, BYTES);
    data.stream.write_all(&filled(0xaa)[..1000]).unwrap();
}

#[test]
fn a_cancelled_read_is_held_until_its_last_byte_came_and_nothing_lands_later() {
    let scene = scene(Op::Read, BYTES, PATIENCE);
    let Scene { mut transfer, mut data, local, held, peer, .. } = scene;
    half_reply(&mut data);
    transfer.cancel();
    assert_eq!(transfer.wait(Duration::ZERO).unwrap().unwrap_err(), TransferError::Cancelled);
    assert!(held.upgrade().is_some() && !transfer.is_drained(), "bytes may still land");
    data.stream.write_all(&filled(0xaa)[1000..]).unwrap();
    eventually("it drains", || transfer.is_drained());
    assert!(held.upgrade().is_none());
    local.write_from(0, &filled(1)).unwrap();
    // Bytes that nobody asked for end the session and land nowhere.
    data.stream.write_all(&filled(0xbb)).ok();
    eventually("the session is closed", || !peer.is_open());
    assert!(contents(&local) == filled(1));
}

#[test]
fn a_dropped_read_is_held_until_its_last_byte_came() {
    let scene = scene(Op::Read, BYTES, PATIENCE);
    let Scene { transfer, mut data, held, peer, .. } = scene;
    half_reply(&mut data);
    drop(transfer);
    assert!(held.upgrade().is_some(), "bytes may still land");
    data.stream.write_all(&filled(0xaa)[1000..]).unwrap();
    eventually("it drains", || held.upgrade().is_none());
    assert!(peer.is_open(), "a healthy path survives a cancel");
}

#[test]
fn a_stalled_read_fails_at_its_deadline_and_its_path_is_closed_after_the_grace() {
    let started = Instant::now();
    let scene = scene(Op::Read, BYTES, Duration::from_millis(200));
    let Scene { mut transfer, mut data, local, held, peer, .. } = scene;
    half_reply(&mut data);
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Stalled { total: BYTES, .. }), "{error}");
    assert!(started.elapsed() >= Duration::from_millis(200));
    assert!(held.upgrade().is_some() && peer.is_open());
    eventually("the path is closed by force", || held.upgrade().is_none());
    assert!(started.elapsed() >= Duration::from_millis(1200), "the grace is 1 s");
    assert!(!peer.is_open());
    local.write_from(0, &filled(1)).unwrap();
    data.stream.write_all(&filled(0xaa)[1000..]).ok();
    assert!(data.receive().is_none(), "the socket is closed");
    assert!(contents(&local) == filled(1), "late bytes land nowhere");
}

#[test]
fn a_lost_connection_fails_its_transfers_at_once() {
    let scene = scene(Op::Read, BYTES, PATIENCE);
    let Scene { mut transfer, mut data, held, peer, .. } = scene;
    half_reply(&mut data);
    drop(data);
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
    eventually("it drains", || held.upgrade().is_none());
    assert!(!peer.is_open());
}

#[test]
fn a_lost_control_session_takes_the_path_along() {
    let scene = scene(Op::Read, BYTES, PATIENCE);
    let Scene { mut transfer, data, held, owner, .. } = scene;
    let control = owner.control.recv_timeout(PATIENCE).unwrap();
    control.shutdown(std::net::Shutdown::Both).unwrap();
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
    eventually("it drains", || held.upgrade().is_none());
    drop(data);
}

#[test]
fn a_tampered_reply_closes_the_session() {
    let scene = scene(Op::Read, BYTES, PATIENCE);
    let Scene { mut transfer, mut data, local, peer, .. } = scene;
    let call = data.receive_request().call;
    let reply = towline_wire::frame::Reply { call, status: towline_wire::frame::Status::Ok, len: BYTES };
    let mut frame = data.seal(FrameKind::ReadReply, &reply.encode());
    *frame.last_mut().unwrap() ^= 1;
    data.stream.write_all(&frame).unwrap();
    data.stream.write_all(&filled(0xaa)).ok();
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(error.to_string().contains("seal"), "{error}");
    assert!(!peer.is_open());
    assert!(contents(&local) == filled(0));
}

#[test]
fn a_reply_to_a_write_that_was_not_read_is_a_lie() {
    let scene = scene(Op::Write, 64 << 20, PATIENCE);
    let Scene { mut transfer, mut data, held, peer, .. } = scene;
    for call in 1..=8 {
        // It may have hung up by then.
        let reply =
            towline_wire::frame::Reply { call, status: towline_wire::frame::Status::Ok, len: 2 << 20 };
        let frame = data.seal(FrameKind::WriteReply, &reply.encode());
        data.stream.write_all(&frame).ok();
    }
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(error.to_string().contains("before its bytes were sent"), "{error}");
    eventually("it drains", || held.upgrade().is_none());
    assert!(!peer.is_open());
}

#[test]
fn closing_the_peer_or_stopping_the_agent_ends_transfers_as_closed() {
    for stop in [false, true] {
        let Scene { mut transfer, data, held, peer, reader, owner: _owner, local: _ } =
            scene(Op::Read, BYTES, PATIENCE);
        if stop {
            drop(reader)
        } else {
            peer.close()
        }
        let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
        assert!(matches!(error, TransferError::Closed { .. }), "{error}");
        eventually("it drains", || held.upgrade().is_none());
        let more = request(Op::Read, &memory(16), REGION, (blocks(16, [0]), blocks(16, [0])));
        assert!(matches!(peer.transfer(more), Err(TransferError::Closed { .. })));
        drop(data);
    }
}

#[test]
fn a_dropped_copy_over_shared_memory_drains_and_nothing_lands_later() {
    let bytes = 128 << 20;
    let pair = Pair::over(TransportKind::Shm, bytes, RegionOptions::default());
    pair.region.memory().write_from(bytes - 1, &[1]).unwrap();
    for _ in 0..5 {
        let local = memory(bytes);
        let (hold, held) = hold();
        let mut request = pair.request(Op::Read, &local, (blocks(bytes, [0]), blocks(bytes, [0])));
        request.hold = Some(hold);
        drop(pair.peer.transfer(request).unwrap());
        eventually("it drains", || held.upgrade().is_none());
        let ones = vec![9; usize::try_from(bytes).unwrap()];
        local.write_from(0, &ones).unwrap();
        pause(Duration::from_millis(20));
        assert!(contents(&local) == ones, "a late write landed");
    }
    assert!(pair.peer.is_open());
    assert!(pair.reader.stats().transfers_failed > 0, "they were cancelled in the middle");
}

#[test]
fn a_deadline_ends_a_copy_over_shared_memory() {
    let bytes = 256 << 20;
    let pair = Pair::over(TransportKind::Shm, bytes, RegionOptions::default());
    let local = memory(bytes);
    let mut request = pair.request(Op::Read, &local, (blocks(bytes, [0]), blocks(bytes, [0])));
    request.deadline = Duration::from_millis(1);
    // On a busy machine a copy may outrun the thread that watches the clock, but not every time.
    let stalled = (0..20).any(|_| {
        let mut transfer = pair.peer.transfer(request.clone()).unwrap();
        let outcome = transfer.wait(PATIENCE).unwrap();
        eventually("it drains", || transfer.is_drained());
        matches!(outcome, Err(TransferError::Stalled { .. }))
    });
    assert!(stalled);
}

#[test]
fn a_prepared_transfer_is_active_until_it_has_drained() {
    let owner = raw::owner();
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(&owner.address.to_string(), ConnectOptions::default())).unwrap();
    let list = || blocks(BYTES, [0]);
    let prepared = peer.prepare(request(Op::Read, &memory(BYTES), REGION, (list(), list()))).unwrap();
    let first = prepared.post().unwrap();
    let mut data = owner.data.recv_timeout(PATIENCE).unwrap();
    assert_eq!(prepared.post().unwrap_err(), TransferError::Active);
    half_reply(&mut data);
    first.cancel();
    assert_eq!(prepared.post().unwrap_err(), TransferError::Active, "bytes may still land");
    data.stream.write_all(&filled(0xaa)[1000..]).unwrap();
    eventually("it drains", || first.is_drained());
    let mut second = prepared.post().unwrap();
    half_reply(&mut data);
    data.stream.write_all(&filled(0xaa)[1000..]).unwrap();
    assert_eq!(second.wait(PATIENCE).unwrap().unwrap().bytes, BYTES);
}

#[test]
fn a_panicking_owner_stops_its_agent_and_nobody_waits_for_ever() {
    struct Panics {
        again: bool,
    }
    impl towline_fabric::Owner for Panics {
        fn admit(
            &self,
            _: towline_wire::id::RegionId,
            _: towline_fabric::transport::Lease,
            _: &[towline_wire::blocks::Extent],
        ) -> Result<(), towline_wire::frame::Status> {
            panic!("on purpose")
        }
        fn handle_release(
            &self,
            _: &towline_wire::auth::Identity,
            _: towline_wire::id::LeaseId,
            _: towline_wire::id::Generation,
        ) -> Result<(), towline_wire::lease::LeaseError> {
            Ok(())
        }
        fn handle_heartbeat(&self, _: &towline_wire::auth::Identity, _: &[towline_wire::id::LeaseId]) {}
        fn handle_notify(&self, _: &towline_wire::auth::Identity, _: Vec<u8>) {}
        fn handle_peer_gone(&self, _: &towline_wire::auth::Identity) {
            assert!(!self.again, "again on purpose");
        }
    }
    // The owner's threads take data streams in turn: the panic comes on each of them once.
    for (others, again) in [(0, false), (1, false), (0, true), (1, true)] {
        let owner = Agent::start(config("owner"), Arc::new(Panics { again })).unwrap();
        let region = owner.register(memory(4096), RegionOptions::default()).unwrap();
        let (reader, _) = start(config("reader"));
        let connect = || wait(reader.connect(owner.address(), only(TransportKind::Tcp))).unwrap();
        let others: Vec<Peer> = (0..others).map(|_| connect()).collect();
        let peer = connect();
        let read = || request(Op::Read, &memory(4096), region.id(), (blocks(4096, [0]), blocks(4096, [0])));
        let error = peer.transfer(read()).unwrap().wait(PATIENCE).unwrap().unwrap_err();
        assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
        let late = wait(owner.connect(reader.address(), ConnectOptions::default())).unwrap_err();
        assert!(matches!(late, towline_fabric::ConnectError::Closed { .. }), "{late}");
        eventually("the others are down too", || others.iter().all(|other| !other.is_open()));
    }
}
