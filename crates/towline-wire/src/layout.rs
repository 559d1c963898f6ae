//! What a KV block holds and where: groups, layers, parts.
//!
//! A layout is a list of *groups*. Every layer of a group keeps the same *parts* for each block of tokens (K and V;
//! one latent; scales; an indexer's keys; a recurrent state). A model with uniform attention has one group; hybrids
//! (gpt-oss's sliding windows, DeepSeek with an indexer, Mamba mixes) have several.
//!
//! A part says how its bytes divide: tokens × heads × bytes of a head. So the share of a rank can be cut out of the
//! whole engine's layout ([`crate::shard`]), and the layouts of two engines be compared ([`crate::reshard`]).

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most groups in a layout: known hybrids have two or three.
pub const GROUPS_MAX: usize = 16;
/// Most layers in a group: the deepest open models have under 200.
pub const LAYERS_MAX: usize = 1024;
/// Most parts in a layer: K, V and their scales make four, an indexer five.
pub const PARTS_MAX: usize = 16;
/// Longest name of a part or of an element type, in bytes.
pub const NAME_BYTES_MAX: usize = 32;
/// Largest block of one group in bytes, all layers together: keeps every offset product far inside a `u64`.
pub const BLOCK_BYTES_MAX: u64 = 1 << 40;

/// What kind of attention, and so which tokens, a group's blocks keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum GroupKind {
    /// Every token of the sequence.
    Full,
    /// Only the last `window_tokens`.
    SlidingWindow {
        /// Window in tokens.
        window_tokens: u32,
    },
    /// Multi-head latent attention: one compressed vector a token.
    Mla,
    /// A recurrent state: one block a sequence, whatever its length. Where a state strings several projections
    /// together and each is shared over ranks on its own (the x, B and C of Mamba-2's convolution), each is a part.
    State,
}

/// How a part divides over heads, and so over tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Tokens × this many heads × bytes of a head, in the group's [`HeadOrder`]; ranks share the heads out. K, V,
    /// their scales of one a head, a recurrent state's heads.
    Heads(u32),
    /// Tokens × bytes, no heads: every tensor-parallel rank keeps all of it. MLA's latent, an indexer's keys, scales
    /// of one a token. vLLM gives each rank a single KV head when a model uses MLA, whatever the TP size
    /// (`ModelConfig.get_num_kv_heads`).
    Replicated,
}

impl Split {
    /// Heads side by side in the part; 1 when there are none.
    pub fn heads(self) -> u32 {
        match self {
            Self::Heads(heads) => heads,
            Self::Replicated => 1,
        }
    }
}

/// How tokens and heads are ordered inside a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeadOrder {
    /// token, head, dimension.
    Nhd,
    /// head, token, dimension: one head's tokens are contiguous, so re-sharding over TP needs fewer pieces.
    Hnd,
}

/// How layers lie in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrangement {
    /// All layers of a block lie together: one base, few long runs.
    BlockMajor,
    /// Each part of each layer has an array of its own (vLLM's default): bases = layers × parts.
    LayerMajor,
}

/// One named piece of a layer's block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Part {
    /// `k`, `v`, `latent`, `k-scale`, `indexer`, `state`, …
    pub name: String,
    /// Bytes for one block of one layer, all its heads, without padding.
    pub bytes: u64,
    /// Alignment of the part's start in bytes, a power of two.
    pub align: u64,
    /// How the bytes divide over heads.
    pub split: Split,
    /// Bytes of an element.
    pub element_bytes: u32,
    /// Type of an element, for example `bf16`, `fp8-e4m3`. `None` where the layout's maker did not say; that equals
    /// only another `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
}

impl Part {
    fn padded(&self) -> u64 {
        self.bytes.next_multiple_of(self.align)
    }
}

/// Layers that keep the same parts for the same tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Group {
    /// Which tokens it keeps.
    pub kind: GroupKind,
    /// The model's layer numbers, ascending.
    pub layers: Vec<u32>,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Pieces of one layer's block, in order.
    pub parts: Vec<Part>,
    /// Order inside a part.
    pub heads: HeadOrder,
    /// Order of layers in the pool.
    pub arrangement: Arrangement,
}

