//! A peer's view follows its owner's card: regions that come, regions that go, and who is told.

use std::fs::read_to_string;
use std::sync::Arc;

use towline_fabric::{Access, ControlError, Memory, RegionOptions, ShmConfig, TransferError};
use towline_wire::card::RegionCard;
use towline_wire::id::{BootEpoch, RegionId};
use towline_wire::receipt::{Op, TransportKind};

use crate::raw;
use crate::support::*;

#[test]
fn a_region_registered_after_the_connect_is_seen_and_can_be_used() {
    for kind in KINDS {
        let pair = Pair::over(kind, 4096, RegionOptions::default());
        let known = pair.peer.card().revision;
        let mut told = pair.peer.watch(known);
        let later = offer(&pair.owner, 7, 1 << 20);
        let writable = RegionOptions { peer_writable: true, ..RegionOptions::default() };
        let open = Arc::new(Memory::allocate_for("open", 4096, Access::PeersWrite).unwrap());
        let open = pair.owner.register(open, writable).unwrap();
        let card = told.wait(PATIENCE).unwrap().unwrap();
        assert!(card.revision > known && card.region(later.id()).is_some());
        news(&pair.peer, |card| card.region(open.id()).is_some());
        assert!(read(&pair.peer, later.id(), 1 << 20).unwrap() == pattern(7, 1 << 20));
        read(&pair.peer, pair.region.id(), 4096).unwrap();
        let from = memory(4096);
        from.write_from(0, &pattern(8, 4096)).unwrap();
        let write = request(Op::Write, &from, open.id(), (blocks(4096, [0]), blocks(4096, [0])));
        pair.peer.transfer(write).unwrap().wait(PATIENCE).unwrap().unwrap();
        assert!(contents(open.memory()) == pattern(8, 4096));
    }
}

#[test]
fn a_deregistered_region_is_refused_at_the_post_and_the_rest_goes_on() {
    for kind in KINDS {
        let pair = Pair::over(kind, 4096, RegionOptions::default());
        let name = format!("goner-{kind}");
        let goner = Arc::new(Memory::allocate(&name, 1 << 20).unwrap());
        let goner = pair.owner.register(goner, RegionOptions::default()).unwrap();
        // Connected with both, so that over shm one path has mapped both.
        let peer = wait(pair.reader.connect(pair.owner.address(), only(kind))).unwrap();
        let id = goner.id();
        read(&peer, id, 4096).unwrap();
        let local = memory(64);
        let lists = || (blocks(64, [0]), blocks(64, [0]));
        let prepared = peer.prepare(request(Op::Read, &local, id, lists())).unwrap();
        let mut told = peer.watch(peer.card().revision);
        drop(goner);
        assert!(told.wait(PATIENCE).unwrap().unwrap().region(id).is_none());
        let refused = TransferError::UnknownRegion { region: id };
        assert_eq!(peer.transfer(request(Op::Read, &local, id, lists())).unwrap_err(), refused);
        assert_eq!(prepared.post().unwrap_err(), refused);
        assert_eq!(read(&peer, pair.region.id(), 4096), Ok(vec![0; 4096]));
        drop(pair.peer);
        // The owner wanted its memory back: nobody keeps it mapped.
        let mapped = || read_to_string("/proc/self/maps").unwrap().contains(&format!("/memfd:{name}"));
        eventually("the region's memory is given back", || !mapped());
    }
}

#[test]
fn a_peer_without_regions_gets_its_first_one() {
    for kind in KINDS {
        let (owner, _) = start(config("owner"));
        let (reader, _) = start(config("reader"));
        let peer = wait(reader.connect(owner.address(), only(kind))).unwrap();
        assert!(peer.card().regions.is_empty());
        let first = offer(&owner, 3, 4096);
        news(&peer, |card| card.region(first.id()).is_some());
        assert_eq!(read(&peer, first.id(), 4096), Ok(pattern(3, 4096)));
        assert_eq!((peer.transport(), peer.totals().transfers), (kind, 1));
    }
}

