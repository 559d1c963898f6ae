//! Engine cards: what survives the wire, and what is refused by name.

use proptest::prelude::*;

use super::*;
use crate::id::{BootEpoch, RegionId};
use crate::layout::Gqa;
use crate::receipt::TransportKind;

fn layout() -> KvLayout {
    KvLayout::gqa(Gqa { layers: 4, kv_heads: 4, head_dim: 8, element_bytes: 2, block_tokens: 16 })
}

fn fingerprint() -> Fingerprint {
    Fingerprint { rope: "base=1".into(), layout: layout().describe(), ..Fingerprint::default() }
}

fn agent_card(name: &str) -> AgentCard {
    AgentCard {
        agent: AgentName::new(name).unwrap(),
        engine: EngineId::from_bytes([3; 16]),
        boot_epoch: BootEpoch(9),
        endpoints: vec![crate::card::Endpoint { transport: TransportKind::Tcp, address: b"h:1".to_vec() }],
        regions: vec![crate::card::RegionCard {
            id: RegionId(1),
            len_bytes: 4096,
            place: "host".into(),
            keys: vec![],
            peer_writable: false,
        }],
        fingerprint: fingerprint(),
        fence_region: None,
        kv_region: Some(RegionId(1)),
        revision: 1,
        place: String::new(),
    }
}

/// Two stages of two ranks; the last known by its address only.
fn card() -> EngineCard {
    let address =
        RankAgent::Address { agent: AgentName::new("p/3").unwrap(), address: "10.0.0.4:7000".into() };
    EngineCard {
        engine: EngineId::from_bytes([3; 16]),
        sharding: Sharding { tp_size: 2, stage_layers: vec![3, 1] },
        layout: layout(),
        fingerprint: fingerprint(),
        ranks: (0..3)
            .map(|rank| RankAgent::Card(Box::new(agent_card(&format!("p/{rank}")))))
            .chain([address])
            .collect(),
    }
}

#[test]
fn an_engine_card_round_trips_in_any_order_of_ranks() {
    assert_eq!(EngineCard::decode(&card().encode()), Ok(card()));
    let mut wire = card().to_wire();
    wire.ranks.reverse();
    assert_eq!(EngineCard::from_wire(wire), Ok(card()));
}

fn agent_of(wire: &mut v1::EngineCard, rank: usize) -> &mut v1::Card {
    match &mut wire.ranks[rank].agent {
        Some(Agent::Card(card)) => card,
        other => panic!("rank {rank} has no card but {other:?}"),
    }
}

fn address_of(wire: &mut v1::EngineCard) -> &mut v1::AgentAddress {
    match &mut wire.ranks[3].agent {
        Some(Agent::Address(address)) => address,
        other => panic!("rank 3 has no address but {other:?}"),
    }
}

