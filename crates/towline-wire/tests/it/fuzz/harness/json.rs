//! Decoders of JSON: tickets, `kv_transfer_params`, digests, layouts.

use serde::Serialize;
use serde::de::DeserializeOwned;
use towline_wire::digest::Digests;
use towline_wire::kv_params::{PrefillParams, RemoteKv};
use towline_wire::layout::{BLOCK_BYTES_MAX, GROUPS_MAX, KvLayout, LAYERS_MAX, PARTS_MAX, Split};
use towline_wire::reshard::{Request, Side, Steps, plan};
use towline_wire::shard::Sharding;
use towline_wire::ticket::{SealedTicket, Ticket};

use super::key;

/// Decodes, and checks that the value survives its own encoding.
fn decoded<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
    let value: T = serde_json::from_slice(bytes).ok()?;
    let again = serde_json::to_vec(&value).expect("what decodes can be encoded");
    assert_eq!(serde_json::from_slice::<T>(&again).expect("what was encoded decodes"), value);
    Some(value)
}

/// A sealed ticket. It opens as it came only if its seal is the key's; and whoever holds the key may have sealed
/// anything, so it is sealed anew and must then be refused, or hold to the arithmetic.
pub(crate) fn ticket(bytes: &[u8]) -> bool {
    let Some(sealed) = decoded::<SealedTicket>(bytes) else { return false };
    let (audience, now) = (sealed.ticket.audience.clone(), sealed.ticket.expires_unix_s);
    let resealed = sealed.ticket.clone().seal(&key());
    let genuine = sealed.seal.eq_ignore_ascii_case(&resealed.seal);
    let opened = sealed.open(&key(), &audience, now);
    let Ok(ticket) = resealed.open(&key(), &audience, now) else {
        assert!(opened.is_err());
        return false;
    };
    assert_eq!(opened.is_ok(), genuine);
    check_ticket(&ticket);
    genuine
}

/// Its references lead somewhere, and a reader may plan with it: refused or not, the planner stays in bounds.
fn check_ticket(ticket: &Ticket) {
    let sharding = ticket.sharding();
    assert_eq!(ticket.ranks.len(), sharding.ranks().count());
    assert_eq!(ticket.part_layers.part_of(sharding.stage_layers.iter().sum()), None);
    for rank in &ticket.ranks {
        let tables = rank.groups.iter().map(|group| &ticket.tables[group.table as usize]);
        assert!(rank.digests.is_complete(tables.map(|table| table.blocks.len()).sum()));
    }
    let Some(layout) = &ticket.layout else { return };
    let pools = ticket.pools();
    let side = |ranks| Side { layout, sharding: &sharding, ranks };
    let request = Request {
        source: side(&pools),
        destination: side(&pools[..1]),
        tokens: 0..u64::from(ticket.tokens),
        steps: Steps::ByLayer,
        rotation: 0,
        pieces_max: 1 << 12,
    };
    if let Ok(plan) = plan(&request) {
        let lists = plan.transfers.iter().flat_map(|transfer| &transfer.lists);
        assert!(lists.clone().all(|pair| pair.remote.validate(u64::MAX).is_ok()));
        assert!(lists.clone().all(|pair| pair.local.bytes() == pair.remote.bytes()));
    }
}

pub(crate) fn remote_kv(bytes: &[u8]) -> bool {
    decoded::<RemoteKv>(bytes).is_some()
}

pub(crate) fn prefill_params(bytes: &[u8]) -> bool {
    decoded::<PrefillParams>(bytes).is_some()
}

/// Digests are hexadecimal digits and nothing else.
pub(crate) fn digests(bytes: &[u8]) -> bool {
    let Some(digests) = decoded::<Digests>(bytes) else { return false };
    let text = |json: &[u8]| -> Option<String> {
        let value: serde_json::Value = serde_json::from_slice(json).ok()?;
        Some(value.get("values")?.as_str()?.to_ascii_lowercase())
    };
    if let Some(given) = text(bytes) {
        assert_eq!(Some(given), text(&serde_json::to_vec(&digests).expect("it encodes")));
    }
    true
}

/// A layout: once validated, all its arithmetic stays in bounds, and so does that of each rank's share.
pub(crate) fn layout(bytes: &[u8]) -> bool {
    let Some(layout) = decoded::<KvLayout>(bytes) else { return false };
    if layout.validate().is_err() {
        return false;
    }
    check_layout(&layout);
    let depth =
        layout.groups.iter().flat_map(|group| &group.layers).max().map_or(0, |last| last.saturating_add(1));
    if let Ok(sharding) = Sharding::even(2, 1, depth)
        && layout.check_sharding(&sharding).is_ok()
    {
        for rank in sharding.ranks() {
            let share = layout.shard(&sharding, rank).expect("it was checked");
            assert_eq!(share.validate(), Ok(()));
            check_layout(&share);
        }
    }
    true
}

fn check_layout(layout: &KvLayout) {
    assert!((1..=GROUPS_MAX).contains(&layout.groups.len()));
    assert!(layout.bytes_per_token() <= BLOCK_BYTES_MAX * GROUPS_MAX as u64);
    for group in &layout.groups {
        assert!((1..=LAYERS_MAX).contains(&group.layers.len()));
        assert!((1..=PARTS_MAX).contains(&group.parts.len()));
        assert!(group.block_bytes() <= BLOCK_BYTES_MAX);
        let last = group.offset(group.layers.len() - 1, group.parts.len() - 1).expect("there is one");
        assert!(last + group.parts[group.parts.len() - 1].bytes <= group.block_bytes());
        for (index, part) in group.parts.iter().enumerate() {
            let items = group.part_tokens() * u64::from(part.split.heads());
            assert_eq!(group.item_bytes(index).map(|bytes| bytes * items), Some(part.bytes));
            assert!(part.split == Split::Replicated || part.split.heads() > 0);
        }
    }
}
