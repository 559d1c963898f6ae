//! Decoders of JSON: tickets, `kv_transfer_params`, digests, layouts.

use serde::Serialize;
use serde::de::DeserializeOwned;
use towline_wire::digest::Digests;
use towline_wire::kv_params::{PrefillParams, RemoteKv};
use towline_wire::layout::{BLOCK_BYTES_MAX, GROUPS_MAX, KvLayout, LAYERS_MAX, PARTS_MAX, Split};
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

fn check_ticket(ticket: &Ticket) {
    let blocks = &ticket.blocks;
    assert_eq!(u64::from(ticket.tokens), blocks.indices.len() as u64 * u64::from(ticket.block_tokens));
    assert!(ticket.digests.is_complete(blocks.indices.len()));
    let bytes = u128::from(blocks.block_bytes) * blocks.indices.len() as u128 * blocks.bases.len() as u128;
    assert_eq!(u128::from(blocks.bytes()), bytes, "the blocks' bytes can be counted");
    assert!(blocks.extents().all(|extent| extent.offset.checked_add(extent.len).is_some()));
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
