//! What two workers must share before one may use the other's cache.
//!
//! Text rather than one digest: a mismatch at connect names the field, and a person sees what differs.

use super::config::Config;
use super::weights::Weights;
use crate::kernel::matrix::Q8Row;

/// The identity of a model's arithmetic. Equal fingerprints mean interchangeable caches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// BLAKE3, in hex, over name, shape and requantised bytes of every tensor in a fixed order.
    pub weights: String,
    /// Architecture and shape.
    pub architecture: String,
    /// Order, base, dimensions and factors of the rotation.
    pub rope: String,
    /// Element type of the cache.
    pub cache_dtype: String,
}

impl Fingerprint {
    pub(super) fn new(config: &Config, weights: &Weights, hash: &str) -> Self {
        let Config { architecture, layers, hidden, feed_forward, heads, kv_heads, head_dim, vocab, .. } =
            config;
        let factors: Vec<u8> = weights.rope_factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        let factors =
            if factors.is_empty() { "none".to_owned() } else { blake3::hash(&factors).to_hex().to_string() };
        Self {
            weights: hash.into(),
            architecture: format!(
                "{architecture} layers={layers} hidden={hidden} ffn={feed_forward} heads={heads} kv-heads={kv_heads} \
                 head-dim={head_dim} vocab={vocab} rms-epsilon={:e}",
                config.rms_epsilon
            ),
            rope: format!("interleaved base={} dims={} factors={factors}", config.rope_base, config.rope_dim),
            cache_dtype: "f16".into(),
        }
    }
}

/// Hashes tensors as they are read.
pub(super) struct WeightHash(blake3::Hasher);

impl WeightHash {
    pub(super) fn new() -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"towline weights q8_0 v1");
        Self(hasher)
    }

    /// Starts a tensor: its name and shape, lengths first so that nothing runs together.
    pub(super) fn tensor(&mut self, name: &str, shape: &[usize]) {
        self.0.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        self.0.update(&(shape.len() as u64).to_le_bytes());
        for size in shape {
            self.0.update(&(*size as u64).to_le_bytes());
        }
    }

    pub(super) fn row(&mut self, row: &Q8Row) {
        let quants: Vec<u8> = row.quants.iter().map(|quant| quant.cast_unsigned()).collect();
        let scales: Vec<u8> = row.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.0.update(&quants).update(&scales);
    }

    pub(super) fn values(&mut self, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.0.update(&bytes);
    }

    pub(super) fn finish(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}
