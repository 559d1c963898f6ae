//! A model's numbers, read from metadata and checked.
//!
//! Everything later is sized by these, so each has a bound no real model reaches and must fit the others; after
//! [`Config::read`] no product of them overflows.

use std::collections::HashMap;

use candle_core::quantized::gguf_file::Value;

use super::LoadError;
use super::gguf::File;

/// Bounds, with the largest known models far inside.
const LAYERS_MAX: u64 = 1024;
const HIDDEN_MAX: u64 = 1 << 16;
const FEED_FORWARD_MAX: u64 = 1 << 18;
const HEADS_MAX: u64 = 1024;
const HEAD_DIM_MAX: u64 = 512;
const CONTEXT_MAX: u64 = 1 << 22;
const VOCAB_MAX: u64 = 1 << 21;

/// The numbers of a Llama-family model.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// `general.name`, or empty.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub feed_forward: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Dimensions of a head, a multiple of 16.
    pub head_dim: usize,
    /// Dimensions of a head that are rotated.
    pub rope_dim: usize,
    /// Base of the rotation's frequencies.
    pub rope_base: f32,
    /// Added under the root of the norms.
    pub rms_epsilon: f32,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
}

impl Config {
    pub(super) fn read(file: &File) -> Result<Self, LoadError> {
        let keys = Keys(file.metadata());
        let architecture = keys.text("general.architecture")?.to_owned();
        if architecture != "llama" {
            return Err(LoadError::Architecture { found: architecture });
        }
        let heads = keys.number("llama.attention.head_count", HEADS_MAX)?;
        let kv_heads = keys.number_or("llama.attention.head_count_kv", HEADS_MAX, heads)?;
        let hidden = keys.number("llama.embedding_length", HIDDEN_MAX)?;
        let head_dim = keys.number_or("llama.attention.key_length", HEAD_DIM_MAX, hidden / heads)?;
        let value_dim = keys.number_or("llama.attention.value_length", HEAD_DIM_MAX, head_dim)?;
        let config = Self {
            name: keys.text("general.name").unwrap_or_default().to_owned(),
            architecture,
            layers: keys.number("llama.block_count", LAYERS_MAX)?,
            hidden,
            feed_forward: keys.number("llama.feed_forward_length", FEED_FORWARD_MAX)?,
            heads,
            kv_heads,
            head_dim,
            rope_dim: keys.number_or("llama.rope.dimension_count", HEAD_DIM_MAX, head_dim)?,
            rope_base: keys.float_or("llama.rope.freq_base", 10_000.0)?,
            rms_epsilon: keys.float_or("llama.attention.layer_norm_rms_epsilon", 1e-5)?,
            context: keys.number("llama.context_length", CONTEXT_MAX)?,
            vocab: keys.array_len("tokenizer.ggml.tokens", VOCAB_MAX)?,
        };
        config.check(value_dim)?;
        keys.refuse_unsupported()?;
        Ok(config)
    }

    fn check(&self, value_dim: usize) -> Result<(), LoadError> {
        let key = |key: &str, what: String| Err(LoadError::Key { key: key.into(), what });
        if !self.heads.is_multiple_of(self.kv_heads) {
            return key(
                "llama.attention.head_count_kv",
                format!("{} does not divide {} heads", self.kv_heads, self.heads),
            );
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(16) || value_dim != self.head_dim {
            let what = format!(
                "heads of {} and {value_dim} dimensions (equal multiples of 16 are needed)",
                self.head_dim
            );
            return Err(LoadError::Unsupported { what });
        }
        if !self.rope_dim.is_multiple_of(2) || self.rope_dim > self.head_dim {
            let what = format!("{} is odd or more than the head's {}", self.rope_dim, self.head_dim);
            return key("llama.rope.dimension_count", what);
        }
        if !(self.rope_base.is_finite() && self.rope_base >= 1.0) {
            return key("llama.rope.freq_base", format!("{} is no base", self.rope_base));
        }
        if !(0.0..=1.0).contains(&self.rms_epsilon) {
            return key(
                "llama.attention.layer_norm_rms_epsilon",
                format!("{} is no small number", self.rms_epsilon),
            );
        }
        Ok(())
    }

    /// Elements of a row of queries of all heads.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of keys (or values) of all KV heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Typed look-ups.
struct Keys<'a>(&'a HashMap<String, Value>);

impl Keys<'_> {
    fn get(&self, key: &str) -> Result<&Value, LoadError> {
        self.0.get(key).ok_or_else(|| LoadError::MissingKey { key: key.into() })
    }

    fn text(&self, key: &str) -> Result<&str, LoadError> {
        match self.get(key)? {
            Value::String(text) => Ok(text),
            other => {
                Err(LoadError::Key { key: key.into(), what: format!("a {:?}, not text", other.value_type()) })
            }
        }
    }

    /// A count of 1 to `max`.
    fn number(&self, key: &str, max: u64) -> Result<usize, LoadError> {
        let value = self.get(key)?;
        let number = match value {
            Value::I32(number) => u64::try_from(*number).ok(),
            Value::I64(number) => u64::try_from(*number).ok(),
            other => other.to_u64().ok(),
        };
        let number = number
            .filter(|number| (1..=max).contains(number))
            .and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| LoadError::Key {
            key: key.into(),
            what: format!("{} is not 1 to {max}", brief(value)),
        })
    }

    fn number_or(&self, key: &str, max: u64, default: usize) -> Result<usize, LoadError> {
        if self.0.contains_key(key) { self.number(key, max) } else { Ok(default) }
    }

    fn float_or(&self, key: &str, default: f32) -> Result<f32, LoadError> {
        match self.0.get(key) {
            None => Ok(default),
            Some(Value::F32(value)) => Ok(*value),
            Some(other) => Err(LoadError::Key {
                key: key.into(),
                what: format!("a {:?}, not an f32", other.value_type()),
            }),
        }
    }

    fn array_len(&self, key: &str, max: u64) -> Result<usize, LoadError> {
        match self.get(key)? {
            Value::Array(items) if (1..=max).contains(&(items.len() as u64)) => Ok(items.len()),
            Value::Array(items) => Err(LoadError::Key {
                key: key.into(),
                what: format!("{} items, not 1 to {max}", items.len()),
            }),
            other => Err(LoadError::Key {
                key: key.into(),
                what: format!("a {:?}, not an array", other.value_type()),
            }),
        }
    }

    /// Features that change the arithmetic: better refused than ignored.
    fn refuse_unsupported(&self) -> Result<(), LoadError> {
        let unsupported = |what: String| Err(LoadError::Unsupported { what });
        if let Ok(kind) = self.text("llama.rope.scaling.type")
            && kind != "none"
        {
            return unsupported(format!("`{kind}` scaling of its rotations"));
        }
        if self.0.contains_key("llama.rope.scale_linear") {
            return unsupported("linear scaling of its rotations".into());
        }
        let experts = self.0.get("llama.expert_count").and_then(|count| count.to_u64().ok());
        if experts.is_some_and(|count| count > 0) {
            return unsupported("a mixture of experts".into());
        }
        if self.0.contains_key("llama.attention.sliding_window") {
            return unsupported("sliding-window attention".into());
        }
        Ok(())
    }
}

/// A value for a message; arrays and long texts by their kind.
fn brief(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::String(_) => format!("a {:?}", value.value_type()),
        other => format!("{other:?}"),
    }
}
