//! Connecting: who answers, what is checked, which transport is taken and why.

use std::time::{Duration, Instant};

use towline_fabric::{
    Access, Agent, ConnectError, ConnectOptions, Limits, Memory, RegionOptions, RegionRole, RegisterError,
    ShmConfig, StartError,
};
use towline_wire::auth::ClusterKey;
use towline_wire::card::Fingerprint;
use towline_wire::contract::{Contract, OnViolation, Requirement};
use towline_wire::fault::{Fault, Retry};
use towline_wire::id::BootEpoch;
use towline_wire::receipt::{Op, TransportKind};

use crate::support::*;

#[test]
fn auto_takes_shared_memory_and_falls_back_with_the_reason() {
    let (owner, _) = start(config("owner"));
    let (near, _) = start(config("near"));
    let peer = wait(near.connect(owner.address(), ConnectOptions::default())).unwrap();
    assert_eq!(peer.transport(), TransportKind::Shm);
    assert!(peer.passed_over().0.is_empty());

    let mut blind = config("blind");
    blind.shm = ShmConfig::Off;
    let (blind, _) = start(blind);
    let peer = wait(blind.connect(owner.address(), ConnectOptions::default())).unwrap();
    assert_eq!(peer.transport(), TransportKind::Tcp);
    assert!(peer.passed_over().to_string().contains("turned off"), "{}", peer.passed_over());
    let refused = wait(blind.connect(owner.address(), only(TransportKind::Shm))).unwrap_err();
    assert!(
        matches!(&refused, ConnectError::NoTransport { reasons } if reasons.to_string().contains("turned off"))
    );
    let missing = wait(near.connect(owner.address(), only(TransportKind::Libfabric))).unwrap_err();
    assert!(missing.to_string().contains("this build does not have it"), "{missing}");
}

#[test]
fn a_socket_that_cannot_be_reached_is_the_reason_not_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let mut there = config("owner");
    there.shm = ShmConfig::Dir(dir.path().join("sockets"));
    let (owner, _) = start(there);
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), ConnectOptions::default())).unwrap();
    assert_eq!(peer.transport(), TransportKind::Shm, "a path reaches as well as a name");
    // As if the directory were not mounted here.
    for entry in std::fs::read_dir(dir.path().join("sockets")).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let peer = wait(reader.connect(owner.address(), ConnectOptions::default())).unwrap();
    assert_eq!(peer.transport(), TransportKind::Tcp);
    assert!(peer.passed_over().to_string().contains("cannot be reached"), "{}", peer.passed_over());
}

#[test]
fn a_contract_refuses_or_alarms() {
    let (owner, _) = start(config("owner"));
    let (reader, _) = start(config("reader"));
    let contract = |require, on_violation| Contract { require, on_violation, ..Contract::default() };
    let rdma =
        ConnectOptions { contract: contract(Requirement::Rdma, OnViolation::Refuse), ..Default::default() };
    let error = wait(reader.connect(owner.address(), rdma)).unwrap_err();
    assert!(
        matches!(&error, ConnectError::ContractViolation(v) if v.to_string().contains("the path is shm")),
        "{error}"
    );
    assert_eq!((error.fault(), error.retry()), (Fault::Caller, Retry::Elsewhere));
    let alarm =
        ConnectOptions { contract: contract(Requirement::Rdma, OnViolation::Alarm), ..Default::default() };
    let peer = wait(reader.connect(owner.address(), alarm)).unwrap();
    assert!(peer.violation().is_some() && peer.is_open());
    let same_host = contract(Requirement::SameHost, OnViolation::Refuse);
    let tcp = ConnectOptions { contract: same_host, ..only(TransportKind::Tcp) };
    assert!(matches!(wait(reader.connect(owner.address(), tcp)), Err(ConnectError::ContractViolation(_))));
    eventually("refused paths leave nothing", || reader.stats().peers == 1);
}

#[test]
fn another_agent_incarnation_or_model_is_told_apart() {
    let (owner, _) = start(config("owner"));
    let (reader, _) = start(config("reader"));
    let ask = |options| wait(reader.connect(owner.address(), options)).map(drop);
    let with = ConnectOptions::default;
    let right = ConnectOptions {
        agent: Some(name("owner")),
        boot_epoch: Some(owner.boot_epoch()),
        fingerprint: Some(owner.card().fingerprint),
        ..with()
    };
    ask(right.clone()).unwrap();
    let wrong = ConnectOptions { agent: Some(name("other")), ..with() };
    assert!(matches!(ask(wrong), Err(ConnectError::WrongAgent { .. })));
    let old = ConnectOptions { boot_epoch: Some(BootEpoch(1)), ..right.clone() };
    assert!(matches!(ask(old), Err(ConnectError::PeerRestarted { .. })));
    let rope = Fingerprint { rope: "base=500000".into(), ..owner.card().fingerprint };
    let model = ConnectOptions { fingerprint: Some(rope), ..right };
    assert!(matches!(ask(model), Err(ConnectError::Incompatible(at)) if at.field == "rope"));
}

