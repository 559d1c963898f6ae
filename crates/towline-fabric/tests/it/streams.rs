//! Several TCP streams of one path: who carries what, and what happens when one breaks or never opens.

use std::io::Write;
use std::sync::Arc;

use towline_fabric::{AgentConfig, ConnectOptions, Limits, RegionOptions, TransferError};
use towline_wire::frame::FrameKind;
use towline_wire::receipt::{Op, TransportKind};

use crate::raw::{self, REGION, Raw};
use crate::support::*;

const SLICE: u64 = 2 << 20;

#[test]
fn streams_share_a_large_transfer_and_the_receipt_tells_which_carried_what() {
    const BYTES: u64 = 32 << 20;
    let options = RegionOptions { peer_writable: true, ..RegionOptions::default() };
    let pair = Pair::over(TransportKind::Tcp, BYTES, options);
    let remote = Arc::clone(pair.region.memory());
    remote.write_from(0, &pattern(1, BYTES)).unwrap();
    for op in [Op::Read, Op::Write] {
        let local = memory(BYTES);
        local.write_from(0, &pattern(2, BYTES)).unwrap();
        // The second stream is dialled by the first large transfer and may come too late for it.
        eventually("two streams carry", || {
            let list = || blocks(BYTES, [0]);
            let mut transfer = pair.peer.transfer(pair.request(op, &local, (list(), list()))).unwrap();
            let receipt = transfer.wait(PATIENCE).unwrap().unwrap();
            assert_eq!(receipt.rails.iter().map(|rail| rail.bytes).sum::<u64>(), BYTES);
            receipt.rails.len() == 2 && receipt.rails[0].name != receipt.rails[1].name
        });
        assert!(contents(&local) == contents(&remote));
    }
    assert_eq!(pair.owner.stats().sessions, 3, "one for control, two for data");
}

#[test]
fn small_transfers_keep_to_one_stream() {
    let pair = Pair::over(TransportKind::Tcp, SLICE, RegionOptions::default());
    let local = memory(SLICE);
    for _ in 0..20 {
        let list = || blocks(SLICE, [0]);
        let mut transfer = pair.peer.transfer(pair.request(Op::Read, &local, (list(), list()))).unwrap();
        assert_eq!(transfer.wait(PATIENCE).unwrap().unwrap().rails.len(), 1);
    }
    assert_eq!(pair.owner.stats().sessions, 2, "one for control, one for data");
    let estimate = pair.peer.estimate(SLICE).expect("twenty transfers tell how long one takes");
    assert!(!estimate.is_zero() && estimate < PATIENCE, "{estimate:?}");
}

/// Answers `count` reads with zeros.
fn serve(data: &mut Raw, count: usize) {
    for _ in 0..count {
        let request = data.receive_request();
        let len = request.payload_bytes();
        data.reply(FrameKind::ReadReply, request.call, len);
        data.stream.write_all(&vec![0; usize::try_from(len).unwrap()]).unwrap();
    }
}

#[test]
fn a_stream_that_breaks_fails_the_transfer_and_closes_the_other() {
    let owner = raw::owner();
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(&owner.address.to_string(), ConnectOptions::default())).unwrap();
    let local = memory(16 * SLICE);
    let (held, seen) = hold();
    let list = || blocks(SLICE, 0..16);
    let mut request = request(Op::Read, &local, REGION, (list(), list()));
    request.hold = Some(held);
    let mut transfer = peer.transfer(request).unwrap();
    let mut first = owner.data.recv_timeout(PATIENCE).unwrap();
    serve(&mut first, 4); // makes the window move, so that the second stream has something to take
    let mut second = owner.data.recv_timeout(PATIENCE).unwrap();
    second.receive_request();
    drop(second);
    let outcome = transfer.wait(PATIENCE).unwrap();
    assert!(matches!(outcome, Err(TransferError::Unreachable { .. })), "{outcome:?}");
    eventually("the memory is let go of", || seen.upgrade().is_none());
    assert!(!peer.is_open());
    while first.receive().is_some() {} // what was asked before, and then the end
}

#[test]
fn a_stream_that_does_not_open_is_done_without() {
    let limits = Limits { sessions: 2, ..Limits::default() }; // control and one stream
    let (owner, _) = start(AgentConfig { limits, ..config("owner") });
    let region = owner.register(memory(8 * SLICE), RegionOptions::default()).unwrap();
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Tcp))).unwrap();
    let local = memory(8 * SLICE);
    for _ in 0..3 {
        let list = || blocks(SLICE, 0..8);
        let mut transfer = peer.transfer(request(Op::Read, &local, region.id(), (list(), list()))).unwrap();
        let receipt = transfer.wait(PATIENCE).unwrap().unwrap();
        assert_eq!((receipt.rails.len(), receipt.bytes), (1, 8 * SLICE));
    }
    eventually("the second stream was refused", || owner.stats().handshakes_refused == 1);
    assert!(peer.is_open() && owner.stats().sessions == 2);
}