#[test]
fn a_new_region_that_cannot_be_mapped_is_named_and_tried_again_with_the_next_change() {
    let dir = tempfile::tempdir().unwrap();
    let (sockets, away) = (dir.path().join("sockets"), dir.path().join("away"));
    let mut there = config("owner");
    there.shm = ShmConfig::Dir(sockets.clone());
    let (owner, _) = start(there);
    let first = offer(&owner, 1, 4096);
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Shm))).unwrap();
    // As if the directory were unmounted, for a while.
    std::fs::rename(&sockets, &away).unwrap();
    let second = offer(&owner, 2, 4096);
    news(&peer, |card| card.region(second.id()).is_some());
    let error = read(&peer, second.id(), 4096).unwrap_err();
    let named = format!("region {} cannot be reached", second.id());
    assert!(
        matches!(&error, TransferError::Unreachable { reason, .. } if reason.contains(&named)),
        "{error}"
    );
    assert_eq!(read(&peer, first.id(), 4096), Ok(pattern(1, 4096)), "what was mapped stays");
    std::fs::rename(&away, &sockets).unwrap();
    let third = offer(&owner, 3, 4096);
    news(&peer, |card| card.region(third.id()).is_some());
    for (seed, region) in [(1, &first), (2, &second), (3, &third)] {
        assert_eq!(read(&peer, region.id(), 4096), Ok(pattern(seed, 4096)));
    }
}

#[test]
fn of_many_changes_the_last_state_arrives_and_can_be_used() {
    for kind in KINDS {
        let pair = Pair::over(kind, 4096, RegionOptions::default());
        let mut kept = Vec::new();
        for seed in 0..60 {
            let region = offer(&pair.owner, seed, 4096);
            // Two of three go again, some before the peer has heard of them.
            if seed % 3 == 0 {
                kept.push((seed, region));
            }
        }
        let last = pair.owner.card();
        let card = news(&pair.peer, |card| card.revision == last.revision);
        assert_eq!(*card, last);
        for (seed, region) in &kept {
            assert_eq!(read(&pair.peer, region.id(), 4096), Ok(pattern(*seed, 4096)));
        }
    }
}

/// An owner sends each state of its card once, to whoever asks first: a ping or the news.
#[test]
fn a_newer_card_that_answers_a_ping_is_news_as_well() {
    let mut later = raw::card();
    later.revision = 8;
    let owner = raw::owner_with_news(Vec::new(), later);
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(&owner.address.to_string(), only(TransportKind::Tcp))).unwrap();
    assert_eq!(peer.card().revision, 1);
    assert_eq!(wait(peer.ping()), Ok(()));
    assert_eq!(peer.card().revision, 8);
}

#[test]
fn who_waits_for_news_is_told_when_none_will_come() {
    let pair = Pair::over(TransportKind::Tcp, 4096, RegionOptions::default());
    let mut news = pair.peer.watch(pair.peer.card().revision);
    assert!(news.try_take().is_none());
    pair.peer.close();
    assert!(matches!(news.wait(PATIENCE), Some(Err(ControlError::Unreachable { .. }))));
    let after = wait(pair.peer.watch(u64::MAX));
    assert!(matches!(after, Err(ControlError::Unreachable { .. })));
}

#[test]
fn old_news_is_passed_over_and_news_of_another_agent_ends_the_session() {
    let region = |id| RegionCard { id: RegionId(id), ..raw::card().regions[0].clone() };
    let news_of = |revision, ids: &[u32]| {
        let mut card = raw::card();
        (card.revision, card.regions) = (revision, ids.iter().copied().map(region).collect());
        card
    };
    let calm = [news_of(5, &[1, 2]), news_of(4, &[1]), news_of(5, &[1])];
    let calm = raw::owner_with_news(calm.iter().map(|card| card.to_wire()).collect(), raw::card());
    let (reader, _) = start(config("reader"));
    let tcp = || only(TransportKind::Tcp);
    let peer = wait(reader.connect(&calm.address.to_string(), tcp())).unwrap();
    assert_eq!(news(&peer, |card| card.revision == 5).regions.len(), 2);
    assert_eq!(wait(peer.ping()), Ok(()), "what came after was read as well");
    assert_eq!(peer.card().regions.len(), 2);
    let mut restarted = news_of(9, &[1]);
    restarted.boot_epoch = BootEpoch(78);
    let broken = {
        let mut card = news_of(9, &[1]).to_wire();
        card.kv_region = Some(7);
        card
    };
    for wrong in [restarted.to_wire(), broken] {
        let owner = raw::owner_with_news(vec![wrong], raw::card());
        // The session may end before the connect does.
        match wait(reader.connect(&owner.address.to_string(), tcp())) {
            Ok(peer) => eventually("the session ends", || !peer.is_open()),
            Err(error) => assert!(error.to_string().contains("protocol error"), "{error}"),
        }
    }
}
