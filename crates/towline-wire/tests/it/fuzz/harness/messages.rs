//! Decoders of protobuf messages: control messages, agents' cards, carried or not, engines' cards.

use prost::Message;
use towline_wire::card::{
    AgentCard, CARD_BYTES_MAX, ENDPOINTS_MAX, KEY_BYTES_MAX, PLACE_BYTES_MAX, REGIONS_MAX,
};
use towline_wire::carried_card::{
    CARRIED_CARD_BYTES_MAX, CARRIED_CARD_VERSION, CarriedCard, CarriedCardError, HEAD_BYTES,
};
use towline_wire::control::{self, Body, HEARTBEAT_LEASES_MAX, NOTIFY_BYTES_MAX, v1};
use towline_wire::engine_card::{ENGINE_CARD_BYTES_MAX, EngineCard, EngineCardError, RankAgent};
use towline_wire::frame::BODY_BYTES_MAX;

use super::key;

pub(crate) fn control(bytes: &[u8]) -> bool {
    let Ok((call, body)) = control::decode(bytes) else { return false };
    assert!(bytes.len() <= BODY_BYTES_MAX);
    assert_eq!(control::decode(&control::encode(call, body.clone())), Ok((call, body.clone())));
    match body {
        Body::Notify(notify) => assert!(notify.payload.len() <= NOTIFY_BYTES_MAX),
        Body::Heartbeat(heartbeat) => assert!(heartbeat.leases.len() <= HEARTBEAT_LEASES_MAX),
        Body::Card(card) => _ = checked_card(card),
        Body::EngineCard(card) => _ = checked_engine(EngineCard::from_wire(card)),
        _ => {}
    }
    true
}

/// A card, as the body of a control message.
pub(crate) fn agent_card(bytes: &[u8]) -> bool {
    let Ok(card) = v1::Card::decode(bytes) else { return false };
    checked_card(card)
}

fn checked_card(card: v1::Card) -> bool {
    let Ok(card) = AgentCard::from_wire(card) else { return false };
    check_card(&card);
    assert_eq!(AgentCard::from_wire(card.to_wire()), Ok(card));
    true
}

fn check_card(card: &AgentCard) {
    assert!(card.to_wire().encoded_len() <= CARD_BYTES_MAX);
    assert!(card.regions.len() <= REGIONS_MAX && card.endpoints.len() <= ENDPOINTS_MAX);
    assert!(card.place.len() <= PLACE_BYTES_MAX);
    assert!(card.endpoints.iter().all(|endpoint| endpoint.address.len() <= KEY_BYTES_MAX));
    let keys = card.regions.iter().flat_map(|region| &region.keys);
    assert!(keys.into_iter().all(|(_, key)| key.len() <= KEY_BYTES_MAX));
    let named = card.fence_region.into_iter().chain(card.kv_region);
    assert!(named.into_iter().all(|id| card.region(id).is_some()));
}

/// A card that opens as it came only if its seal is the key's; and whoever holds the key may have sealed anything, so the
/// body is sealed anew.
pub(crate) fn carried_card(bytes: &[u8]) -> bool {
    let opened = CarriedCard::open(bytes, &key(), 0);
    let Some((head, body)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
        assert!(opened.is_err());
        return false;
    };
    let seal = key().mac("towline 2026 carried card", &[&CARRIED_CARD_VERSION.to_le_bytes(), body]);
    let mut resealed = bytes.to_vec();
    resealed[12..HEAD_BYTES].copy_from_slice(seal.as_bytes());
    let reopened = CarriedCard::open(&resealed, &key(), 0);
    assert_ne!(reopened, Err(CarriedCardError::Seal));
    if head[12..] == seal.as_bytes()[..] {
        assert_eq!(opened, reopened);
    } else {
        assert!(opened.is_err());
    }
    let Ok(carried) = reopened else { return false };
    assert!(bytes.len() <= CARRIED_CARD_BYTES_MAX);
    check_card(&carried.card);
    let again = carried.seal(&key()).expect("what opens can be sealed");
    assert_eq!(CarriedCard::open(&again, &key(), 0), Ok(carried));
    opened.is_ok()
}

pub(crate) fn engine_card(bytes: &[u8]) -> bool {
    checked_engine(EngineCard::decode(bytes))
}

fn checked_engine(card: Result<EngineCard, EngineCardError>) -> bool {
    let Ok(card) = card else { return false };
    assert_eq!(card.validate(), Ok(()));
    assert_eq!(card.sharding.ranks().count(), card.ranks.len());
    assert_eq!(card.check(&card.clone()), Ok(()));
    for agent in &card.ranks {
        if let RankAgent::Card(agent) = agent {
            check_card(agent);
        }
    }
    let again = card.encode();
    assert!(again.len() <= ENGINE_CARD_BYTES_MAX);
    assert_eq!(EngineCard::decode(&again), Ok(card));
    true
}
