//! Peers that nobody uses: their path goes, then their session, and both come back when needed; and held leases.

use std::time::Duration;

use towline_fabric::{Agent, ConnectOptions, Limits, Peer, TransferError};
use towline_wire::id::LeaseId;
use towline_wire::receipt::TransportKind;

use crate::support::*;

const SHORT: Duration = Duration::from_millis(30);

fn reader_with(limits: Limits) -> Agent {
    let mut config = config("reader");
    config.limits = limits;
    start(config).0
}

fn connect(reader: &Agent, owner: &Agent, kind: TransportKind) -> Peer {
    wait(reader.connect(owner.address(), only(kind))).unwrap()
}

#[test]
fn an_idle_peer_closes_its_path_and_keeps_hearing_news() {
    for kind in KINDS {
        let (owner, _) = start(config("owner"));
        let region = offer(&owner, 1, 1 << 20);
        let reader =
            reader_with(Limits { path_idle: SHORT, session_idle: Duration::MAX, ..Limits::default() });
        let peer = connect(&reader, &owner, kind);
        let prepared_on = region.id();
        assert!(read(&peer, prepared_on, 1 << 20).unwrap() == pattern(1, 1 << 20));
        eventually("the path goes", || reader.stats().paths_rested >= 1 && owner.stats().sessions == 1);
        assert!(peer.is_open() && reader.stats().peers == 1);
        let later = offer(&owner, 2, 4096);
        news(&peer, |card| card.region(later.id()).is_some());
        assert_eq!(read(&peer, later.id(), 4096), Ok(pattern(2, 4096)));
        assert_eq!((peer.transport(), peer.totals().transfers, reader.stats().sessions_rested), (kind, 2, 0));
        eventually("it goes again", || reader.stats().paths_rested >= 2 && owner.stats().sessions == 1);
        assert_eq!(wait(peer.ping()), Ok(()));
    }
}

#[test]
fn a_peer_idle_for_longer_closes_its_session_and_connects_again_when_used() {
    for kind in KINDS {
        let (owner, book) = start(config("owner"));
        let region = offer(&owner, 1, 4096);
        let reader = reader_with(Limits { path_idle: SHORT, session_idle: SHORT, ..Limits::default() });
        let peer = connect(&reader, &owner, kind);
        read(&peer, region.id(), 4096).unwrap();
        eventually("the session goes", || reader.stats().sessions_rested == 1 && reader.stats().peers == 0);
        book.wait_for(|heard| (heard.gone == 1).then_some(()));
        eventually("the owner keeps nothing of it", || owner.stats().sessions == 0);
        assert!(peer.is_open());
        let later = offer(&owner, 3, 4096);
        assert_eq!(read(&peer, region.id(), 4096), Ok(pattern(1, 4096)));
        assert_eq!((peer.transport(), peer.totals().transfers), (kind, 2), "the pair's book goes on");
        assert!(peer.card().region(later.id()).is_some(), "what came meanwhile is known");
    }
}

#[test]
fn an_agent_restarted_while_the_session_rests_is_told_apart() {
    let listen = |address| {
        let mut config = config("owner");
        config.listen = address;
        start(config).0
    };
    let owner = listen("127.0.0.82:0".parse().unwrap());
    let (address, region) = (owner.bound(), offer(&owner, 1, 4096));
    let reader = reader_with(Limits { path_idle: SHORT, session_idle: SHORT, ..Limits::default() });
    let peer = connect(&reader, &owner, TransportKind::Tcp);
    eventually("the session goes", || reader.stats().sessions_rested == 1);
    let id = region.id();
    drop((region, owner));
    let again = listen(address);
    let _same_id = offer(&again, 2, 4096);
    assert_eq!(read(&peer, id, 4096), Err(TransferError::PeerRestarted { agent: name("owner") }));
    assert!(!peer.is_open());
}

#[test]
fn a_peer_lost_while_its_path_rests_is_down_and_says_so() {
    let (owner, _) = start(config("owner"));
    let region = offer(&owner, 1, 4096);
    let reader = reader_with(Limits { path_idle: SHORT, session_idle: Duration::MAX, ..Limits::default() });
    let peer = connect(&reader, &owner, TransportKind::Tcp);
    eventually("the path goes", || reader.stats().paths_rested == 1);
    let id = region.id();
    drop((region, owner));
    eventually("the loss is noticed", || !peer.is_open());
    assert!(wait(peer.connect()).is_err(), "what was lost stays down");
    assert!(matches!(read(&peer, id, 4096), Err(TransferError::Unreachable { .. })));
}

#[test]
fn who_waits_for_news_keeps_the_session() {
    let (owner, _) = start(config("owner"));
    let reader = reader_with(Limits { path_idle: SHORT, session_idle: SHORT, ..Limits::default() });
    let peer = connect(&reader, &owner, TransportKind::Tcp);
    let mut news = peer.watch(peer.card().revision);
    eventually("the path goes", || reader.stats().paths_rested == 1);
    // Several times as long as an idle session is kept.
    pause(SHORT * 5);
    assert_eq!(reader.stats().sessions_rested, 0);
    let region = offer(&owner, 1, 4096);
    assert!(news.wait(PATIENCE).unwrap().unwrap().region(region.id()).is_some());
    eventually("then it goes", || reader.stats().sessions_rested == 1);
}

#[test]
fn leases_held_of_a_peer_are_told_in_one_message_and_keep_it_connected() {
    let (owner, book) = start(config("owner"));
    let limits = Limits { path_idle: SHORT, session_idle: SHORT, heartbeat: SHORT, ..Limits::default() };
    let reader = reader_with(limits);
    let peer = wait(reader.connect(owner.address(), ConnectOptions::default())).unwrap();
    let held: Vec<_> = [7, 8, 9].map(|lease| peer.hold(LeaseId(lease)).unwrap()).into();
    let twice = peer.hold(LeaseId(9)).unwrap();
    let all = [LeaseId(7), LeaseId(8), LeaseId(9)];
    let together = |beat: &&Vec<LeaseId>| ***beat == all;
    let beats = book
        .wait_for(|heard| (heard.beats.iter().filter(together).count() >= 5).then(|| heard.beats.clone()));
    let taken = beats.iter().position(|beat| *beat == all).unwrap();
    assert!(beats[taken..].iter().all(|beat| *beat == all), "each once, all in one message: {beats:?}");
    let stats = reader.stats();
    assert!(stats.heartbeats >= 5 && stats.paths_rested == 0, "{stats:?}");
    drop((held, twice));
    eventually("nothing keeps it any more", || reader.stats().sessions_rested == 1);
    let told = reader.stats().heartbeats;
    pause(SHORT * 3);
    assert_eq!(reader.stats().heartbeats, told, "and nobody is told about leases that are not held");
}
