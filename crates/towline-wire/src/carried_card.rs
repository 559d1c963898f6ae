//! A card as bytes that the caller carries: in a file, over HTTP, through etcd.
//!
//! Whoever carries it may be curious or broken, so it is sealed under the cluster's key, it names the address to dial, and
//! it ends. The seal is checked before anything behind it is decoded:
//!
//! ```text
//!  0        4         6     8         12        44
//!  | "TWLC" | version | 0 0 | len u32 | seal 32 | body: the `CarriedCard` message, len bytes |
//! ```
//! The seal is a MAC over version and body. A card that opens tells whom to dial and what to expect there; that the one
//! who answers *is* that agent, the handshake and the card fetched over it show again.

use prost::Message;
use thiserror::Error;

use crate::auth::{ClusterKey, Mac};
use crate::card::{AgentCard, CARD_BYTES_MAX, CardError};
use crate::control::v1;
use crate::engine_card::{ADDRESS_BYTES_MAX, is_address};
use crate::ticket::CLOCK_SKEW_S;

/// Version that this build writes and reads.
pub const CARRIED_CARD_VERSION: u16 = 1;
/// Most bytes of a carried card: the longest card, the longest address, and what holds them.
pub const CARRIED_CARD_BYTES_MAX: usize = HEAD_BYTES + CARD_BYTES_MAX + ADDRESS_BYTES_MAX + 32;
/// Bytes before the body.
pub const HEAD_BYTES: usize = 44;

const MAGIC: [u8; 4] = *b"TWLC";

/// A card, whole or partial, with what is needed to use it without a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedCard {
    /// The card.
    pub card: AgentCard,
    /// `host:port` of its agent.
    pub address: String,
    /// End by the agent's clock, in seconds since 1970; readers allow [`CLOCK_SKEW_S`].
    pub expires_unix_s: u64,
}

impl CarriedCard {
    /// The sealed bytes.
    ///
    /// # Errors
    /// [`CarriedCardError::Card`] for a card that passes its bounds, [`CarriedCardError::Address`].
    pub fn seal(&self, key: &ClusterKey) -> Result<Vec<u8>, CarriedCardError> {
        if !is_address(&self.address) {
            return Err(CarriedCardError::Address);
        }
        let card = self.card.to_wire();
        let length = card.encoded_len();
        if length > CARD_BYTES_MAX {
            return Err(CardError::TooLarge { length }.into());
        }
        let (address, expires_unix_s) = (self.address.clone(), self.expires_unix_s);
        let body = v1::CarriedCard { card: Some(card), address, expires_unix_s }.encode_to_vec();
        // The bound above keeps the length in 32 bits.
        let len = u32::try_from(body.len()).map_err(|_| CarriedCardError::TooLarge { length: body.len() })?;
        let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&CARRIED_CARD_VERSION.to_le_bytes());
        bytes.extend_from_slice(&[0, 0]);
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(seal(key, &body).as_bytes());
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }

    /// The card, if its form, its seal, its bounds and the time hold. `now_unix_s` is the reader's clock.
    ///
    /// # Errors
    /// [`CarriedCardError`]; nothing is allocated before the seal was found to hold.
    pub fn open(bytes: &[u8], key: &ClusterKey, now_unix_s: u64) -> Result<Self, CarriedCardError> {
        let (body, claimed) = split(bytes)?;
        if seal(key, body) != claimed {
            return Err(CarriedCardError::Seal);
        }
        let v1::CarriedCard { card, address, expires_unix_s } = v1::CarriedCard::decode(body)
            .map_err(|error| CarriedCardError::Malformed { detail: error.to_string() })?;
        let card = AgentCard::from_wire(card.unwrap_or_default())?;
        if !is_address(&address) {
            return Err(CarriedCardError::Address);
        }
        if now_unix_s > expires_unix_s.saturating_add(CLOCK_SKEW_S) {
            return Err(CarriedCardError::Expired { for_s: now_unix_s - expires_unix_s });
        }
        Ok(Self { card, address, expires_unix_s })
    }
}

/// Body and claimed seal of bytes that have the right form.
fn split(bytes: &[u8]) -> Result<(&[u8], Mac), CarriedCardError> {
    if bytes.len() > CARRIED_CARD_BYTES_MAX {
        return Err(CarriedCardError::TooLarge { length: bytes.len() });
    }
    let truncated = |expected| CarriedCardError::Truncated { expected, found: bytes.len() };
    let (head, body) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or_else(|| truncated(HEAD_BYTES))?;
    if head[..4] != MAGIC || head[6..8] != [0, 0] {
        return Err(CarriedCardError::NotACard);
    }
    let found = u16::from_le_bytes([head[4], head[5]]);
    if found != CARRIED_CARD_VERSION {
        return Err(CarriedCardError::Version { found });
    }
    let len = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
    let expected = HEAD_BYTES.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
    match bytes.len() {
        found if found < expected => return Err(truncated(expected)),
        found if found > expected => return Err(CarriedCardError::NotACard),
        _ => {}
    }
    let mut claimed = [0; 32];
    claimed.copy_from_slice(&head[12..]);
    Ok((body, Mac::from_bytes(claimed)))
}

fn seal(key: &ClusterKey, body: &[u8]) -> Mac {
    key.mac("towline 2026 carried card", &[&CARRIED_CARD_VERSION.to_le_bytes(), body])
}

