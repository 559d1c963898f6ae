//! Cards: where an agent runs, parts of one, and cards that are carried as bytes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use towline_fabric::{Agent, ConnectError, ConnectOptions, ControlError, Owner};
use towline_topo::place::{Place, Relation};
use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::blocks::Extent;
use towline_wire::card::CardError;
use towline_wire::carried_card::{CARRIED_CARD_BYTES_MAX, CarriedCard, CarriedCardError};
use towline_wire::engine_card::{EngineCard, RankAgent};
use towline_wire::frame::Status;
use towline_wire::id::{BootEpoch, EngineId, Generation, LeaseId, RegionId};
use towline_wire::layout::{Gqa, KvLayout};
use towline_wire::lease::LeaseError;
use towline_wire::receipt::TransportKind;
use towline_wire::shard::Sharding;

use crate::raw;
use crate::support::*;

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_card_tells_where_its_agent_runs() {
    let (owner, _) = start(config("owner"));
    let region = offer(&owner, 1, 4096);
    let (reader, _) = start(config("reader"));
    let peer = wait(reader.connect(owner.address(), ConnectOptions::default())).unwrap();
    assert_eq!(peer.place(), *owner.place());
    assert_eq!(peer.card().region(region.id()).unwrap().place, "host");
    if owner.place().boot.is_some() && owner.place().namespaces.pid.is_some() {
        assert_eq!(peer.relation(), Relation::SameProcess);
    } else {
        crate::skips::note("an agent's place", "this machine hides its boot id or namespaces");
    }
    // One that does not say is nowhere known, and served all the same.
    let silent = raw::owner();
    let peer = wait(reader.connect(&silent.address.to_string(), only(TransportKind::Tcp))).unwrap();
    assert_eq!((peer.place(), peer.relation()), (Place::default(), Relation::Unknown));
}

#[test]
fn a_partial_card_lists_what_was_asked_for() {
    let (owner, _) = start(config("owner"));
    let (first, second) = (offer(&owner, 1, 4096), offer(&owner, 2, 4096));
    let part = owner.card_of(&[second.id()]).unwrap();
    assert!(part.region(second.id()).is_some() && part.region(first.id()).is_none());
    let unknown = owner.card_of(&[RegionId(99)]);
    assert_eq!(unknown, Err(CardError::UnknownRegion { region: RegionId(99) }));
}

#[test]
fn a_carried_card_leads_to_its_agent() {
    let (owner, _) = start(config("owner"));
    let region = offer(&owner, 4, 4096);
    let (reader, _) = start(config("reader"));
    let whole = owner.seal_card(owner.card(), HOUR).unwrap();
    let peer = wait(reader.connect_card(&whole, ConnectOptions::default())).unwrap();
    assert_eq!(peer.transport(), TransportKind::Shm);
    assert_eq!(read(&peer, region.id(), 4096), Ok(pattern(4, 4096)));
    // A part over which only TCP leads.
    let part = owner.card_of(&[region.id()]).unwrap().with_transports(&[TransportKind::Tcp]);
    let part = owner.seal_card(part, HOUR).unwrap();
    let peer = wait(reader.connect_card(&part, ConnectOptions::default())).unwrap();
    assert_eq!(peer.transport(), TransportKind::Tcp);
    assert!(peer.passed_over().to_string().contains("the card does not offer it"), "{}", peer.passed_over());
    assert_eq!(read(&peer, region.id(), 4096), Ok(pattern(4, 4096)));
}

