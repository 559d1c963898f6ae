//! Digests of KV blocks: a fast, non-cryptographic check that the bytes which arrived are the bytes that were computed.
//!
//! XXH3-64 runs near memory speed, so `full` costs one more read of the data on each side. It catches torn reads,
//! wrong offsets and flipped bits; it is no defence against a peer that lies (such a peer could lie in the KV itself).

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// How much of a transfer is digested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DigestMode {
    /// Nothing.
    Off,
    /// Every [`SAMPLE_EVERY`]-th block and the last.
    Sampled,
    /// Every block.
    #[default]
    Full,
}

/// Distance of sampled blocks.
pub const SAMPLE_EVERY: usize = 16;

impl DigestMode {
    /// Whether block `position` of `count` is digested.
    pub fn covers(self, position: usize, count: usize) -> bool {
        match self {
            Self::Off => false,
            Self::Sampled => position % SAMPLE_EVERY == 0 || position + 1 == count,
            Self::Full => true,
        }
    }
}

/// A digest over the covered blocks of a list, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest {
    /// Which blocks it covers.
    pub mode: DigestMode,
    /// XXH3-64 over the digests of the covered blocks, little-endian, as 16 hexadecimal digits: 64-bit numbers do
    /// not survive every JSON reader.
    #[serde(with = "hex_u64")]
    pub value: u64,
}

/// The digest of one block's bytes; kept with a full block, since a full block never changes.
pub fn block_digest(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Folds the digests of blocks into one: the caller gives them in order, with `mode` deciding which count.
pub fn fold(mode: DigestMode, count: usize, mut of_block: impl FnMut(usize) -> u64) -> Digest {
    let mut hasher = Xxh3::new();
    for position in (0..count).filter(|position| mode.covers(*position, count)) {
        hasher.update(&of_block(position).to_le_bytes());
    }
    Digest { mode, value: hasher.digest() }
}

mod hex_u64 {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{value:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        u64::from_str_radix(&String::deserialize(deserializer)?, 16).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_or_a_swapped_block_changes_the_digest() {
        let blocks: Vec<Vec<u8>> = (0..20u8).map(|b| vec![b; 64]).collect();
        let of = |blocks: &[Vec<u8>]| fold(DigestMode::Full, blocks.len(), |i| block_digest(&blocks[i]));
        let right = of(&blocks);
        let mut flipped = blocks.clone();
        flipped[7][3] ^= 1;
        let mut swapped = blocks.clone();
        swapped.swap(2, 3);
        assert_ne!(of(&flipped), right);
        assert_ne!(of(&swapped), right);
        assert_eq!(of(&blocks), right);
    }

    #[test]
    fn sampling_covers_the_last_block() {
        let covered: Vec<usize> = (0..20).filter(|i| DigestMode::Sampled.covers(*i, 20)).collect();
        assert_eq!(covered, [0, 16, 19]);
    }

    #[test]
    fn a_digest_survives_json() {
        let digest = Digest { mode: DigestMode::Full, value: u64::MAX - 1 };
        let text = serde_json::to_string(&digest).unwrap();
        assert_eq!(serde_json::from_str::<Digest>(&text).unwrap(), digest);
    }
}
