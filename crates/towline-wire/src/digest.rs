//! Digests of KV blocks: a fast, non-cryptographic check that the bytes which arrived are the bytes that were computed.
//!
//! XXH3-64 runs near memory speed, so `full` costs one more read of the data on each side. It catches torn reads,
//! wrong offsets and flipped bits; it is no defence against a peer that lies (such a peer could lie in the KV itself).

use serde::{Deserialize, Serialize};
use thiserror::Error;
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
            Self::Sampled => position.is_multiple_of(SAMPLE_EVERY) || position + 1 == count,
            Self::Full => true,
        }
    }
}

/// The digests of the covered blocks of a list, in order. A reader that has some of the blocks already checks only
/// those that it pulled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    /// Which blocks they cover.
    pub mode: DigestMode,
    /// XXH3-64 of each covered block. In JSON one text of 16 hexadecimal digits a block: 64-bit numbers do not survive
    /// every JSON reader, and a list of texts would be longer.
    #[serde(with = "hex_words")]
    pub values: Vec<u64>,
}

/// Block `position` is not what its owner computed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("block {position} has digest {found:016x}, its owner computed {promised:016x}")]
pub struct DigestMismatch {
    /// Position in the list.
    pub position: usize,
    /// The owner's digest.
    pub promised: u64,
    /// The digest of what arrived.
    pub found: u64,
}

/// The digest of one block's bytes; kept with a full block, since a full block never changes.
pub fn block_digest(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// [`block_digest`] of a block that comes in pieces.
#[derive(Clone, Default)]
pub struct BlockDigest(Xxh3);

impl BlockDigest {
    /// Takes the next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// The digest of all pieces so far.
    pub fn finish(&self) -> u64 {
        self.0.digest()
    }
}

impl Digests {
    /// Digests of those of `count` blocks that `mode` covers; `of_block` is asked for each in order.
    pub fn of(mode: DigestMode, count: usize, of_block: impl FnMut(usize) -> u64) -> Self {
        Self { mode, values: covered(mode, count).map(of_block).collect() }
    }

    /// Whether there is a digest for exactly the blocks that the mode covers of `count`.
    pub fn is_complete(&self, count: usize) -> bool {
        self.values.len() == covered(self.mode, count).count()
    }

    /// Compares the covered blocks from position `first` on; `of_block` digests what arrived.
    ///
    /// # Errors
    /// The first [`DigestMismatch`].
    pub fn check(
        &self,
        first: usize,
        count: usize,
        mut of_block: impl FnMut(usize) -> u64,
    ) -> Result<(), DigestMismatch> {
        for (position, promised) in
            covered(self.mode, count).zip(&self.values).filter(|(position, _)| *position >= first)
        {
            let found = of_block(position);
            if found != *promised {
                return Err(DigestMismatch { position, promised: *promised, found });
            }
        }
        Ok(())
    }
}

fn covered(mode: DigestMode, count: usize) -> impl Iterator<Item = usize> {
    (0..count).filter(move |position| mode.covers(*position, count))
}

mod hex_words {
    use std::fmt::Write;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(words: &[u64], serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(words.len() * 16);
        for word in words {
            write!(text, "{word:016x}").map_err(serde::ser::Error::custom)?;
        }
        serializer.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
        let text = String::deserialize(deserializer)?;
        // `from_str_radix` would also take a sign.
        if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) || !text.len().is_multiple_of(16) {
            return Err(D::Error::custom("digests are 16 hexadecimal digits a block"));
        }
        let word =
            |chunk: &[u8]| u64::from_str_radix(&String::from_utf8_lossy(chunk), 16).map_err(D::Error::custom);
        text.as_bytes().chunks_exact(16).map(word).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks() -> Vec<Vec<u8>> {
        (0..20u8).map(|b| vec![b; 64]).collect()
    }

    fn digests(mode: DigestMode) -> Digests {
        Digests::of(mode, 20, |i| block_digest(&blocks()[i]))
    }

    #[test]
    fn a_flipped_bit_or_a_swapped_block_is_named() {
        let mut flipped = blocks();
        flipped[7][3] ^= 1;
        let mut swapped = blocks();
        swapped.swap(2, 3);
        let first = |blocks: &[Vec<u8>], from| {
            digests(DigestMode::Full).check(from, 20, |i| block_digest(&blocks[i]))
        };
        assert_eq!(first(&flipped, 0).unwrap_err().position, 7);
        assert_eq!(first(&swapped, 0).unwrap_err().position, 2);
        assert_eq!(first(&flipped, 8), Ok(()), "blocks before the first pulled one are the reader's own");
        assert_eq!(first(&blocks(), 0), Ok(()));
    }

    #[test]
    fn pieces_digest_like_the_whole() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| i.to_le_bytes()[0] ^ 0x5a).collect();
        let mut digest = BlockDigest::default();
        bytes.chunks(777).for_each(|piece| digest.update(piece));
        assert_eq!(digest.finish(), block_digest(&bytes));
    }

    #[test]
    fn sampling_covers_the_last_block() {
        let covered: Vec<usize> = covered(DigestMode::Sampled, 20).collect();
        assert_eq!(covered, [0, 16, 19]);
        assert!(digests(DigestMode::Sampled).is_complete(20));
        assert!(digests(DigestMode::Off).is_complete(20));
        assert!(!digests(DigestMode::Full).is_complete(19));
    }

    #[test]
    fn digests_survive_json_and_cut_ones_are_refused() {
        let text = serde_json::to_string(&digests(DigestMode::Full)).unwrap();
        assert_eq!(serde_json::from_str::<Digests>(&text).unwrap(), digests(DigestMode::Full));
        assert!(serde_json::from_str::<Digests>(r#"{"mode":"full","values":"0123"}"#).is_err());
        for values in ["zzzzzzzzzzzzzzzz", "+fffffffffffffff", "éééééééé"] {
            let text = format!(r#"{{"mode":"full","values":"{values}"}}"#);
            assert!(serde_json::from_str::<Digests>(&text).is_err(), "{values}");
        }
    }
}
