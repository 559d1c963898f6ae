//! What the tests of this and other crates use: tiny models with everything a real one has.
//!
//! A [`TinyModel`] is a random Llama of a hundred thousand weights in a GGUF file, with a byte-level BPE tokenizer
//! and a chat template: it loads in milliseconds and runs through the very code that real models do. Everything
//! follows from its fields, so two tests, or two processes, with equal fields have equal files, and one changed field
//! makes an incompatible model.
//!
//! Its text is noise, but deterministic noise: greedy answers are as good as a real model's for comparing a handoff
//! with a local run token for token.

use std::path::Path;

use candle_core::quantized::gguf_file::{Value, write};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::text::byte_char;

/// Special tokens, first in the vocabulary: end of text, start and end of a turn.
pub const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// The token that ends an answer.
pub const EOS: u32 = 2;
/// Merges, in order of rank: enough that text has tokens of several bytes.
const MERGES: [&str; 16] = [
    "Ġ t", "h e", "i n", "e r", "Ġt he", "o n", "r e", "a n", "Ġ a", "l l", "e l", "el l", "Ġ w", "o r",
    "Ġw or", "Ġ Ġ",
];
const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
                        '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A tiny random model, by its numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct TinyModel {
    /// Decides every weight.
    pub seed: u64,
    /// Layers.
    pub layers: u32,
    /// Query heads; the hidden width is `heads * head_dim`.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Dimensions of a head, a multiple of 16.
    pub head_dim: u32,
    /// Width of the feed-forward layer, a multiple of 32.
    pub feed_forward: u32,
    /// Most tokens of a sequence.
    pub context: u32,
    /// Base of the rotation's frequencies.
    pub rope_base: f32,
    /// Whether the head shares the embedding's weights.
    pub tied: bool,
    /// `tokenizer.ggml.pre`.
    pub split: &'static str,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            seed: 1,
            layers: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            feed_forward: 96,
            context: 1024,
            rope_base: 10_000.0,
            tied: true,
            split: "smollm",
        }
    }
}

impl TinyModel {
    /// Writes the model to `path`.
    ///
    /// # Errors
    /// The file system's, or candle's about the numbers.
    pub fn write(&self, path: &Path) -> Result<(), candle_core::Error> {
        let metadata = self.metadata();
        let tensors = self.tensors()?;
        let metadata: Vec<(&str, &Value)> =
            metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<(&str, &QTensor)> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        write(&mut file, &metadata, &tensors)?;
        std::io::Write::flush(&mut file)?;
        Ok(())
    }

    /// Width of the residual stream.
    pub fn hidden(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// The vocabulary: specials, a token for every byte, what the merges make.
    pub fn vocab() -> Vec<String> {
        let specials = SPECIALS.iter().map(|special| (*special).to_owned());
        let bytes = (0..=255).map(|byte| byte_char(byte).to_string());
        specials.chain(bytes).chain(MERGES.iter().map(|merge| merge.replace(' ', ""))).collect()
    }

    fn metadata(&self) -> Vec<(String, Value)> {
        let text = |text: &str| Value::String(text.into());
        let texts = |texts: Vec<String>| Value::Array(texts.into_iter().map(Value::String).collect());
        let kind = |index| Value::I32(if index < SPECIALS.len() { 3 } else { 1 });
        let entries = [
            ("general.architecture", text("llama")),
            ("general.name", text("towline tiny")),
            ("llama.block_count", Value::U32(self.layers)),
            ("llama.context_length", Value::U32(self.context)),
            ("llama.embedding_length", Value::U32(self.hidden())),
            ("llama.feed_forward_length", Value::U32(self.feed_forward)),
            ("llama.attention.head_count", Value::U32(self.heads)),
            ("llama.attention.head_count_kv", Value::U32(self.kv_heads)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
            ("llama.rope.dimension_count", Value::U32(self.head_dim)),
            ("llama.rope.freq_base", Value::F32(self.rope_base)),
            ("tokenizer.ggml.model", text("gpt2")),
            ("tokenizer.ggml.pre", text(self.split)),
            ("tokenizer.ggml.tokens", texts(Self::vocab())),
            ("tokenizer.ggml.token_type", Value::Array((0..Self::vocab().len()).map(kind).collect())),
            ("tokenizer.ggml.merges", texts(MERGES.iter().map(|merge| (*merge).to_owned()).collect())),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.eos_token_id", Value::U32(EOS)),
            ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
            ("tokenizer.chat_template", text(TEMPLATE)),
        ];
        entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// Names and tensors: matrices in the types real files mix, norms in f32.
    fn tensors(&self) -> Result<Vec<(String, QTensor)>, candle_core::Error> {
        let [hidden, heads, kv_heads, dim, wide] =
            [self.hidden(), self.heads, self.kv_heads, self.head_dim, self.feed_forward]
                .map(|number| number as usize);
        let mut weights = Random { generator: StdRng::seed_from_u64(self.seed), tensors: Vec::new() };
        weights.matrix("token_embd.weight", (Self::vocab().len(), hidden), GgmlDType::Q8_0)?;
        for layer in 0..self.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            weights.norm(&name("attn_norm"), hidden)?;
            weights.matrix(&name("attn_q"), (heads * dim, hidden), GgmlDType::Q4_1)?;
            weights.matrix(&name("attn_k"), (kv_heads * dim, hidden), GgmlDType::Q4_1)?;
            weights.matrix(&name("attn_v"), (kv_heads * dim, hidden), GgmlDType::F16)?;
            weights.matrix(&name("attn_output"), (hidden, heads * dim), GgmlDType::Q4_1)?;
            weights.norm(&name("ffn_norm"), hidden)?;
            weights.matrix(&name("ffn_gate"), (wide, hidden), GgmlDType::Q4_0)?;
            weights.matrix(&name("ffn_up"), (wide, hidden), GgmlDType::F32)?;
            weights.matrix(&name("ffn_down"), (hidden, wide), GgmlDType::Q8_0)?;
        }
        weights.norm("output_norm.weight", hidden)?;
        if !self.tied {
            weights.matrix("output.weight", (Self::vocab().len(), hidden), GgmlDType::Q8_0)?;
        }
        Ok(weights.tensors)
    }
}

struct Random {
    generator: StdRng,
    tensors: Vec<(String, QTensor)>,
}

impl Random {
    /// Weights that keep the size of what they multiply, so that no layer fades.
    fn matrix(
        &mut self,
        name: &str,
        shape: (usize, usize),
        dtype: GgmlDType,
    ) -> Result<(), candle_core::Error> {
        let scale = (3.0 / shape.1 as f32).sqrt();
        let values: Vec<f32> =
            (0..shape.0 * shape.1).map(|_| self.generator.random_range(-1.0..1.0f32) * scale).collect();
        self.keep(name, &Tensor::from_vec(values, shape, &Device::Cpu)?, dtype)
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<(), candle_core::Error> {
        let values: Vec<f32> = (0..len).map(|_| self.generator.random_range(0.5..1.5f32)).collect();
        self.keep(name, &Tensor::from_vec(values, len, &Device::Cpu)?, GgmlDType::F32)
    }

    fn keep(&mut self, name: &str, tensor: &Tensor, dtype: GgmlDType) -> Result<(), candle_core::Error> {
        self.tensors.push((name.to_owned(), QTensor::quantize(tensor, dtype)?));
        Ok(())
    }
}