#[test]
fn a_restarted_peer_on_the_same_port_is_never_read_as_the_old_one() {
    for kind in KINDS {
        // An address of its own, so that no other test's socket takes the port between the two lives.
        let mut first = config("owner");
        first.listen = "127.0.0.77:0".parse().unwrap();
        let (owner, _) = start(first);
        let address = owner.bound();
        let old = owner.boot_epoch();
        let region = owner.register(memory(4096), RegionOptions::default()).unwrap();
        let id = region.id();
        let (reader, _) = start(config("reader"));
        let peer = wait(reader.connect(owner.address(), only(kind))).unwrap();
        drop((region, owner));
        eventually("the loss is noticed", || !peer.is_open());
        let mut again = config("owner");
        again.listen = address;
        let (owner, _) = start(again);
        let _region = owner.register(memory(4096), RegionOptions::default()).unwrap();
        let read = peer.transfer(request(Op::Read, &memory(64), id, (blocks(16, [0]), blocks(16, [0]))));
        assert!(matches!(read.unwrap_err(), towline_fabric::TransferError::Unreachable { .. }));
        let options = ConnectOptions { boot_epoch: Some(old), ..only(kind) };
        let error = wait(reader.connect(owner.address(), options)).unwrap_err();
        assert!(matches!(error, ConnectError::PeerRestarted { found, .. } if found == owner.boot_epoch()));
    }
}

#[test]
fn another_cluster_learns_nothing_and_the_agent_goes_on() {
    let (owner, _) = start(config("owner"));
    let mut stranger = config("stranger");
    stranger.key = ClusterKey::from_bytes([8; 32]);
    let (stranger, _) = start(stranger);
    let error = wait(stranger.connect(owner.address(), ConnectOptions::default())).unwrap_err();
    assert!(matches!(error, ConnectError::Auth { .. }), "{error}");
    eventually("the attempt is counted", || owner.stats().handshakes_refused == 1);
    let (reader, _) = start(config("reader"));
    assert!(wait(reader.connect(owner.address(), ConnectOptions::default())).is_ok());
}

#[test]
fn nobody_and_a_silent_listener_are_typed_errors_in_time() {
    let (reader, _) = start(config("reader"));
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap();
    let options = ConnectOptions { deadline: Duration::from_millis(200), ..Default::default() };
    let started = Instant::now();
    let error = wait(reader.connect(&at.to_string(), options.clone())).unwrap_err();
    assert!(matches!(error, ConnectError::Deadline { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
    // An address of its own, so that no other test's socket takes the port.
    let deserted = std::net::TcpListener::bind("127.0.0.78:0").unwrap().local_addr().unwrap();
    let error = wait(reader.connect(&deserted.to_string(), ConnectOptions::default())).unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    let error = wait(reader.connect("no port", ConnectOptions::default())).unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    eventually("no place is lost", || reader.stats().peers == 0);
}

#[test]
fn names_are_resolved_and_bounds_hold() {
    let mut small = config("reader");
    small.limits = Limits { peers: 1, ..Limits::default() };
    let (reader, _) = start(small);
    let (owner, _) = start(config("owner"));
    let by_name = format!("localhost:{}", owner.bound().port());
    let peer = wait(reader.connect(&by_name, ConnectOptions::default())).unwrap();
    let error = wait(reader.connect(&by_name, ConnectOptions::default())).unwrap_err();
    assert!(matches!(error, ConnectError::Closed { .. }), "{error}");
    drop(peer);
    assert!(wait(reader.connect(&by_name, ConnectOptions::default())).is_ok());
}

#[test]
fn cards_name_roles_and_control_calls_are_answered() {
    let (owner, book) = start(config("owner"));
    let register = |role| owner.register(memory(4096), RegionOptions { role, ..Default::default() }).unwrap();
    let (kv, fence) = (register(RegionRole::Kv), register(RegionRole::Fence));
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), ConnectOptions::default())).unwrap();
    assert_eq!((peer.card().kv_region, peer.card().fence_region), (Some(kv.id()), Some(fence.id())));
    assert_eq!(wait(peer.release(LEASE.0, LEASE.1)), Ok(()));
    let refused = wait(peer.release(LEASE.0, towline_wire::id::Generation(1))).unwrap_err();
    assert!(refused.to_string().contains("lease-over"), "{refused}");
    peer.heartbeat(&[LEASE.0]).unwrap();
    peer.notify(b"hello".to_vec()).unwrap();
    assert_eq!(wait(peer.ping()), Ok(()));
    book.wait_for(|heard| (heard.heartbeats == [LEASE.0] && heard.released == [LEASE.0]).then_some(()));
    book.wait_for(|heard| heard.notes.pop_front());
    assert!(peer.notify(vec![0; 1 << 20]).is_err());
    drop(peer);
    book.wait_for(|heard| (heard.gone == 1).then_some(()));
}

