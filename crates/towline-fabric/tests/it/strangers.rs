//! What anybody may send to the port, with and without the key, and what comes of it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use towline_fabric::{Agent, ConnectOptions, Limits, RegionOptions};
use towline_wire::auth::{Client, Purpose};
use towline_wire::blocks::Extent;
use towline_wire::frame::{FrameKind, Request, Status};
use towline_wire::id::RegionId;

use crate::raw::{self, Raw};
use crate::support::*;

fn alive(owner: &Agent) {
    let (reader, _) = start(config("reader"));
    wait(reader.connect(owner.address(), ConnectOptions::default())).unwrap();
}

/// Sends bytes, then reads to the end.
fn answer_to(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn garbage_is_answered_with_silence_and_the_agent_lives() {
    let (owner, _) = start(config("owner"));
    for garbage in
        [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\nxxxxxxxxxxxxxxxxxxxx"[..], &pattern(9, 100_000), b"TWLN", b""]
    {
        assert!(answer_to(owner.bound(), garbage).is_empty());
    }
    // A Hello that is right gets its challenge, and a wrong proof nothing more.
    let (_, hello) = Client::start(key(), Purpose::Control, [1; 32]);
    let wrong = [&hello[..], &[0; 42], b"x"].concat();
    assert_eq!(answer_to(owner.bound(), &wrong).len(), 64);
    eventually("all are counted", || owner.stats().handshakes_refused == 5);
    alive(&owner);
}

#[test]
fn silent_connections_are_bounded_and_gone_after_two_seconds() {
    let mut small = config("owner");
    small.limits = Limits { unauthenticated: 4, ..Limits::default() };
    let (owner, _) = start(small);
    let started = Instant::now();
    let silent: Vec<_> = (0..4).map(|_| TcpStream::connect(owner.bound()).unwrap()).collect();
    eventually("they are seen", || owner.stats().unauthenticated == 4);
    let mut one_more = TcpStream::connect(owner.bound()).unwrap();
    one_more.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(one_more.read(&mut [0]).unwrap_or(0), 0, "closed at once");
    eventually("they are gone", || owner.stats().unauthenticated == 0);
    assert!(started.elapsed() >= Duration::from_secs(2));
    drop(silent);
    alive(&owner);
}

fn piece(call: u64, region: RegionId, (offset, len): (u64, u64)) -> Request {
    Request { call, region, lease: None, extents: vec![Extent { offset, len }] }
}

#[test]
fn an_authenticated_peer_gets_what_the_owner_allows_and_no_more() {
    let (owner, _) = start(config("owner"));
    let region = owner.register(memory(4096), RegionOptions::default()).unwrap();
    region.memory().write_from(0, &pattern(4, 4096)).unwrap();
    let mut peer = Raw::dial(owner.bound(), Purpose::Data);
    let id = region.id();
    let mut read = |call, id, range| peer.ask(FrameKind::Read, &piece(call, id, range), &[]);
    assert_eq!(read(1, id, (4000, 97)).0, Status::OutOfRange);
    assert_eq!(read(2, id, (u64::MAX - 50, 50)).0, Status::OutOfRange);
    assert_eq!(read(3, RegionId(1000), (0, 16)).0, Status::UnknownRegion);
    assert_eq!(read(4, id, (4000, 96)), (Status::Ok, pattern(4, 4096)[4000..].to_vec()));
    // A refused write's bytes are skipped, and the stream goes on.
    let big = vec![9; 1 << 20];
    let write = piece(5, id, (0, big.len() as u64));
    assert_eq!(peer.ask(FrameKind::Write, &write, &big).0, Status::NotWritable);
    assert_eq!(peer.ask(FrameKind::Read, &piece(6, id, (0, 8)), &[]), (Status::Ok, pattern(4, 8)));
    assert_eq!(owner.stats().requests_refused, 4);
    assert!(contents(region.memory()) == pattern(4, 4096));
}

#[test]
fn broken_protocol_closes_the_session_and_nothing_else() {
    let (owner, _) = start(config("owner"));
    let region = owner.register(memory(4096), RegionOptions::default()).unwrap();
    let request = piece(1, region.id(), (0, 16)).encode().unwrap();

    let mut tampered = Raw::dial(owner.bound(), Purpose::Data);
    let mut frame = tampered.seal(FrameKind::Read, &request);
    *frame.last_mut().unwrap() ^= 1;
    tampered.stream.write_all(&frame).unwrap();
    assert!(tampered.receive().is_none());

    let mut replayed = Raw::dial(owner.bound(), Purpose::Data);
    let frame = replayed.seal(FrameKind::Read, &request);
    replayed.stream.write_all(&frame).unwrap();
    assert!(replayed.receive().is_some());
    let mut payload = [0; 16];
    replayed.stream.read_exact(&mut payload).unwrap();
    replayed.stream.write_all(&frame).unwrap();
    assert!(replayed.receive().is_none());

    let mut confused = Raw::dial(owner.bound(), Purpose::Control);
    confused.send(FrameKind::Read, &request);
    assert!(confused.receive().is_none(), "data on a control session");

    let mut answering = Raw::dial(owner.bound(), Purpose::Control);
    answering.send(FrameKind::Control, &raw::stray_answer());
    assert!(answering.receive().is_none(), "an answer to nothing");

    eventually("each is counted", || owner.stats().protocol_errors == 4);
    eventually("their places are free", || owner.stats().sessions == 0);
    alive(&owner);
}

#[test]
fn a_peer_that_does_not_read_is_not_served_without_bound() {
    let (owner, _) = start(config("owner"));
    let region = owner.register(memory(2 << 20), RegionOptions::default()).unwrap();
    let mut greedy = Raw::dial(owner.bound(), Purpose::Data);
    greedy.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut asked = 0;
    // 4 KiB of extents a request, so that the sockets fill; 64 MiB of requests would be 128 GiB of answers.
    let extents = vec![Extent { offset: 0, len: 8192 }; 256];
    while asked < 16_384 {
        let request = Request { call: asked, region: region.id(), lease: None, extents: extents.clone() };
        let frame = greedy.seal(FrameKind::Read, &request.encode().unwrap());
        if greedy.stream.write_all(&frame).is_err() {
            break;
        }
        asked += 1;
    }
    assert!(asked < 16_384, "the owner stopped reading");
    // Others are served meanwhile.
    alive(&owner);
}
