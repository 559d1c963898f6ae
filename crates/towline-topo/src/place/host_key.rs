//! A name for a host that tells nothing else about it.
//!
//! machine-id(5) asks that the id not be exposed where it is not trusted, and that applications pass on a hash of it
//! under a key of their own; the boot id is treated alike. BLAKE3's derive-key mode is that hash: without the id, nobody
//! can make the key, and the key of another application is another one.

use std::fmt;

use serde::{Deserialize, Serialize};

/// 128 bits of a keyed hash, printed as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostKey([u8; 16]);

impl HostKey {
    /// Of `/proc/sys/kernel/random/boot_id`, a UUID.
    pub(crate) fn of_boot_id(text: &str) -> Option<Self> {
        Some(Self::derive("towline 2026 place boot id", id(text)?))
    }

    /// Of `/etc/machine-id`, 32 hexadecimal digits.
    pub(crate) fn of_machine_id(text: &str) -> Option<Self> {
        Some(Self::derive("towline 2026 place machine id", id(text)?))
    }

    fn derive(context: &str, id: u128) -> Self {
        let hash = blake3::derive_key(context, &id.to_be_bytes());
        let (key, _) = hash.split_first_chunk().expect("a hash of 32 bytes has 16");
        Self(*key)
    }
}

/// 32 hexadecimal digits, dashes aside. An id of zeros is one that nobody set.
fn id(text: &str) -> Option<u128> {
    let digits = text.replace('-', "");
    hexadecimal(&digits).filter(|id| *id != 0)
}

fn hexadecimal(digits: &str) -> Option<u128> {
    let fits = digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    fits.then(|| u128::from_str_radix(digits, 16).ok()).flatten()
}

impl fmt::Display for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKey({self})")
    }
}

impl From<HostKey> for String {
    fn from(key: HostKey) -> Self {
        key.to_string()
    }
}

impl TryFrom<String> for HostKey {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let key = hexadecimal(&text).ok_or("a host key is 32 hexadecimal digits")?;
        Ok(Self(key.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT_ID: &str = "84d5f96e-95d7-4b2c-921c-0c3682db3f93";

    #[test]
    fn a_key_shows_nothing_of_its_id() {
        let key = HostKey::of_boot_id(BOOT_ID).unwrap();
        assert_ne!(key.to_string(), BOOT_ID.replace('-', ""));
        assert_eq!(HostKey::of_boot_id(&BOOT_ID.to_uppercase()), Some(key));
    }

    #[test]
    fn boot_and_machine_ids_have_keys_of_their_own() {
        let id = BOOT_ID.replace('-', "");
        assert_ne!(HostKey::of_boot_id(&id), HostKey::of_machine_id(&id));
    }

    #[test]
    fn an_id_that_nobody_set_has_no_key() {
        for text in
            ["", "uninitialized", "0".repeat(32).as_str(), "84d5f96e", &"g".repeat(32), &"+1".repeat(16)]
        {
            assert_eq!(HostKey::of_machine_id(text), None, "{text}");
        }
    }

    #[test]
    fn a_key_is_read_as_it_is_printed() {
        let key = HostKey::of_boot_id(BOOT_ID).unwrap();
        let json = serde_json::to_string(&key).unwrap();
        assert_eq!(serde_json::from_str::<HostKey>(&json).unwrap(), key);
        assert!(serde_json::from_str::<HostKey>("\"84d5\"").is_err());
    }
}
