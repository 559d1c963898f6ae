//! Small models of the kinds there are, in every style of keeping them.

use proptest::prelude::*;
use towline_wire::layout::{Arrangement, Group, GroupKind, HeadOrder, KvLayout, Part, Split};
use towline_wire::shard::Sharding;

use super::oracle::Scatter;

/// Which model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    /// Llama: grouped-query attention with this many KV heads.
    Gqa(u32),
    /// gpt-oss: every other layer has a sliding window; scales a head and a token.
    Sliding,
    /// DeepSeek: latents and an indexer, neither with heads.
    Mla,
    /// A Mamba hybrid: states with heads and without, few KV heads.
    State,
}

/// Layers of every model here.
pub(crate) const LAYERS: u32 = 6;
/// Window of [`Model::Sliding`].
pub(crate) const WINDOW: u32 = 21;

/// How an engine keeps its KV.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub(crate) block_tokens: u32,
    pub(crate) heads: HeadOrder,
    pub(crate) arrangement: Arrangement,
    pub(crate) align: u64,
    /// Groups are split in two, and all groups and parts in reversed order.
    pub(crate) regrouped: bool,
}

impl Style {
    pub(crate) const PLAIN: Self = Self {
        block_tokens: 16,
        heads: HeadOrder::Hnd,
        arrangement: Arrangement::BlockMajor,
        align: 1,
        regrouped: false,
    };
}

pub(crate) fn layout(model: Model, style: Style) -> KvLayout {
    let every = |step: u32, from: u32| (from..LAYERS).step_by(step as usize).collect::<Vec<u32>>();
    let full = GroupKind::Full;
    let sliding = GroupKind::SlidingWindow { window_tokens: WINDOW };
    let gqa = |heads| [("k", Split::Heads(heads), 2, 4), ("v", Split::Heads(heads), 2, 6)];
    let scaled = [
        ("k", Split::Heads(4), 1, 3),
        ("v", Split::Heads(4), 1, 2),
        ("k-scale", Split::Heads(4), 1, 1),
        ("token-scale", Split::Replicated, 4, 4),
    ];
    let state = [
        ("state", Split::Heads(8), 4, 12),
        ("conv", Split::Heads(4), 2, 6),
        ("state-scale", Split::Replicated, 1, 5),
    ];
    let latent = [("latent", Split::Replicated, 2, 12), ("indexer", Split::Replicated, 1, 5)];
    let groups = match model {
        Model::Gqa(heads) => vec![group(style, full, every(1, 0), &gqa(heads))],
        Model::Sliding => {
            vec![group(style, sliding, every(2, 0), &scaled), group(style, full, every(2, 1), &scaled)]
        }
        Model::Mla => vec![group(style, GroupKind::Mla, every(1, 0), &latent)],
        Model::State => vec![
            group(style, full, vec![1, 4], &gqa(2)),
            group(style, GroupKind::State, vec![0, 2, 3, 4, 5], &state),
        ],
    };
    let layout = KvLayout { groups: if style.regrouped { regroup(&groups) } else { groups } };
    layout.validate().unwrap();
    layout
}

/// Parts as name, split, element bytes, bytes of a head of a token.
fn group(style: Style, kind: GroupKind, layers: Vec<u32>, parts: &[(&str, Split, u32, u64)]) -> Group {
    let tokens = if kind == GroupKind::State { 1 } else { u64::from(style.block_tokens) };
    let part = |(name, split, element_bytes, item): &(&str, Split, u32, u64)| Part {
        name: (*name).into(),
        bytes: tokens * u64::from(split.heads()) * item,
        align: style.align,
        split: *split,
        element_bytes: *element_bytes,
        dtype: Some(format!("raw{element_bytes}")),
    };
    Group {
        kind,
        layers,
        block_tokens: style.block_tokens,
        parts: parts.iter().map(part).collect(),
        heads: style.heads,
        arrangement: style.arrangement,
    }
}

fn regroup(groups: &[Group]) -> Vec<Group> {
    let half = |group: &Group, odd: usize| {
        let layers = group.layers.iter().skip(odd).step_by(2).copied().collect();
        Group { layers, parts: group.parts.iter().rev().cloned().collect(), ..group.clone() }
    };
    groups.iter().rev().flat_map(|group| [half(group, 1), half(group, 0)]).collect()
}

pub(crate) fn styles() -> impl Strategy<Value = Style> {
    let order = prop_oneof![Just(HeadOrder::Nhd), Just(HeadOrder::Hnd)];
    let arrangement = prop_oneof![Just(Arrangement::BlockMajor), Just(Arrangement::LayerMajor)];
    let sizes = prop::sample::select(vec![8, 16, 64]);
    let aligns = prop::sample::select(vec![1, 4, 64]);
    (sizes, order, arrangement, aligns, any::<bool>()).prop_map(
        |(block_tokens, heads, arrangement, align, regrouped)| Style {
            block_tokens,
            heads,
            arrangement,
            align,
            regrouped,
        },
    )
}

pub(crate) fn shardings() -> impl Strategy<Value = Sharding> {
    let stages = prop::sample::select(vec![vec![6], vec![6], vec![3, 3], vec![1, 5], vec![2, 3, 1]]);
    (prop::sample::select(vec![1, 2, 4, 8]), stages)
        .prop_map(|(tp_size, stage_layers)| Sharding { tp_size, stage_layers })
}

pub(crate) fn models() -> impl Strategy<Value = Model> {
    let gqa = prop::sample::select(vec![2, 4, 8]).prop_map(Model::Gqa);
    prop_oneof![gqa, Just(Model::Sliding), Just(Model::Mla), Just(Model::State)]
}

pub(crate) fn scatters() -> impl Strategy<Value = Scatter> {
    prop_oneof![Just(Scatter::Tight), any::<u64>().prop_map(Scatter::Shuffled)]
}
