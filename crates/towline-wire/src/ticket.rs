//! The ticket: an owner's sealed permission to read the KV of one request.
//!
//! It travels as the `towline` object inside `kv_transfer_params`, through routers that may be curious or broken.
//! Decode dials only the address that the seal covers and refuses a ticket that is unsealed, altered, for another
//! audience, or past its end. The seal is a MAC under the cluster's key over the canonical JSON of the fields.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::auth::{ClusterKey, Mac};
use crate::blocks::{BlockList, BlockListError};
use crate::digest::Digests;
use crate::id::{AgentName, BootEpoch, EngineId, Generation, LeaseId, RegionId};

/// Schema number of a ticket.
pub const TICKET_SCHEMA: u32 = 1;

/// Which KV may be read, where, until when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ticket {
    /// [`TICKET_SCHEMA`].
    pub schema: u32,
    /// The owner's engine.
    pub engine: EngineId,
    /// The owner's agent.
    pub agent: AgentName,
    /// The owner's incarnation, as text: 64-bit numbers do not survive every JSON reader.
    #[serde(with = "text")]
    pub boot_epoch: BootEpoch,
    /// Where the owner's agent listens: `host:port`.
    pub address: String,
    /// The lease.
    #[serde(with = "text")]
    pub lease: LeaseId,
    /// What the fence slot must hold after the data was read.
    #[serde(with = "text")]
    pub generation: Generation,
    /// Which slot.
    pub slot: u32,
    /// The region that holds the blocks.
    pub region: RegionId,
    /// The region that holds the fence slots.
    pub fence_region: RegionId,
    /// The blocks, in the sequence's order.
    pub blocks: BlockList,
    /// Tokens of each block.
    pub block_tokens: u32,
    /// Tokens whose KV is in the blocks: only full blocks are handed over, so blocks × `block_tokens`. Zero for a
    /// prompt shorter than a block.
    pub tokens: u32,
    /// Hash of all the prompt's tokens, so that decode never joins this KV to another prompt.
    pub prompt_hash: String,
    /// Digests of the blocks.
    pub digests: Digests,
    /// Who may use it: a deployment's name. A ticket of one deployment is refused by another that shares the key.
    pub audience: String,
    /// End by the owner's wall clock, seconds since 1970: a coarse guard. The fence decides.
    pub expires_unix_s: u64,
}

/// A ticket with its seal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SealedTicket {
    /// The fields.
    #[serde(flatten)]
    pub ticket: Ticket,
    /// 64 hexadecimal digits.
    pub seal: String,
}

impl Ticket {
    /// Seals the ticket under the cluster's key.
    pub fn seal(self, key: &ClusterKey) -> SealedTicket {
        let seal = self.mac(key).to_hex();
        SealedTicket { ticket: self, seal }
    }

    fn mac(&self, key: &ClusterKey) -> Mac {
        // serde writes the fields in the order of the struct, so both sides see the same bytes.
        let canonical = serde_json::to_vec(self).unwrap_or_default();
        key.mac("towline 2026 ticket", &[&canonical])
    }
}

impl SealedTicket {
    /// The ticket, if the seal, the audience, the time and the arithmetic hold. `now_unix_s` is the reader's clock; clocks may
    /// differ by [`CLOCK_SKEW_S`].
    ///
    /// # Errors
    /// [`TicketError`]: refuse the request.
    pub fn open(self, key: &ClusterKey, audience: &str, now_unix_s: u64) -> Result<Ticket, TicketError> {
        let claimed = Mac::from_hex(&self.seal).ok_or(TicketError::Seal)?;
        if self.ticket.mac(key) != claimed {
            return Err(TicketError::Seal);
        }
        let ticket = self.ticket;
        if ticket.schema != TICKET_SCHEMA {
            return Err(TicketError::Schema { found: ticket.schema });
        }
        if ticket.audience != audience {
            return Err(TicketError::Audience { found: ticket.audience });
        }
        if now_unix_s > ticket.expires_unix_s.saturating_add(CLOCK_SKEW_S) {
            return Err(TicketError::Expired);
        }
        ticket.blocks.validate(u64::MAX)?;
        let room = ticket.blocks.indices.len() as u64 * u64::from(ticket.block_tokens);
        if u64::from(ticket.tokens) != room || !ticket.digests.is_complete(ticket.blocks.indices.len()) {
            return Err(TicketError::Tokens { tokens: ticket.tokens, room });
        }
        Ok(ticket)
    }
}

/// How far two hosts' wall clocks may differ, in seconds.
pub const CLOCK_SKEW_S: u64 = 60;

mod text {
    use std::fmt::Display;

    use serde::{Deserialize, Deserializer, Serializer};

    use crate::id::{BootEpoch, Generation, LeaseId};