impl Group {
    /// Bytes of one layer's share of a block, padding included.
    pub fn layer_bytes(&self) -> u64 {
        self.parts.iter().map(Part::padded).sum()
    }

    /// Bytes of one block over all layers of the group.
    pub fn block_bytes(&self) -> u64 {
        self.layer_bytes() * self.layers.len() as u64
    }

    /// Bytes that one token costs in this group; 0 for a [`GroupKind::State`] group, whose cost is a sequence's.
    pub fn bytes_per_token(&self) -> u64 {
        match self.kind {
            GroupKind::State => 0,
            _ => {
                self.parts.iter().map(|part| part.bytes).sum::<u64>() * self.layers.len() as u64
                    / u64::from(self.block_tokens)
            }
        }
    }

    /// Tokens that a part's bytes divide into: those of a block, or 1 for a [`GroupKind::State`] group, whose block
    /// is one state.
    pub fn part_tokens(&self) -> u64 {
        match self.kind {
            GroupKind::State => 1,
            _ => u64::from(self.block_tokens),
        }
    }

    /// Bytes of one head of one token of part `part`; of one token, for a part without heads. `None` when there is
    /// no such part. Exact for a layout that [`KvLayout::validate`] accepts.
    pub fn item_bytes(&self, part: usize) -> Option<u64> {
        let part = self.parts.get(part)?;
        part.bytes.checked_div(self.part_tokens() * u64::from(part.split.heads()))
    }

    /// Where part `part` of the group's `layer`-th layer starts, in bytes from the start of the block, when layers
    /// lie together ([`Arrangement::BlockMajor`]). `None` when there is no such layer or part.
    pub fn offset(&self, layer: usize, part: usize) -> Option<u64> {
        (layer < self.layers.len() && part < self.parts.len()).then(|| {
            layer as u64 * self.layer_bytes() + self.parts.iter().take(part).map(Part::padded).sum::<u64>()
        })
    }
}

/// The KV cache of an engine, or of one of its ranks, as data: [`KvLayout::shard`] makes the one of the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct KvLayout {
    /// One for uniform attention, several for hybrids.
    pub groups: Vec<Group>,
}

/// The numbers that decide a grouped-query cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gqa {
    /// Layers.
    pub layers: u32,
    /// KV heads of what the layout describes: all of the model's, or a rank's.
    pub kv_heads: u32,
    /// Dimension of a head.
    pub head_dim: u32,
    /// Bytes of an element: 2 for f16 and bf16.
    pub element_bytes: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
}

impl KvLayout {
    /// Uniform grouped-query attention: K and V of equal size, heads before tokens, layers together.
    pub fn gqa(shape: Gqa) -> Self {
        let bytes = u64::from(shape.kv_heads)
            * u64::from(shape.head_dim)
            * u64::from(shape.element_bytes)
            * u64::from(shape.block_tokens);
        let part = |name: &str| Part {
            name: name.into(),
            bytes,
            align: 64,
            split: Split::Heads(shape.kv_heads),
            element_bytes: shape.element_bytes,
            dtype: None,
        };
        Self {
            groups: vec![Group {
                kind: GroupKind::Full,
                layers: (0..shape.layers).collect(),
                block_tokens: shape.block_tokens,
                parts: vec![part("k"), part("v")],
                heads: HeadOrder::Hnd,
                arrangement: Arrangement::BlockMajor,
            }],
        }
    }

    /// Bytes that one token costs over all groups.
    pub fn bytes_per_token(&self) -> u64 {
        self.groups.iter().map(Group::bytes_per_token).sum()
    }

