//! What is particular to UCX; what it has in common with the others is in `conformance.rs`. Over its tcp, so no device is needed.

use std::path::PathBuf;
use std::sync::Arc;

use towline_fabric::{Agent, AgentConfig, ConnectError, RegionOptions, TransferError, UcxConfig};
use towline_wire::receipt::{Op, TransportKind};

use crate::support::*;

/// A pair over UCX, where there is one.
fn pair(bytes: u64) -> Option<Pair> {
    let case = cases().into_iter().find(|case| case.kind == TransportKind::Ucx)?;
    Some(Pair::of(case, bytes, RegionOptions::default()))
}

fn read(pair: &Pair, bytes: u64) -> Result<(), TransferError> {
    let local = memory(bytes);
    let request = pair.request(Op::Read, &local, (blocks(bytes, [0]), blocks(bytes, [0])));
    pair.peer.transfer(request)?.wait(PATIENCE).expect("an outcome in time").map(drop)
}

/// An agent whose UCX is a file that isn't there.
fn without(name: &str) -> Agent {
    let ucx = UcxConfig { library: Some(PathBuf::from("/no/libucp.so.0")), ..UcxConfig::default() };
    start(AgentConfig { ucx: Some(ucx), ..config(name) }).0
}

#[test]
fn a_library_that_is_missing_is_the_reason_on_the_side_that_misses_it() {
    let (owner, reader) = (start(config("owner")).0, without("reader"));
    let error = wait(reader.connect(owner.address(), only(TransportKind::Ucx))).unwrap_err();
    let ConnectError::NoTransport { reasons } = &error else { panic!("{error}") };
    assert!(reasons.to_string().contains("cannot open /no/libucp.so.0"), "{reasons}");
    let found = reader.transports().into_iter().find(|status| status.kind == TransportKind::Ucx).unwrap();
    assert!(found.available.unwrap_err().contains("/no/libucp.so.0"));
    // The other transports are there all the while.
    wait(reader.connect(owner.address(), only(TransportKind::Tcp))).unwrap();
}

#[test]
fn a_peer_that_does_not_come_to_offer_it_is_told_from_one_that_is_opening_it() {
    let Some(pair) = pair(4096) else { return };
    let owner = without("poor");
    let error = wait(pair.reader.connect(owner.address(), only(TransportKind::Ucx))).unwrap_err();
    let ConnectError::NoTransport { reasons } = &error else { panic!("{error}") };
    assert!(reasons.to_string().contains("the peer does not offer it"), "{reasons}");
}

#[test]
fn a_region_that_comes_later_is_read_and_one_that_went_is_not() {
    let Some(pair) = pair(4096) else { return };
    let known = pair.peer.card().revision;
    let later = memory(8192);
    later.write_from(0, &pattern(4, 8192)).unwrap();
    let region = pair.owner.register(Arc::clone(&later), RegionOptions::default()).unwrap();
    let card = wait(pair.peer.watch(known)).unwrap();
    assert!(card.regions.iter().any(|known| known.id == region.id()));
    let local = memory(8192);
    let list = || blocks(8192, [0]);
    let asked = request(Op::Read, &local, region.id(), (list(), list()));
    pair.peer.transfer(asked).unwrap().wait(PATIENCE).unwrap().unwrap();
    assert!(contents(&local) == pattern(4, 8192));
    read(&pair, 4096).unwrap();
    drop(pair.region);
    eventually("the peer knows", || pair.peer.card().regions.len() == 1);
}

#[test]
fn an_agent_that_stops_gives_back_what_it_mapped() {
    let Some(pair) = pair(1 << 20) else { return };
    read(&pair, 1 << 20).unwrap();
    let Pair { peer, region, owner, reader, .. } = pair;
    let weak = Arc::downgrade(region.memory());
    drop((peer, reader));
    drop((region, owner));
    eventually("nothing holds the memory", || weak.strong_count() == 0);
}
