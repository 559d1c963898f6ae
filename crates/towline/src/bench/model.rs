//! The KV of real models: how many bytes a token has, and so what a prompt's transfer looks like.

use towline_wire::layout::{Arrangement, Group, GroupKind, HeadOrder, KvLayout, Part, Split};

/// What a token's KV is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cache {
    /// Keys and values of each head (multi-head or grouped-query attention).
    KeysValues { kv_heads: u64, head_dim: u64 },
    /// One compressed vector and its rotary part, in place of all heads (multi-head latent attention).
    Latent { dim: u64 },
}

/// A model's KV shape, from its published configuration (`config.json`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Model {
    /// As `--model` takes it.
    pub(crate) name: &'static str,
    layers: u64,
    cache: Cache,
    element_bytes: u64,
}

/// Tokens of a KV block, as vLLM's default.
pub(crate) const BLOCK_TOKENS: u64 = 16;
/// Keys and values start a cache line.
pub(crate) const PART_ALIGN: u64 = 64;

const fn gqa(name: &'static str, layers: u64, kv_heads: u64, head_dim: u64) -> Model {
    Model { name, layers, cache: Cache::KeysValues { kv_heads, head_dim }, element_bytes: 2 }
}

/// The models that `--model` knows, all with a cache of 16-bit numbers.
pub(crate) const MODELS: [Model; 8] = [
    gqa("smollm2-135m", 30, 3, 64),
    gqa("qwen2.5-7b", 28, 4, 128),
    gqa("qwen3-8b", 36, 8, 128),
    gqa("llama-3.2-1b", 16, 8, 64),
    gqa("llama-3.1-8b", 32, 8, 128),
    gqa("llama-3.1-70b", 80, 8, 128),
    gqa("llama-3.1-405b", 126, 8, 128),
    // kv_lora_rank 512 and qk_rope_head_dim 64.
    Model { name: "deepseek-r1", layers: 61, cache: Cache::Latent { dim: 576 }, element_bytes: 2 },
];

/// Keys, values, or what stands for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Its name in layouts.
    pub(crate) name: &'static str,
    /// Heads that tensor-parallel ranks share out; `None` for what each of them keeps whole.
    pub(crate) heads: Option<u32>,
    /// Bytes of one head, or of all, of one token in one layer.
    pub(crate) item_bytes: u64,
}

impl Model {
    /// Layers.
    pub(crate) fn layers(&self) -> u32 {
        u32::try_from(self.layers).unwrap_or(u32::MAX)
    }

    /// What a layer keeps of a token, in order.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        match self.cache {
            Cache::KeysValues { kv_heads, head_dim } => {
                let heads = u32::try_from(kv_heads).ok();
                ["k", "v"].map(|name| Piece { name, heads, item_bytes: head_dim * self.element_bytes }).into()
            }
            Cache::Latent { dim } => {
                vec![Piece { name: "latent", heads: None, item_bytes: dim * self.element_bytes }]
            }
        }
    }

    /// The whole engine's cache: blocks of [`BLOCK_TOKENS`] with their layers together, heads in this order.
    pub(crate) fn layout(&self, heads: HeadOrder) -> KvLayout {
        let part = |piece: Piece| Part {
            name: piece.name.into(),
            bytes: u64::from(piece.heads.unwrap_or(1)) * piece.item_bytes * BLOCK_TOKENS,
            align: PART_ALIGN,
            split: piece.heads.map_or(Split::Replicated, Split::Heads),
            element_bytes: u32::try_from(self.element_bytes).unwrap_or(u32::MAX),
            dtype: None,
        };
        let kind = if matches!(self.cache, Cache::Latent { .. }) { GroupKind::Mla } else { GroupKind::Full };
        let group = Group {
            kind,
            layers: (0..self.layers()).collect(),
            block_tokens: u32::try_from(BLOCK_TOKENS).unwrap_or(u32::MAX),
            parts: self.pieces().into_iter().map(part).collect(),
            heads,
            arrangement: Arrangement::BlockMajor,
        };
        KvLayout { groups: vec![group] }
    }

    /// Bytes of one token over all layers.
    pub(crate) fn token_bytes(&self) -> u64 {
        let of_piece = |piece: &Piece| u64::from(piece.heads.unwrap_or(1)) * piece.item_bytes;
        self.layers * self.pieces().iter().map(of_piece).sum::<u64>()
    }

    /// Bytes of one block over all layers: blocks lie with their layers together.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.token_bytes() * BLOCK_TOKENS
    }

    /// Bytes of the blocks that a prompt of `tokens` fills, the last one in part.
    pub(crate) fn prompt_bytes(&self, tokens: u64) -> u64 {
        self.block_bytes() * tokens.div_ceil(BLOCK_TOKENS)
    }

    /// The model of that name.
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        MODELS.iter().find(|model| model.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_token_are_the_published_ones() {
        for (name, bytes) in [
            ("llama-3.1-8b", 131_072),
            ("llama-3.1-70b", 327_680),
            ("qwen3-8b", 147_456),
            ("smollm2-135m", 23_040),
            ("deepseek-r1", 70_272),
        ] {
            assert_eq!(Model::find(name).unwrap().token_bytes(), bytes, "{name}");
        }
    }

    #[test]
    fn layouts_are_valid_and_cost_what_the_model_says() {
        for model in MODELS {
            for heads in [HeadOrder::Hnd, HeadOrder::Nhd] {
                let layout = model.layout(heads);
                layout.validate().unwrap();
                assert_eq!(layout.bytes_per_token(), model.token_bytes(), "{}", model.name);
                assert_eq!(layout.groups[0].block_bytes(), model.block_bytes(), "{}: padding", model.name);
            }
        }
    }

    #[test]
    fn a_prompt_fills_whole_blocks() {
        let model = Model::find("llama-3.1-8b").unwrap();
        assert_eq!(model.block_bytes(), 2 << 20);
        assert_eq!(model.prompt_bytes(8000), 500 * (2 << 20));
        assert_eq!(model.prompt_bytes(8001), 501 * (2 << 20));
    }
}
