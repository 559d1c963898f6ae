//! The KV of real models: how many bytes a token has, and so what a prompt's transfer looks like.

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

impl Model {
    /// Bytes of one token over all layers.
    pub(crate) fn token_bytes(&self) -> u64 {
        let elements = match self.cache {
            Cache::KeysValues { kv_heads, head_dim } => 2 * kv_heads * head_dim,
            Cache::Latent { dim } => dim,
        };
        self.layers * elements * self.element_bytes
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
    fn a_prompt_fills_whole_blocks() {
        let model = Model::find("llama-3.1-8b").unwrap();
        assert_eq!(model.block_bytes(), 2 << 20);
        assert_eq!(model.prompt_bytes(8000), 500 * (2 << 20));
        assert_eq!(model.prompt_bytes(8001), 501 * (2 << 20));
    }
}