#[test]
fn a_carried_card_that_is_not_right_is_refused_by_name_and_nothing_is_dialled() {
    let (owner, _) = start(config("owner"));
    let (reader, _) = start(config("reader"));
    let good = owner.seal_card(owner.card(), HOUR).unwrap();
    let refused = |bytes: &[u8]| match wait(reader.connect_card(bytes, ConnectOptions::default())) {
        Err(ConnectError::CarriedCard(why)) => why,
        other => panic!("{other:?}"),
    };
    let mut altered = good.clone();
    *altered.last_mut().unwrap() ^= 1;
    assert_eq!(refused(&altered), CarriedCardError::Seal);
    let mut newer = good.clone();
    newer[4] = 9;
    assert_eq!(refused(&newer), CarriedCardError::Version { found: 9 });
    assert!(matches!(refused(&good[..good.len() - 1]), CarriedCardError::Truncated { .. }));
    assert!(matches!(refused(&vec![0; CARRIED_CARD_BYTES_MAX + 1]), CarriedCardError::TooLarge { .. }));
    assert_eq!(refused(&[b'x'; 100]), CarriedCardError::NotACard);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let address = owner.address().to_owned();
    let ended = CarriedCard { card: owner.card(), address, expires_unix_s: now - HOUR.as_secs() };
    assert!(matches!(refused(&ended.seal(&key()).unwrap()), CarriedCardError::Expired { .. }));
    let mut elsewhere = config("elsewhere");
    elsewhere.key = ClusterKey::from_bytes([8; 32]);
    let (elsewhere, _) = start(elsewhere);
    assert_eq!(refused(&elsewhere.seal_card(elsewhere.card(), HOUR).unwrap()), CarriedCardError::Seal);
    let with = |agent, boot_epoch| ConnectOptions { agent, boot_epoch, ..ConnectOptions::default() };
    let other = reader.introduce(&good, with(Some(name("other")), None)).unwrap_err();
    assert!(matches!(other, ConnectError::WrongAgent { .. }), "{other}");
    let old = reader.introduce(&good, with(None, Some(BootEpoch(1)))).unwrap_err();
    assert!(matches!(old, ConnectError::PeerRestarted { .. }), "{old}");
    assert_eq!((owner.stats().sessions, owner.stats().unauthenticated, reader.stats().peers), (0, 0, 0));
    assert_eq!(owner.stats().handshakes_refused, 0);
}

#[test]
fn who_answers_must_be_whom_the_carried_card_names() {
    let at = |agent: &str, listen| {
        let mut config = config(agent);
        config.listen = listen;
        start(config).0
    };
    // An address of its own, so that no other test's socket takes the port between the lives.
    let owner = at("owner", "127.0.0.79:0".parse().unwrap());
    let (address, epoch) = (owner.bound(), owner.boot_epoch());
    let carried = owner.seal_card(owner.card(), HOUR).unwrap();
    let (reader, _) = start(config("reader"));
    let ask = || wait(reader.connect_card(&carried, ConnectOptions::default())).map(drop);
    ask().unwrap();
    drop(owner);
    let again = at("owner", address);
    let restarted = ask().unwrap_err();
    assert!(
        matches!(&restarted, ConnectError::PeerRestarted { expected, found, .. }
            if (*expected, *found) == (epoch, again.boot_epoch())),
        "{restarted}"
    );
    drop(again);
    let _other = at("another", address);
    let another = ask().unwrap_err();
    assert!(matches!(another, ConnectError::WrongAgent { .. }), "{another}");
}

/// An owner that belongs to an engine, and else hears nothing.
struct Rank(Option<EngineCard>);

impl Owner for Rank {
    fn admit(&self, _: RegionId, _: Option<(LeaseId, Generation)>, _: &[Extent]) -> Result<(), Status> {
        Ok(())
    }

    fn handle_release(&self, _: &Identity, lease: LeaseId, _: Generation) -> Result<(), LeaseError> {
        Err(LeaseError::Over { lease })
    }

    fn handle_heartbeat(&self, _: &Identity, _: &[LeaseId]) {}

    fn handle_notify(&self, _: &Identity, _: Vec<u8>) {}

    fn engine_card(&self) -> Option<EngineCard> {
        self.0.clone()
    }

    fn handle_peer_gone(&self, _: &Identity) {}
}

#[test]
fn a_peer_is_asked_for_the_card_of_its_engine() {
    let layout =
        KvLayout::gqa(Gqa { layers: 4, kv_heads: 4, head_dim: 8, element_bytes: 2, block_tokens: 16 });
    let rank = |index: u32| RankAgent::Address {
        agent: name(&format!("rank-{index}")),
        address: format!("10.0.0.{index}:7000"),
    };
    let card = EngineCard {
        engine: EngineId::from_bytes([1; 16]),
        sharding: Sharding { tp_size: 2, stage_layers: vec![4] },
        fingerprint: towline_wire::card::Fingerprint { layout: layout.describe(), ..Default::default() },
        layout,
        ranks: vec![rank(0), rank(1)],
    };
    let broken = EngineCard { ranks: vec![rank(0)], ..card.clone() };
    let (reader, _) = start(config("reader"));
    let ask = |engine| {
        let owner = Agent::start(config("rank-0"), std::sync::Arc::new(Rank(engine))).unwrap();
        let peer = wait(reader.connect(owner.address(), ConnectOptions::default())).unwrap();
        let answer = wait(peer.engine_card());
        assert_eq!(wait(peer.ping()), Ok(()), "the session goes on");
        answer
    };
    assert_eq!(ask(Some(card.clone())), Ok(card));
    let code = |answer| match answer {
        Err(ControlError::Refused { code, .. }) => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(code(ask(None)), "no-engine-card");
    assert_eq!(code(ask(Some(broken))), "invalid-engine-card");
}
