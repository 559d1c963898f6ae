//! Prefix keys: what names the KV of a full block, so that equal prefixes share it.
//!
//! `key(n) = first 128 bits of BLAKE3-keyed(seed; key(n-1) ‖ tokens of block n)`, with the seed derived from the
//! engine's fingerprint and a salt (tenant or adapter). Two prompts share a block exactly when all tokens up to its
//! end are equal, on engines whose KV is interchangeable, for the same tenant. 128 bits: a collision among 2^40
//! blocks has a chance under 2^-48, and an attacker cannot aim for one without the seed.

use serde::{Deserialize, Serialize};

/// The key of a full block of tokens, and of everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PrefixKey([u8; 16]);

impl PrefixKey {
    /// As 32 hexadecimal digits.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Makes the keys of one engine and salt.
#[derive(Clone, Debug)]
pub struct PrefixHasher {
    seed: [u8; 32],
}

impl PrefixHasher {
    /// For the KV that `fingerprint` describes and one tenant's or adapter's `salt` (empty for none).
    pub fn new(fingerprint: &str, salt: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("towline 2026 prefix key seed");
        hasher
            .update(&(fingerprint.len() as u64).to_le_bytes())
            .update(fingerprint.as_bytes())
            .update(salt.as_bytes());
        Self { seed: *hasher.finalize().as_bytes() }
    }

    /// The key of the block that follows `parent` (`None` at the start).
    pub fn next(&self, parent: Option<PrefixKey>, tokens: &[u32]) -> PrefixKey {
        let mut hasher = blake3::Hasher::new_keyed(&self.seed);
        hasher.update(&parent.map_or([0; 16], |key| key.0));
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        let mut key = [0; 16];
        hasher.finalize_xof().fill(&mut key);
        PrefixKey(key)
    }

    /// The keys of all full blocks of `tokens`.
    pub fn keys(&self, tokens: &[u32], block_tokens: usize) -> Vec<PrefixKey> {
        let mut parent = None;
        tokens
            .chunks_exact(block_tokens.max(1))
            .map(|block| {
                let key = self.next(parent, block);
                parent = Some(key);
                key
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_prefixes_share_keys_until_they_part() {
        let hasher = PrefixHasher::new("f", "");
        let a: Vec<u32> = (0..40).collect();
        let mut b = a.clone();
        b[20] = 999;
        let (a, b) = (hasher.keys(&a, 16), hasher.keys(&b, 16));
        assert_eq!((a.len(), a[0] == b[0], a[1] == b[1]), (2, true, false));
    }

    #[test]
    fn a_later_block_depends_on_every_earlier_one() {
        let hasher = PrefixHasher::new("f", "");
        let one = hasher.keys(&[1, 2, 3, 4], 2);
        let two = hasher.keys(&[9, 2, 3, 4], 2);
        assert_ne!(one[1], two[1]);
    }

    #[test]
    fn fingerprint_and_salt_separate_engines_and_tenants() {
        let key = |fingerprint, salt| PrefixHasher::new(fingerprint, salt).next(None, &[1]);
        assert_ne!(key("f", ""), key("g", ""));
        assert_ne!(key("f", "a"), key("f", "b"));
        assert_ne!(key("fa", ""), key("f", "a"));
    }
}
