//! Seals, bounds and references of tickets.

use super::*;
use crate::digest::DigestMode;
use crate::layout::Gqa;
use crate::parts::PartsError;
use crate::shard::ShardError;

fn rank(agent: &str) -> RankTicket {
    RankTicket {
        agent: AgentName::new(agent).unwrap(),
        boot_epoch: BootEpoch(u64::MAX),
        address: "127.0.0.1:7000".into(),
        lease: LeaseId(4),
        generation: Generation(u64::MAX - 7),
        slot: 1,
        region: RegionId(1),
        fence_region: RegionId(2),
        parts_ready: 1,
        groups: vec![GroupBlocks { arrays: vec![Array { base: 0, stride: 64 }], table: 0 }],
        digests: Digests { mode: DigestMode::Full, values: vec![17, 18] },
    }
}

fn ticket() -> Ticket {
    Ticket {
        schema: TICKET_SCHEMA,
        engine: EngineId::from_bytes([1; 16]),
        layout: None,
        tp_size: 1,
        stage_layers: vec![4],
        ranks: vec![rank("p")],
        tables: vec![BlockTable { first_block: 0, blocks: vec![5, 2] }],
        part_layers: Parts::whole(4),
        tokens: 32,
        prompt_hash: "00".into(),
        audience: "default".into(),
        expires_unix_s: 1000,
    }
}

/// Four ranks that share one table.
fn sharded() -> Ticket {
    let layout =
        KvLayout::gqa(Gqa { layers: 4, kv_heads: 4, head_dim: 8, element_bytes: 2, block_tokens: 16 });
    let ranks = ["p/0", "p/1", "p/2", "p/3"].map(rank).to_vec();
    Ticket { layout: Some(layout), tp_size: 2, stage_layers: vec![1, 3], ranks, ..ticket() }
}

fn key() -> ClusterKey {
    ClusterKey::from_bytes([6; 32])
}

fn through_json(sealed: &SealedTicket) -> serde_json::Value {
    serde_json::to_value(sealed).unwrap()
}

#[test]
fn a_sealed_ticket_opens_after_a_trip_through_json() {
    for ticket in [ticket(), sharded()] {
        let sealed: SealedTicket =
            serde_json::from_value(through_json(&ticket.clone().seal(&key()))).unwrap();
        assert_eq!(sealed.open(&key(), "default", 1000), Ok(ticket));
    }
}

#[test]
fn a_prompt_shorter_than_a_block_has_a_ticket_without_blocks() {
    let bare = RankTicket { digests: Digests::default(), ..rank("p") };
    let none = Ticket { tables: vec![BlockTable::default()], ranks: vec![bare], tokens: 0, ..ticket() };
    assert_eq!(none.clone().seal(&key()).open(&key(), "default", 0), Ok(none));
}

/// Every place of a JSON value that holds a text or a number.
fn leaves(value: &serde_json::Value, at: String, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| leaves(value, format!("{at}/{name}"), found));
        }
        serde_json::Value::Array(values) => {
            values
                .iter()
                .enumerate()
                .for_each(|(index, value)| leaves(value, format!("{at}/{index}"), found));
        }
        _ => found.push(at),
    }
}

#[test]
fn any_altered_field_breaks_the_seal() {
    let json = through_json(&ticket().seal(&key()));
    let mut places = vec![];
    leaves(&json, String::new(), &mut places);
    assert!(
        places.len() > 25 && places.contains(&"/ranks/0/groups/0/arrays/0/stride".to_owned()),
        "{places:?}"
    );
    for place in places {
        let mut altered = json.clone();
        let leaf = altered.pointer_mut(&place).unwrap();
        *leaf = match &*leaf {
            serde_json::Value::String(text) if place == "/engine" => {
                EngineId::from_bytes([text.as_bytes()[0]; 16]).to_string().into()
            }
            serde_json::Value::String(text) if place == "/seal" => {
                text.chars().rev().collect::<String>().into()
            }
            serde_json::Value::String(text) if place.ends_with("/values") => text.replace('1', "2").into(),
            serde_json::Value::String(text) if text.parse::<u64>().is_ok() => "3".into(),
            serde_json::Value::String(_) if place.ends_with("/mode") => "sampled".into(),
            serde_json::Value::String(text) => format!("{text}x").into(),
            serde_json::Value::Number(number) => (number.as_u64().unwrap() + 1).into(),
            other => panic!("{place} holds {other}"),
        };
        let sealed: SealedTicket = serde_json::from_value(altered).unwrap();
        assert_eq!(sealed.open(&key(), "default", 1000).unwrap_err(), TicketError::Seal, "{place}");
    }
}