    /// The layout as one line of text, equal exactly when two layouts are; it stands in the fingerprint.
    pub fn describe(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Checks the bounds that arithmetic elsewhere relies on.
    ///
    /// # Errors
    /// [`LayoutError`] naming the group and what is wrong with it.
    pub fn validate(&self) -> Result<(), LayoutError> {
        if self.groups.is_empty() || self.groups.len() > GROUPS_MAX {
            return Err(LayoutError::Groups { count: self.groups.len() });
        }
        for (index, group) in self.groups.iter().enumerate() {
            let wrong = |what| Err(LayoutError::Group { index, what });
            if group.block_tokens == 0 {
                return wrong("a block has no tokens");
            }
            if group.layers.is_empty() || group.layers.len() > LAYERS_MAX {
                return wrong("it has no layers or more than 1024");
            }
            if !group.layers.is_sorted_by(|a, b| a < b) {
                return wrong("its layers are not ascending");
            }
            if group.parts.is_empty() || group.parts.len() > PARTS_MAX {
                return wrong("it has no parts or more than 16");
            }
            let fits = |part: &Part| {
                part.bytes > 0
                    && part.bytes <= BLOCK_BYTES_MAX
                    && part.align.is_power_of_two()
                    && part.align <= 1 << 21
            };
            if !group.parts.iter().all(fits) {
                return wrong("a part is empty, too large, or its alignment is no power of two up to 2 MiB");
            }
            if group.block_bytes() > BLOCK_BYTES_MAX {
                return wrong("a block is larger than 1 TiB");
            }
            if !group.parts.iter().all(|part| divides(part, group.part_tokens())) {
                return wrong("a part's bytes do not divide into tokens, heads and elements");
            }
            if !group.parts.iter().all(named) {
                return wrong("a part's name or element type is empty or longer than 32 bytes");
            }
        }
        self.check_places()
    }

    /// A part of a layer has one place.
    fn check_places(&self) -> Result<(), LayoutError> {
        let mut seen = HashSet::new();
        for (index, group) in self.groups.iter().enumerate() {
            let mut places =
                group.layers.iter().flat_map(|layer| group.parts.iter().map(|part| (*layer, &part.name)));
            if !places.all(|place| seen.insert(place)) {
                return Err(LayoutError::Group { index, what: "it repeats a part of a layer" });
            }
        }
        Ok(())
    }
}

fn divides(part: &Part, tokens: u64) -> bool {
    let elements = (tokens * u64::from(part.split.heads())).checked_mul(u64::from(part.element_bytes));
    elements.is_some_and(|bytes| bytes > 0 && part.bytes.is_multiple_of(bytes))
}

fn named(part: &Part) -> bool {
    let fits = |name: &str| (1..=NAME_BYTES_MAX).contains(&name.len());
    fits(&part.name) && part.dtype.as_deref().is_none_or(fits)
}

/// Why a layout cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    /// Split or merge the groups.
    #[error("a layout has 1 to {GROUPS_MAX} groups, not {count}")]
    Groups {
        /// Groups found.
        count: usize,
    },
    /// Correct the named group.
    #[error("group {index} of the layout: {what}")]
    Group {
        /// Which group.
        index: usize,
        /// What is wrong.
        what: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gqa(layers: u32, kv_heads: u32, head_dim: u32) -> KvLayout {
        KvLayout::gqa(Gqa { layers, kv_heads, head_dim, element_bytes: 2, block_tokens: 16 })
    }

    fn group(kind: GroupKind, layers: Vec<u32>, parts: &[(&str, u64)]) -> Group {
        let parts = parts
            .iter()
            .map(|(name, bytes)| Part {
                name: (*name).into(),
                bytes: *bytes,
                align: 64,
                split: Split::Replicated,
                element_bytes: 1,
                dtype: Some("u8".into()),
            })
            .collect();
        Group {
            kind,
            layers,
            block_tokens: 64,
            parts,
            heads: HeadOrder::Nhd,
            arrangement: Arrangement::LayerMajor,
        }
    }

    /// Published figures: bytes of KV a token in bf16, from the models' own configurations.
    #[test]
    fn bytes_per_token_match_the_published_figures() {
        assert_eq!(gqa(32, 8, 128).bytes_per_token(), 131_072, "Llama-3.1-8B");
        assert_eq!(gqa(80, 8, 128).bytes_per_token(), 327_680, "Llama-3.1-70B");
        assert_eq!(gqa(36, 8, 128).bytes_per_token(), 147_456, "Qwen3-8B");
        assert_eq!(gqa(30, 3, 64).bytes_per_token(), 23_040, "SmolLM2-135M");
        let r1 = KvLayout {
            groups: vec![group(GroupKind::Mla, (0..61).collect(), &[("latent", 64 * (512 + 64) * 2)])],
        };
        assert_eq!(r1.bytes_per_token(), 70_272, "DeepSeek-R1");
    }

    #[test]
    fn hybrids_are_expressible_and_survive_json() {
        let layout = KvLayout {
            groups: vec![
                group(GroupKind::Full, vec![1, 3, 5], &[("k", 8192), ("v", 8192)]),
                group(
                    GroupKind::SlidingWindow { window_tokens: 128 },
                    vec![0, 2, 4],
                    &[("k", 8192), ("v", 8192)],
                ),
                group(GroupKind::Mla, vec![6, 7], &[("latent", 73_728), ("indexer", 8448)]),
                group(GroupKind::State, vec![8], &[("conv", 12_288), ("state", 1 << 20)]),
            ],
        };
        layout.validate().unwrap();
        let again: KvLayout = serde_json::from_str(&layout.describe()).unwrap();
        assert_eq!(again, layout);
    }

    /// `docs/wire.md` shows this text; the fingerprint holds it.
    #[test]
    fn the_text_of_a_layout_is_what_the_document_says() {
        let kind = GroupKind::SlidingWindow { window_tokens: 128 };
        let mut group = group(kind, vec![0, 2], &[("k", 8192), ("latent", 64)]);
        group.parts[0].split = Split::Heads(8);
        group.parts[1].dtype = None;
        assert_eq!(
            KvLayout { groups: vec![group] }.describe(),
            r#"{"groups":[{"kind":{"kind":"sliding-window","window_tokens":128},"layers":[0,2],"block-tokens":64,"parts":["#
                .to_owned()
                + r#"{"name":"k","bytes":8192,"align":64,"split":{"heads":8},"element-bytes":1,"dtype":"u8"},"#
                + r#"{"name":"latent","bytes":64,"align":64,"split":"replicated","element-bytes":1}],"#
                + r#""heads":"nhd","arrangement":"layer-major"}]}"#
        );
    }

    #[test]
    fn offsets_tile_the_block() {
        let layout = gqa(4, 3, 64);
        let group = &layout.groups[0];
        let starts: Vec<u64> = (0..4)
            .flat_map(|l| (0..2).map(move |p| (l, p)))
            .map(|(l, p)| group.offset(l, p).unwrap())
            .collect();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == 16 * 3 * 64 * 2));
        assert_eq!(group.block_bytes(), starts[7] + 6144);
        assert_eq!((group.offset(4, 0), group.offset(0, 2)), (None, None));
    }

    #[test]
    fn a_part_tells_the_bytes_of_a_head_of_a_token() {
        assert_eq!(gqa(4, 8, 128).groups[0].item_bytes(1), Some(256));
        let state = group(GroupKind::State, vec![0], &[("state", 4096)]);
        assert_eq!((state.part_tokens(), state.item_bytes(0), state.item_bytes(1)), (1, Some(4096), None));
    }

    #[test]
    fn impossible_layouts_are_named() {
        assert_eq!(KvLayout { groups: vec![] }.validate(), Err(LayoutError::Groups { count: 0 }));
        let mut layout = gqa(4, 3, 64);
        layout.groups[0].parts[1].align = 3;
        assert!(layout.validate().unwrap_err().to_string().contains("alignment"));
        layout.groups[0].layers = vec![1, 1];
        assert!(layout.validate().unwrap_err().to_string().contains("ascending"));
        type Break = fn(&mut KvLayout);
        let cases: [(Break, &str); 5] = [
            (|l| l.groups[0].parts[0].bytes += 1, "divide"),
            (|l| l.groups[0].parts[0].split = Split::Heads(0), "divide"),
            (|l| l.groups[0].parts[0].name = "x".repeat(33), "name"),
            (|l| l.groups[0].parts[1].name = "k".into(), "repeats"),
            (|l| l.groups.push(l.groups[0].clone()), "repeats"),
        ];
        for (break_it, word) in cases {
            let mut layout = gqa(4, 3, 64);
            break_it(&mut layout);
            let error = layout.validate().unwrap_err().to_string();
            assert!(error.contains(word), "{error:?} does not say {word:?}");
        }
    }
}
