//! Peers that connect when they are used, and what becomes of transfers that wait for it.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use towline_fabric::{Agent, ConnectError, ConnectOptions, Limits, Peer, TransferError, TransferRequest};
use towline_wire::carried_card::CarriedCard;
use towline_wire::fault::Retry;
use towline_wire::id::RegionId;
use towline_wire::receipt::{EvidenceClass, Op};

use crate::raw;
use crate::support::*;

const HOUR: Duration = Duration::from_secs(3600);

fn introduce(reader: &Agent, owner: &Agent, options: ConnectOptions) -> Peer {
    reader.introduce(&owner.seal_card(owner.card(), HOUR).unwrap(), options).unwrap()
}

/// A peer by the card of a raw owner, at an address where others listen.
fn at(reader: &Agent, address: SocketAddr, deadline: Duration) -> Peer {
    let card = raw::card();
    let carried = CarriedCard { card, address: address.to_string(), expires_unix_s: u64::MAX };
    let options = ConnectOptions { deadline, ..ConnectOptions::default() };
    reader.introduce(&carried.seal(&key()).unwrap(), options).unwrap()
}

fn within(deadline: Duration, region: RegionId) -> TransferRequest {
    let lists = (blocks(64, [0]), blocks(64, [0]));
    TransferRequest { deadline, ..request(Op::Read, &memory(64), region, lists) }
}

#[test]
fn an_introduced_peer_connects_at_its_first_transfer() {
    for kind in KINDS {
        let (owner, _) = start(config("owner"));
        let region = offer(&owner, 5, 1 << 20);
        let (reader, _) = start(config("reader"));
        let peer = introduce(&reader, &owner, only(kind));
        assert!(peer.is_open() && peer.evidence().class == EvidenceClass::None);
        assert_eq!((peer.transport(), reader.stats().peers, owner.stats().sessions), (kind, 0, 0));
        assert!(read(&peer, region.id(), 1 << 20).unwrap() == pattern(5, 1 << 20));
        assert_eq!((reader.stats().peers, peer.evidence().class), (1, EvidenceClass::LibraryExact));
        // What can be told from the card is told without connecting.
        let other = introduce(&reader, &owner, only(kind));
        let unknown = other.transfer(within(PATIENCE, RegionId(99))).unwrap_err();
        assert_eq!(unknown, TransferError::UnknownRegion { region: RegionId(99) });
        assert_eq!(reader.stats().peers, 1);
        // Ahead of the first use; many at once connect once.
        let mut ahead: Vec<_> = (0..3).map(|_| other.connect()).collect();
        let mut transfers: Vec<_> =
            (0..3).map(|_| other.transfer(within(PATIENCE, region.id())).unwrap()).collect();
        assert!(ahead.iter_mut().all(|connected| connected.wait(PATIENCE).unwrap().is_ok()));
        assert!(transfers.iter_mut().all(|transfer| transfer.wait(PATIENCE).unwrap().is_ok()));
        assert_eq!(reader.stats().peers, 2);
    }
}

#[test]
fn a_region_that_went_since_the_card_was_made_is_refused_after_the_connect() {
    for kind in KINDS {
        let (owner, _) = start(config("owner"));
        let (gone, stays) = (offer(&owner, 1, 4096), offer(&owner, 2, 4096));
        let (reader, _) = start(config("reader"));
        let peer = introduce(&reader, &owner, only(kind));
        let region = gone.id();
        drop(gone);
        assert_eq!(read(&peer, region, 64), Err(TransferError::UnknownRegion { region }));
        assert_eq!(read(&peer, stays.id(), 64).map(|bytes| bytes.len()), Ok(64));
    }
}

#[test]
fn calls_and_notifications_connect_as_well() {
    let (owner, book) = start(config("owner"));
    let (reader, _) = start(config("reader"));
    let peer = || introduce(&reader, &owner, ConnectOptions::default());
    assert_eq!(wait(peer().ping()), Ok(()));
    assert_eq!(wait(peer().release(LEASE.0, LEASE.1)), Ok(()));
    let talker = peer();
    talker.notify(b"first words".to_vec()).unwrap();
    book.wait_for(|heard| heard.notes.pop_front());
    assert!(talker.is_open());
}

#[test]
fn the_time_to_connect_counts_against_the_transfers_deadline() {
    let (reader, _) = start(config("reader"));
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = at(&reader, silent.local_addr().unwrap(), PATIENCE);
    let (hold, held) = hold();
    let started = Instant::now();
    let request = TransferRequest { hold: Some(hold), ..within(Duration::from_millis(200), raw::REGION) };
    let mut transfer = peer.transfer(request).unwrap();
    assert!(!transfer.is_done() && !transfer.is_drained() && reader.stats().transfers == 1);
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    let stalled = TransferError::Stalled { moved: 0, total: 64, deadline: Duration::from_millis(200) };
    assert_eq!(error, stalled);
    assert!(started.elapsed() < Duration::from_secs(5));
    // Nothing could touch the memory, so it is back with the answer.
    assert!(transfer.is_drained() && held.upgrade().is_none() && reader.stats().transfers == 0);
    assert!(peer.is_open(), "another attempt may succeed");
    assert_eq!(reader.stats().transfers_failed, 1);
}

