//! A model's weights, requantised to Q8_0 and packed.
//!
//! Why requantise: the cache's contents depend on every weight bit, and two workers must agree. Whatever types a file
//! mixes, each matrix is expanded to f32 and quantised by one rule (`Q8Row::quantize`), so that files of equal
//! values give equal weights; their hash is the fingerprint. Q8_0 sources survive unchanged.
//!
//! Q, K and V are one matrix, and so are gate and up: one pass over the activations, one region for the team.

use super::Progress;
use super::config::Config;
use super::error::LoadError;
use super::fingerprint::WeightHash;
use super::gguf::File;
use crate::kernel::arena::Arena;
use crate::kernel::matrix::{Matrix, Q8Row};

/// One transformer layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    /// Rows: queries, keys, values.
    pub(super) qkv: Matrix,
    pub(super) output: Matrix,
    pub(super) feed_forward_norm: Vec<f32>,
    /// Rows: gate, up.
    pub(super) gate_up: Matrix,
    pub(super) down: Matrix,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: Vec<f32>,
    /// `None`: tied to the embedding.
    pub(super) head: Option<Matrix>,
    /// Divisors of the rotation's frequencies, one a pair (Llama 3.1), or empty.
    pub(super) rope_factors: Vec<f32>,
}

impl Weights {
    /// Reads every tensor of `file`; also returns their hash.
    pub(super) fn read(
        file: &mut File,
        config: &Config,
        progress: Option<&dyn Fn(Progress<'_>)>,
    ) -> Result<(Self, String), LoadError> {
        refuse_unknown(file, config)?;
        let total = file.tensor_names().count();
        let mut reader =
            Reader { file, arena: Arena::default(), hash: WeightHash::new(), progress, done: 0, total };
        let embedding = reader.matrix(config.hidden, &[("token_embd.weight", config.vocab)])?;
        let layers = (0..config.layers).map(|layer| reader.layer(config, layer)).collect::<Result<_, _>>()?;
        let output_norm = reader.vector("output_norm.weight", config.hidden)?;
        let head = match reader.file.has_tensor("output.weight") {
            true => Some(reader.matrix(config.hidden, &[("output.weight", config.vocab)])?),
            false => None,
        };
        let rope_factors = match reader.file.has_tensor(ROPE_FACTORS) {
            true => reader.vector(ROPE_FACTORS, config.rope_dim / 2)?,
            false => Vec::new(),
        };
        if rope_factors.iter().any(|factor| !(factor.is_finite() && *factor > 0.0)) {
            return Err(LoadError::Tensor {
                name: ROPE_FACTORS.into(),
                what: "a factor is not positive".into(),
            });
        }
        Ok((Self { embedding, layers, output_norm, head, rope_factors }, reader.hash.finish()))
    }

    /// The language model head.
    pub(super) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes that a step with one wanted row reads.
    pub(super) fn bytes(&self) -> usize {
        let layer = |layer: &Layer| {
            layer.qkv.bytes() + layer.output.bytes() + layer.gate_up.bytes() + layer.down.bytes()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.head().bytes()
    }
}

const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Tensors of a layer.
const LAYER_TENSORS: [&str; 9] =
    ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"];

/// A tensor that would be ignored (a bias, an expert) means a model that would be run wrongly.
fn refuse_unknown(file: &File, config: &Config) -> Result<(), LoadError> {
    let known = |name: &str| {
        if ["token_embd.weight", "output_norm.weight", "output.weight", ROPE_FACTORS].contains(&name) {
            return true;
        }
        let parts = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        parts.is_some_and(|(layer, tensor)| {
            let layer: Option<usize> = layer.parse().ok();
            let tensor = tensor.strip_suffix(".weight");
            layer.is_some_and(|layer| layer < config.layers)
                && tensor.is_some_and(|tensor| LAYER_TENSORS.contains(&tensor))
        })
    };
    match file.tensor_names().find(|name| !known(name)) {
        Some(name) => Err(LoadError::Unsupported { what: format!("the tensor `{name}`") }),
        None => Ok(()),
    }
}

struct Reader<'a> {
    file: &'a mut File,
    arena: Arena,
    hash: WeightHash,
    progress: Option<&'a dyn Fn(Progress<'_>)>,
    done: usize,
    total: usize,
}

impl Reader<'_> {
    fn layer(&mut self, config: &Config, layer: usize) -> Result<Layer, LoadError> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let (hidden, query, kv, wide) =
            (config.hidden, config.query_width(), config.kv_width(), config.feed_forward);
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm"), hidden)?,
            qkv: self
                .matrix(hidden, &[(&name("attn_q"), query), (&name("attn_k"), kv), (&name("attn_v"), kv)])?,
            output: self.matrix(query, &[(&name("attn_output"), hidden)])?,
            feed_forward_norm: self.vector(&name("ffn_norm"), hidden)?,
            gate_up: self.matrix(hidden, &[(&name("ffn_gate"), wide), (&name("ffn_up"), wide)])?,
            down: self.matrix(wide, &[(&name("ffn_down"), hidden)])?,
        })
    }

    /// Tensors of `k` inputs, stacked: name and outputs of each.
    fn matrix(&mut self, k: usize, parts: &[(&str, usize)]) -> Result<Matrix, LoadError> {
        let mut first = 0;
        let mut matrix = None;
        for (name, n) in parts {
            let values = self.file.tensor(name, &[*n, k])?;
            // Only now, when a tensor of this size is known to be there, is the matrix worth its memory.
            let outputs = parts.iter().map(|(_, n)| n).sum();
            let matrix = matrix.get_or_insert_with(|| Matrix::zeros(&mut self.arena, outputs, k));
            self.hash.tensor(name, &[*n, k]);
            for (index, values) in values.chunks_exact(k).enumerate() {
                let row = Q8Row::quantize(values);
                self.hash.row(&row);
                matrix.set_row(first + index, &row);
            }
            first += n;
            self.tell(name);
        }
        Ok(matrix.unwrap_or_else(|| Matrix::zeros(&mut self.arena, 0, k)))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let values = self.file.tensor(name, &[len])?;
        self.hash.tensor(name, &[len]);
        self.hash.values(&values);
        self.tell(name);
        Ok(values)
    }

    fn tell(&mut self, tensor: &str) {
        self.done += 1;
        if let Some(progress) = self.progress {
            progress(Progress { done: self.done, total: self.total, tensor });
        }
    }
}