#[test]
fn other_keys_audiences_and_late_readers_are_refused() {
    let sealed = ticket().seal(&key());
    assert_eq!(
        sealed.clone().open(&ClusterKey::from_bytes([7; 32]), "default", 0).unwrap_err(),
        TicketError::Seal
    );
    assert!(matches!(sealed.clone().open(&key(), "other", 0), Err(TicketError::Audience { .. })));
    assert_eq!(sealed.open(&key(), "default", 1000 + CLOCK_SKEW_S + 1).unwrap_err(), TicketError::Expired);
    let old = Ticket { schema: 1, ..ticket() }.seal(&key());
    assert_eq!(old.open(&key(), "default", 0), Err(TicketError::Schema { found: 1 }));
}

fn refusal(ticket: Ticket) -> TicketError {
    ticket.seal(&key()).open(&key(), "default", 0).unwrap_err()
}

#[test]
fn what_a_broken_owner_may_seal_is_named() {
    let rank_what = |alter: fn(&mut RankTicket)| {
        let mut ticket = sharded();
        alter(&mut ticket.ranks[2]);
        let TicketError::Rank { rank: 2, what } = refusal(ticket) else { panic!("another refusal") };
        what
    };
    assert!(rank_what(|rank| rank.agent = AgentName::new("p/0").unwrap()).contains("agent"));
    assert!(rank_what(|rank| rank.groups.push(GroupBlocks::default())).contains("group"));
    assert!(rank_what(|rank| rank.groups[0].table = 1).contains("table"));
    assert!(rank_what(|rank| rank.groups[0].arrays[0].stride = u64::MAX).contains("64 bits"));
    assert!(rank_what(|rank| rank.groups[0].arrays[0].stride = 0).contains("64 bits"));
    assert!(
        rank_what(|rank| rank.groups[0].arrays = vec![Array { base: 0, stride: 1 }; 4097]).contains("4096")
    );
    assert!(rank_what(|rank| rank.parts_ready = 2).contains("parts"));
    assert!(rank_what(|rank| rank.digests.values.truncate(1)).contains("digests"));
}

#[test]
fn ranks_layers_parts_and_counts_must_fit_each_other() {
    let three = Ticket { ranks: sharded().ranks[..3].to_vec(), ..sharded() };
    assert_eq!(refusal(three), TicketError::Ranks { found: 3, ranks: 4 });
    let nobody = Ticket { tp_size: 0, ..sharded() };
    assert!(matches!(refusal(nobody), TicketError::Sharding(ShardError::Ranks { .. })));
    let short = Ticket { stage_layers: vec![1, 2], part_layers: Parts::whole(3), ..sharded() };
    assert!(matches!(refusal(short), TicketError::Sharding(ShardError::Layer { .. })));
    let parts = Ticket { part_layers: Parts::by_layer(5), ..sharded() };
    assert_eq!(refusal(parts), TicketError::Parts(PartsError { layers: 5, depth: 4 }));
    let empty = Ticket { layout: Some(KvLayout { groups: vec![] }), ..sharded() };
    assert!(matches!(refusal(empty), TicketError::Layout(_)));
    let long = Ticket { tokens: u32::MAX, ..sharded() };
    assert!(matches!(refusal(long), TicketError::TooMany { what: "tokens", .. }));
}

#[test]
#[cfg_attr(miri, ignore = "a seal over megabytes takes hours there")]
fn tables_and_blocks_are_bounded() {
    let tables = Ticket { tables: vec![BlockTable::default(); TABLES_MAX + 1], ..sharded() };
    assert!(matches!(refusal(tables), TicketError::TooMany { what: "tables", .. }));
    let blocks = BlockTable { first_block: 0, blocks: vec![0; (1 << 20) + 1] };
    let blocks = Ticket { tables: vec![blocks], ..sharded() };
    assert!(matches!(refusal(blocks), TicketError::TooMany { what: "blocks", .. }));
}

#[test]
fn a_ticket_is_all_that_the_planner_needs_of_its_source() {
    let ticket = sharded();
    let pools = ticket.pools();
    assert_eq!(pools.iter().map(|pool| pool.rank).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!((pools[3].groups[0].blocks, pools[3].groups[0].arrays[0].stride), (&[5, 2][..], 64));
    assert_eq!(ticket.sharding().layers(1), 1..4);
}