#[test]
fn what_the_connect_took_is_taken_off_the_deadline_of_what_is_posted_then() {
    let (reader, _) = start(config("reader"));
    let owner = raw::owner();
    let peer = at(&reader, owner.address, PATIENCE);
    let deadline = Duration::from_millis(400);
    let mut transfer = peer.transfer(within(deadline, raw::REGION)).unwrap();
    // Its stream is served by nobody.
    let _stream = owner.data.recv_timeout(PATIENCE).unwrap();
    match transfer.wait(PATIENCE).unwrap() {
        Err(TransferError::Stalled { deadline: left, .. }) => assert!(left < deadline, "{left:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_peer_that_cannot_be_reached_is_an_error_and_may_be_tried_again() {
    let (reader, _) = start(config("reader"));
    // An address of its own, so that no other test's socket takes the port.
    let deserted = TcpListener::bind("127.0.0.80:0").unwrap().local_addr().unwrap();
    let peer = at(&reader, deserted, PATIENCE);
    for _ in 0..2 {
        let error =
            peer.transfer(within(PATIENCE, raw::REGION)).unwrap().wait(PATIENCE).unwrap().unwrap_err();
        assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
        assert!(peer.is_open() && error.retry() == Retry::Here);
    }
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow = at(&reader, silent.local_addr().unwrap(), Duration::from_millis(100));
    let error = wait(slow.connect()).unwrap_err();
    assert!(matches!(error, ConnectError::Deadline { .. }), "{error}");
    eventually("no place is lost", || reader.stats().peers == 0);
}

#[test]
fn a_restarted_agent_is_told_to_transfers_meant_for_the_one_before() {
    let listen = |address| {
        let mut config = config("owner");
        config.listen = address;
        start(config).0
    };
    let owner = listen("127.0.0.81:0".parse().unwrap());
    let (address, region) = (owner.bound(), offer(&owner, 1, 4096));
    let (reader, _) = start(config("reader"));
    let peer = introduce(&reader, &owner, ConnectOptions::default());
    let id = region.id();
    drop((region, owner));
    let again = listen(address);
    let _same_id = offer(&again, 2, 4096);
    let restarted = TransferError::PeerRestarted { agent: name("owner") };
    assert_eq!(read(&peer, id, 4096), Err(restarted.clone()));
    assert!(!peer.is_open(), "that does not change any more");
    assert_eq!(peer.transfer(within(PATIENCE, id)).unwrap_err(), restarted);
}

#[test]
fn cancelling_dropping_and_closing_give_the_memory_back_while_the_peer_connects() {
    let (reader, _) = start(config("reader"));
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = at(&reader, silent.local_addr().unwrap(), PATIENCE);
    let post = || {
        let (hold, held) = hold();
        let request = TransferRequest { hold: Some(hold), ..within(PATIENCE, raw::REGION) };
        (peer.transfer(request).unwrap(), held)
    };
    let (mut cancelled, held) = post();
    cancelled.cancel();
    assert_eq!(cancelled.try_result(), Some(Err(TransferError::Cancelled)));
    assert!(held.upgrade().is_none() && cancelled.is_drained() && cancelled.is_done());
    let (dropped, held) = post();
    drop(dropped);
    assert!(held.upgrade().is_none());
    let (mut closed, held) = post();
    let prepared = peer.prepare(within(PATIENCE, raw::REGION)).unwrap();
    let mut first = prepared.post().unwrap();
    assert_eq!(prepared.post().unwrap_err(), TransferError::Active);
    peer.close();
    for transfer in [&mut closed, &mut first] {
        let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
        assert!(matches!(error, TransferError::Closed { .. }), "{error}");
    }
    assert!(held.upgrade().is_none() && !peer.is_open());
    assert!(matches!(prepared.post().unwrap_err(), TransferError::Closed { .. }));
    assert_eq!(reader.stats().transfers, 0);
}

#[test]
fn transfers_that_wait_are_bounded_like_others() {
    let mut small = config("reader");
    small.limits = Limits { transfers: 2, ..Limits::default() };
    let (reader, _) = start(small);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = at(&reader, silent.local_addr().unwrap(), PATIENCE);
    let post = || peer.transfer(within(PATIENCE, raw::REGION));
    let waiting = [post().unwrap(), post().unwrap()];
    assert_eq!(post().unwrap_err(), TransferError::Busy { limit: 2 });
    drop(waiting);
    assert!(post().is_ok());
}