    pub(super) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(super) fn deserialize<'de, T: From64, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map(T::from_64).map_err(serde::de::Error::custom)
    }

    pub(super) trait From64 {
        fn from_64(value: u64) -> Self;
    }

    impl From64 for BootEpoch {
        fn from_64(value: u64) -> Self {
            Self(value)
        }
    }

    impl From64 for LeaseId {
        fn from_64(value: u64) -> Self {
            Self(value)
        }
    }

    impl From64 for Generation {
        fn from_64(value: u64) -> Self {
            Self(value)
        }
    }
}

/// Why a ticket is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TicketError {
    /// It was altered, or sealed under another key: prefill and decode must share the cluster key.
    #[error("the ticket's seal is broken: it was altered, or prefill holds another cluster key")]
    Seal,
    /// Run the same release on both sides.
    #[error("the ticket has schema {found}, this build reads {TICKET_SCHEMA}")]
    Schema {
        /// The ticket's schema.
        found: u32,
    },
    /// It belongs to another deployment.
    #[error("the ticket is for {found:?}")]
    Audience {
        /// The ticket's audience.
        found: String,
    },
    /// Ask prefill again.
    #[error("the ticket is past its end")]
    Expired,
    /// The owner is broken.
    #[error("{tokens} tokens and their digests do not fill blocks of {room} tokens")]
    Tokens {
        /// Tokens claimed.
        tokens: u32,
        /// Tokens that the blocks hold.
        room: u64,
    },
    /// The owner is broken.
    #[error("the ticket's blocks: {0}")]
    Blocks(#[from] BlockListError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::{DigestMode, Digests};

    fn ticket() -> Ticket {
        Ticket {
            schema: TICKET_SCHEMA,
            engine: EngineId::from_bytes([1; 16]),
            agent: AgentName::new("p").unwrap(),
            boot_epoch: BootEpoch(u64::MAX),
            address: "127.0.0.1:7000".into(),
            lease: LeaseId(4),
            generation: Generation(u64::MAX - 7),
            slot: 1,
            region: RegionId(1),
            fence_region: RegionId(2),
            blocks: BlockList { group: 0, bases: vec![0], block_bytes: 64, stride: 64, indices: vec![5, 2] },
            block_tokens: 16,
            tokens: 32,
            prompt_hash: "00".into(),
            digests: Digests { mode: DigestMode::Full, values: vec![17, 18] },
            audience: "default".into(),
            expires_unix_s: 1000,
        }
    }

    fn key() -> ClusterKey {
        ClusterKey::from_bytes([6; 32])
    }

    fn through_json(sealed: &SealedTicket) -> serde_json::Value {
        serde_json::to_value(sealed).unwrap()
    }

    #[test]
    fn a_sealed_ticket_opens_after_a_trip_through_json() {
        let sealed: SealedTicket = serde_json::from_value(through_json(&ticket().seal(&key()))).unwrap();
        assert_eq!(sealed.open(&key(), "default", 1000), Ok(ticket()));
    }

    #[test]
    fn a_prompt_shorter_than_a_block_has_a_ticket_without_blocks() {
        let blocks = BlockList { indices: vec![], ..ticket().blocks };
        let none = Ticket { blocks, tokens: 0, digests: Digests::default(), ..ticket() };
        assert_eq!(none.clone().seal(&key()).open(&key(), "default", 0), Ok(none));
    }

    #[test]
    fn any_altered_field_breaks_the_seal() {
        let json = through_json(&ticket().seal(&key()));
        for field in json.as_object().unwrap().keys() {
            let mut altered = json.clone();
            let value = match &json[field] {
                serde_json::Value::String(text) if field == "engine" => {
                    EngineId::from_bytes([text.as_bytes()[0]; 16]).to_string().into()
                }
                serde_json::Value::String(text) if text.parse::<u64>().is_ok() => "3".into(),
                serde_json::Value::String(text) if field == "seal" => {
                    text.chars().rev().collect::<String>().into()
                }
                serde_json::Value::String(text) => format!("{text}x").into(),
                serde_json::Value::Number(number) => (number.as_u64().unwrap() + 1).into(),
                _ => continue,
            };
            altered[field] = value;
            let sealed: SealedTicket = serde_json::from_value(altered).unwrap();
            assert_eq!(sealed.open(&key(), "default", 1000).unwrap_err(), TicketError::Seal, "{field}");
        }
    }

    #[test]
    fn other_keys_audiences_and_late_readers_are_refused() {
        let sealed = ticket().seal(&key());
        assert_eq!(
            sealed.clone().open(&ClusterKey::from_bytes([7; 32]), "default", 0).unwrap_err(),
            TicketError::Seal
        );
        assert!(matches!(sealed.clone().open(&key(), "other", 0), Err(TicketError::Audience { .. })));
        assert_eq!(
            sealed.open(&key(), "default", 1000 + CLOCK_SKEW_S + 1).unwrap_err(),
            TicketError::Expired
        );
        let more = Ticket { tokens: 33, ..ticket() }.seal(&key());
        assert!(matches!(more.open(&key(), "default", 0), Err(TicketError::Tokens { .. })));
    }
}
