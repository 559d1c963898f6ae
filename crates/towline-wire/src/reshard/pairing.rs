//! Which part of the one layout is which of the other: by layer and name, whatever the groups. Checks that copying
//! bytes is enough.

use std::collections::{BTreeMap, BTreeSet};

use super::{End, ReshardError};
use crate::layout::{GroupKind, KvLayout, Split};

/// A part of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) group: usize,
    pub(super) part: usize,
}

/// A part of a layer, on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) layer: u32,
    pub(super) ours: Spot,
    pub(super) theirs: Spot,
    /// Equal on both sides.
    pub(super) split: Split,
    /// Bytes of one head of one token, equal on both sides.
    pub(super) item: u64,
}

fn spots(layout: &KvLayout) -> BTreeMap<(u32, &str), Spot> {
    let parts = layout.groups.iter().enumerate().flat_map(|(group, g)| {
        g.parts.iter().enumerate().map(move |(part, p)| (g, p.name.as_str(), Spot { group, part }))
    });
    parts.flat_map(|(g, name, spot)| g.layers.iter().map(move |layer| ((*layer, name), spot))).collect()
}

/// Every part of every layer of valid layouts, by layer.
pub(super) fn pairs(ours: &KvLayout, theirs: &KvLayout) -> Result<Vec<Pair>, ReshardError> {
    let (here, there) = (spots(ours), spots(theirs));
    let missing = |end, (layer, part): (u32, &str)| ReshardError::Missing { end, layer, part: part.into() };
    if let Some(key) = there.keys().find(|key| !here.contains_key(*key)) {
        return Err(missing(End::Destination, *key));
    }
    let mut checked = BTreeSet::new();
    let mut pairs = Vec::with_capacity(here.len());
    for (key, our) in here {
        let their = *there.get(&key).ok_or_else(|| missing(End::Source, key))?;
        if checked.insert((our.group, our.part, their.group, their.part)) {
            check(key, (ours, our), (theirs, their))?;
        }
        let group = &ours.groups[our.group];
        let item = group.item_bytes(our.part).unwrap_or(0);
        let split = group.parts[our.part].split;
        pairs.push(Pair { layer: key.0, ours: our, theirs: their, split, item });
    }
    Ok(pairs)
}

/// Whether bytes of the one mean the same as bytes of the other.
fn check(
    (layer, name): (u32, &str),
    (ours, our): (&KvLayout, Spot),
    (theirs, their): (&KvLayout, Spot),
) -> Result<(), ReshardError> {
    let (a, b) = (&ours.groups[our.group], &theirs.groups[their.group]);
    let (p, q) = (&a.parts[our.part], &b.parts[their.part]);
    let heads = |split| match split {
        Split::Heads(heads) => heads.to_string(),
        Split::Replicated => "none".into(),
    };
    let fields: [(&'static str, String, String); 6] = [
        ("kind", class(a.kind).into(), class(as_wanted(a.kind, b.kind)).into()),
        ("window", window(a.kind), window(as_wanted(a.kind, b.kind))),
        ("dtype", text(p.dtype.as_deref()), text(q.dtype.as_deref())),
        ("element bytes", p.element_bytes.to_string(), q.element_bytes.to_string()),
        ("heads", heads(p.split), heads(q.split)),
        ("bytes of a head", number(a.item_bytes(our.part)), number(b.item_bytes(their.part))),
    ];
    match fields.into_iter().find(|(_, ours, theirs)| ours != theirs) {
        None => Ok(()),
        Some((field, ours, theirs)) => {
            Err(ReshardError::Differs { group: our.group, layer, part: name.into(), field, ours, theirs })
        }
    }
}

/// A source that keeps every token also serves who wants only a window of them.
fn as_wanted(wanted: GroupKind, kept: GroupKind) -> GroupKind {
    match (wanted, kept) {
        (GroupKind::SlidingWindow { .. }, GroupKind::Full) => wanted,
        _ => kept,
    }
}

fn class(kind: GroupKind) -> &'static str {
    match kind {
        GroupKind::Full => "full",
        GroupKind::SlidingWindow { .. } => "sliding-window",
        GroupKind::Mla => "mla",
        GroupKind::State => "state",
    }
}

fn window(kind: GroupKind) -> String {
    match kind {
        GroupKind::SlidingWindow { window_tokens } => window_tokens.to_string(),
        _ => String::new(),
    }
}

fn text(dtype: Option<&str>) -> String {
    dtype.unwrap_or("not said").into()
}

fn number(bytes: Option<u64>) -> String {
    bytes.unwrap_or(0).to_string()
}