#[test]
fn two_agents_of_one_process_and_many_peers_do_not_disturb_each_other() {
    let (owner, _) = start(config("owner"));
    let region = owner.register(memory(1 << 20), RegionOptions::default()).unwrap();
    region.memory().write_from(0, &pattern(2, 1 << 20)).unwrap();
    let readers: Vec<_> = (0..12).map(|index| start(config(&format!("reader-{index}"))).0).collect();
    let connect = |(reader, kind): (&Agent, &TransportKind)| {
        wait(reader.connect(owner.address(), only(*kind))).unwrap()
    };
    let peers: Vec<_> = readers.iter().zip(KINDS.iter().cycle()).map(connect).collect();
    let locals: Vec<_> = peers.iter().map(|_| memory(1 << 20)).collect();
    let list = || blocks(1 << 20, [0]);
    let transfers: Vec<_> = peers
        .iter()
        .zip(&locals)
        .map(|(peer, local)| peer.transfer(request(Op::Read, local, region.id(), (list(), list()))).unwrap())
        .collect();
    for (mut transfer, local) in transfers.into_iter().zip(&locals) {
        transfer.wait(PATIENCE).unwrap().unwrap();
        assert!(contents(local) == pattern(2, 1 << 20));
    }
    // An agent connects to itself as well.
    let own = wait(owner.connect(owner.address(), ConnectOptions::default())).unwrap();
    let local = memory(1 << 20);
    let mut transfer = own.transfer(request(Op::Read, &local, region.id(), (list(), list()))).unwrap();
    transfer.wait(PATIENCE).unwrap().unwrap();
}

#[test]
fn an_agent_without_transports_does_not_start_and_says_why() {
    let mut mute = config("mute");
    (mute.shm, mute.tcp) = (ShmConfig::Off, false);
    let error = Agent::start(mute, std::sync::Arc::new(Book::default())).unwrap_err().to_string();
    assert!(error.contains("shm: turned off") && error.contains("tcp: turned off"), "{error}");
    let mut crowded = config("crowded");
    let (owner, _) = start(config("owner"));
    crowded.listen = owner.bound();
    let error = Agent::start(crowded, std::sync::Arc::new(Book::default())).unwrap_err();
    assert!(matches!(error, StartError::Listen { .. }), "{error}");
    let mut deep = config("deep");
    deep.shm = ShmConfig::Dir(format!("/tmp/{}", "x".repeat(120)).into());
    let (deep, _) = start(deep);
    let statuses = deep.transports();
    let works: Vec<_> = statuses.iter().map(|status| (status.kind, status.available.is_ok())).collect();
    let expected = [(TransportKind::Shm, false), (TransportKind::Ucx, false), (TransportKind::Tcp, true)];
    assert_eq!(works, expected, "{statuses:?}");
    std::fs::remove_dir(format!("/tmp/{}", "x".repeat(120))).ok();
}

#[test]
fn memory_that_cannot_be_a_region_is_refused() {
    let (owner, _) = start(config("owner"));
    let writable = RegionOptions { peer_writable: true, ..RegionOptions::default() };
    assert!(matches!(owner.register(memory(64), writable), Err(RegisterError::Sealed)));
    let theirs =
        Memory::map_peer(memory(64).fd().unwrap().try_clone_to_owned().unwrap(), 64, Access::PeersRead)
            .unwrap();
    let theirs = owner.register(std::sync::Arc::new(theirs), RegionOptions::default());
    assert!(matches!(theirs, Err(RegisterError::Peers)));
    let shared = memory(64);
    let regions: Vec<_> =
        (0..256).map(|_| owner.register(shared.clone(), RegionOptions::default()).unwrap()).collect();
    assert!(matches!(
        owner.register(shared.clone(), RegionOptions::default()),
        Err(RegisterError::TooMany { .. })
    ));
    // The fullest card passes, and so do all the files.
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Shm))).unwrap();
    let last = regions.last().unwrap().id();
    let read = request(Op::Read, &memory(64), last, (blocks(64, [0]), blocks(64, [0])));
    peer.transfer(read).unwrap().wait(PATIENCE).unwrap().unwrap();
}

#[test]
fn agents_meet_over_ipv6() {
    if let Err(error) = std::net::TcpListener::bind("[::1]:0") {
        return crate::skips::note("agents over IPv6", &error.to_string());
    }
    let mut owner = config("owner");
    owner.listen = "[::1]:0".parse().unwrap();
    let (owner, _) = start(owner);
    assert!(owner.address().starts_with("[::1]:"), "{}", owner.address());
    let remote = memory(1 << 20);
    remote.write_from(0, &pattern(3, 1 << 20)).unwrap();
    let region = owner.register(remote, RegionOptions::default()).unwrap();
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Tcp))).unwrap();
    let local = memory(1 << 20);
    let list = || blocks(1 << 12, (0..256).rev());
    let mut transfer = peer.transfer(request(Op::Read, &local, region.id(), (list(), list()))).unwrap();
    let receipt = transfer.wait(PATIENCE).unwrap().unwrap();
    assert!(contents(&local) == pattern(3, 1 << 20));
    assert!(receipt.rails[0].name.contains("[::1]"), "{:?}", receipt.rails);
}