#[test]
fn inconsistent_cards_are_refused_by_name() {
    type Tamper = fn(&mut v1::EngineCard);
    let cases: [(Tamper, &str); 20] = [
        (|c| c.version = 2, "version 2"),
        (|c| c.engine = vec![1], "16 bytes"),
        (|c| drop(c.ranks.remove(1)), "rank 1 of the engine: it is missing"),
        (|c| c.ranks.push(c.ranks[2].clone()), "rank 2 of the engine: it is listed twice"),
        (|c| c.ranks[1].tp_index = 2, "no rank at tp 2, pp 0"),
        (|c| c.ranks[1].agent = None, "neither card nor address"),
        (|c| c.ranks = vec![c.ranks[3].clone(); 257], "lists 257 ranks"),
        (|c| c.tp_size = 1, "no rank at tp 1"),
        (|c| c.tp_size = 0, "1 to 256 ranks"),
        (|c| c.stage_layers = vec![2, 1], "layer 3"),
        (|c| c.stage_layers = vec![4, 0], "at least one layer"),
        (|c| agent_of(c, 1).engine = vec![9; 16], "another engine's"),
        (|c| agent_of(c, 1).agent = "p/0".into(), "also another rank's"),
        (|c| agent_of(c, 1).version = 9, "rank 1 of the engine: the card has version 9"),
        (|c| agent_of(c, 2).fingerprint.as_mut().unwrap().rope = "base=2".into(), "incompatible rope"),
        (|c| agent_of(c, 2).fingerprint.as_mut().unwrap().layout = "{}".into(), "incompatible layout"),
        (|c| c.fingerprint.as_mut().unwrap().layout = "{".into(), "it is no layout"),
        (|c| c.fingerprint.as_mut().unwrap().layout.push(' '), "as this build writes it"),
        (|c| c.fingerprint.as_mut().unwrap().layout = r#"{"groups":[]}"#.into(), "1 to 16 groups"),
        (|c| address_of(c).address = "nowhere".into(), "not host:port"),
    ];
    for (tamper, word) in cases {
        let mut wire = card().to_wire();
        tamper(&mut wire);
        let error = EngineCard::decode(&wire.encode_to_vec()).unwrap_err().to_string();
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

#[test]
fn oversized_cards_are_refused_on_both_sides() {
    let mut long = card();
    long.fingerprint.weights = "x".repeat(ENGINE_CARD_BYTES_MAX);
    let refused = EngineCard::decode(&long.encode());
    assert!(matches!(refused, Err(EngineCardError::TooLarge { .. })), "{refused:?}");
    for rank in &mut long.ranks {
        if let RankAgent::Card(card) = rank {
            card.fingerprint.weights = long.fingerprint.weights.clone();
        }
    }
    assert!(matches!(long.validate(), Err(EngineCardError::TooLarge { .. })));
}

#[test]
fn a_cut_card_never_decodes_to_the_whole_one() {
    let bytes = card().encode();
    // Under Miri some of the cuts: each takes it a second.
    for length in (0..bytes.len()).step_by(if cfg!(miri) { 97 } else { 1 }) {
        assert!(EngineCard::decode(&bytes[..length]).is_err(), "cut to {length} bytes");
    }
}

#[test]
fn fetched_cards_are_admitted_only_for_their_rank() {
    let card = card();
    assert_eq!(card.admit(3, &agent_card("p/3")), Ok(()));
    assert!(matches!(card.admit(3, &agent_card("p/1")), Err(EngineCardError::Rank { index: 3, .. })));
    assert!(matches!(card.admit(4, &agent_card("p/3")), Err(EngineCardError::Rank { index: 4, .. })));
    let other = AgentCard { fingerprint: Fingerprint::default(), ..agent_card("p/3") };
    assert!(matches!(card.admit(3, &other), Err(EngineCardError::Incompatible { index: 3, .. })));
}

#[test]
fn engines_may_differ_in_layout_but_not_in_meaning() {
    let mut peer = card();
    peer.fingerprint.layout = "another".into();
    assert_eq!(card().check(&peer), Ok(()));
    peer.fingerprint.rope = "base=2".into();
    assert_eq!(card().check(&peer).unwrap_err().field, "rope");
}

#[test]
fn the_largest_engine_fits_by_its_addresses() {
    let mut large = card();
    large.sharding = Sharding { tp_size: 4, stage_layers: vec![1; 4] };
    let many = 16;
    large.ranks = (0..many)
        .map(|rank| RankAgent::Address {
            agent: AgentName::new(format!("{rank:0>128}")).unwrap(),
            address: format!("{:x>40}:65535", rank),
        })
        .collect();
    assert_eq!(large.validate(), Ok(()));
    assert!(large.encode().len() / many * (RANKS_MAX as usize) < ENGINE_CARD_BYTES_MAX);
}

proptest! {
    /// Whatever a mutated card decodes to keeps the promises of a valid one.
    #[test]
    fn mutated_cards_decode_to_valid_ones_or_not_at_all(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = card().encode();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        for bytes in [&bytes[..], &bytes[..cut.index(bytes.len())]] {
            if let Ok(card) = EngineCard::decode(bytes) {
                prop_assert_eq!(card.validate(), Ok(()));
                prop_assert_eq!(EngineCard::decode(&card.encode()), Ok(card));
            }
        }
    }

    #[test]
    fn no_bytes_make_the_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = EngineCard::decode(&bytes);
    }
}
