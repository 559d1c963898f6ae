//! Decoders of protobuf messages: control messages, agents' cards, engines' cards.

use prost::Message;
use towline_wire::card::{AgentCard, CARD_BYTES_MAX, ENDPOINTS_MAX, KEY_BYTES_MAX, REGIONS_MAX};
use towline_wire::control::{self, Body, HEARTBEAT_LEASES_MAX, NOTIFY_BYTES_MAX, v1};
use towline_wire::engine_card::{ENGINE_CARD_BYTES_MAX, EngineCard, RankAgent};
use towline_wire::frame::BODY_BYTES_MAX;

pub(crate) fn control(bytes: &[u8]) -> bool {
    let Ok((call, body)) = control::decode(bytes) else { return false };
    assert!(bytes.len() <= BODY_BYTES_MAX);
    assert_eq!(control::decode(&control::encode(call, body.clone())), Ok((call, body.clone())));
    match body {
        Body::Notify(notify) => assert!(notify.payload.len() <= NOTIFY_BYTES_MAX),
        Body::Heartbeat(heartbeat) => assert!(heartbeat.leases.len() <= HEARTBEAT_LEASES_MAX),
        Body::Card(card) => _ = checked_card(card),
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
    assert!(card.endpoints.iter().all(|endpoint| endpoint.address.len() <= KEY_BYTES_MAX));
    let keys = card.regions.iter().flat_map(|region| &region.keys);
    assert!(keys.into_iter().all(|(_, key)| key.len() <= KEY_BYTES_MAX));
    let named = card.fence_region.into_iter().chain(card.kv_region);
    assert!(named.into_iter().all(|id| card.region(id).is_some()));
}

pub(crate) fn engine_card(bytes: &[u8]) -> bool {
    let Ok(card) = EngineCard::decode(bytes) else { return false };
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