/// Why a carried card is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CarriedCardError {
    /// Run the same release on both sides.
    #[error("the carried card has version {found}, this build reads {CARRIED_CARD_VERSION}")]
    Version {
        /// The card's version.
        found: u16,
    },
    /// Carry all of it.
    #[error("the carried card was cut short: {found} of {expected} bytes")]
    Truncated {
        /// Bytes there should be.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
    /// It is something else, or grew on the way.
    #[error("the bytes are no carried card")]
    NotACard,
    /// It is something else.
    #[error("{length} bytes are more than the {CARRIED_CARD_BYTES_MAX} of the longest carried card")]
    TooLarge {
        /// Bytes found.
        length: usize,
    },
    /// It was altered on the way, or sealed under another key: all agents must share the cluster key.
    #[error("the carried card's seal is broken: it was altered, or its agent holds another cluster key")]
    Seal,
    /// Get a fresh one from its agent.
    #[error("the carried card ended {for_s} s ago")]
    Expired {
        /// Seconds since its end, by the reader's clock.
        for_s: u64,
    },
    /// When sealing: give the agent an address that can be dialled. When opening: its agent is broken.
    #[error("the carried card's address is not host:port")]
    Address,
    /// Its agent is broken: the seal is right and the body is not.
    #[error("malformed carried card: {detail}")]
    Malformed {
        /// The decoder's words.
        detail: String,
    },
    /// The card in it is refused.
    #[error(transparent)]
    Card(#[from] CardError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::{Fingerprint, PLACE_BYTES_MAX, RegionCard};
    use crate::id::{AgentName, BootEpoch, EngineId, RegionId};

    fn key() -> ClusterKey {
        ClusterKey::from_bytes([7; 32])
    }

    fn carried() -> CarriedCard {
        let region = RegionCard {
            id: RegionId(1),
            len_bytes: 4096,
            place: "host".into(),
            keys: vec![],
            peer_writable: false,
        };
        let card = AgentCard {
            agent: AgentName::new("prefill-0").unwrap(),
            engine: EngineId::from_bytes([3; 16]),
            boot_epoch: BootEpoch(9),
            endpoints: vec![],
            regions: vec![region],
            fingerprint: Fingerprint::default(),
            fence_region: None,
            kv_region: Some(RegionId(1)),
            revision: 4,
            place: String::new(),
        };
        CarriedCard { card, address: "10.0.0.4:7000".into(), expires_unix_s: 1_000 }
    }

    fn open(bytes: &[u8]) -> Result<CarriedCard, CarriedCardError> {
        CarriedCard::open(bytes, &key(), 1_000)
    }

    #[test]
    fn what_is_sealed_opens_until_its_end() {
        let bytes = carried().seal(&key()).unwrap();
        assert_eq!(open(&bytes), Ok(carried()));
        assert_eq!(CarriedCard::open(&bytes, &key(), 1_000 + CLOCK_SKEW_S), Ok(carried()));
        let late = CarriedCard::open(&bytes, &key(), 1_001 + CLOCK_SKEW_S);
        assert_eq!(late, Err(CarriedCardError::Expired { for_s: 61 }));
    }

    #[test]
    fn every_altered_byte_and_every_cut_is_refused() {
        let bytes = carried().seal(&key()).unwrap();
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 1;
            assert!(open(&altered).is_err(), "byte {at}");
            let cut = open(&bytes[..at]).unwrap_err();
            assert!(matches!(cut, CarriedCardError::Truncated { found, .. } if found == at), "{cut}");
        }
        let mut body = bytes.clone();
        *body.last_mut().unwrap() ^= 1;
        assert_eq!(open(&body), Err(CarriedCardError::Seal));
        let other = CarriedCard::open(&bytes, &ClusterKey::from_bytes([8; 32]), 1_000);
        assert_eq!(other, Err(CarriedCardError::Seal));
    }

    #[test]
    fn other_versions_strangers_and_giants_are_told_apart() {
        let mut bytes = carried().seal(&key()).unwrap();
        bytes[4] = 2;
        assert_eq!(open(&bytes), Err(CarriedCardError::Version { found: 2 }));
        bytes[0] = b'X';
        assert_eq!(open(&bytes), Err(CarriedCardError::NotACard));
        let longer = [carried().seal(&key()).unwrap(), vec![0]].concat();
        assert_eq!(open(&longer), Err(CarriedCardError::NotACard));
        let giant = vec![0; CARRIED_CARD_BYTES_MAX + 1];
        assert_eq!(open(&giant), Err(CarriedCardError::TooLarge { length: giant.len() }));
    }

    #[test]
    fn a_card_or_address_that_breaks_its_bounds_is_not_sealed() {
        let mut wide = carried();
        wide.card.fingerprint.layout = "x".repeat(CARD_BYTES_MAX);
        assert!(matches!(wide.seal(&key()), Err(CarriedCardError::Card(CardError::TooLarge { .. }))));
        let nowhere = CarriedCard { address: "nowhere".into(), ..carried() };
        assert_eq!(nowhere.seal(&key()), Err(CarriedCardError::Address));
        // The longest of each fits the bound.
        let mut longest = carried();
        longest.card.place = "x".repeat(PLACE_BYTES_MAX);
        longest.address = format!("{}:7000", "h".repeat(ADDRESS_BYTES_MAX - 5));
        longest.expires_unix_s = u64::MAX;
        let room = CARD_BYTES_MAX - longest.card.to_wire().encoded_len();
        longest.card.fingerprint.layout = "x".repeat(room - 6);
        let bytes = longest.seal(&key()).unwrap();
        assert!(CARD_BYTES_MAX - longest.card.to_wire().encoded_len() < 8, "nearly the bound");
        assert_eq!(open(&bytes), Ok(longest));
    }
}
