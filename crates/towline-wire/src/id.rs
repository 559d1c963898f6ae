//! Names and numbers that identify things across processes. Newtypes, so that a lease is never taken for a region.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// An engine: one model served by one or more ranks. Printed as a UUID, like vLLM's `remote_engine_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineId(uuid::Uuid);

impl EngineId {
    /// From 16 bytes, for example random ones made by the shell.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(uuid::Builder::from_random_bytes(bytes).into_uuid())
    }

    /// The 16 bytes as they stand in a card.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// Reads the bytes of a card.
    ///
    /// # Errors
    /// [`IdError::EngineLength`] unless there are exactly 16.
    pub fn from_slice(bytes: &[u8]) -> Result<Self, IdError> {
        uuid::Uuid::from_slice(bytes).map(Self).map_err(|_| IdError::EngineLength { length: bytes.len() })
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for EngineId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        uuid::Uuid::parse_str(text)
            .map(Self)
            .map_err(|_| IdError::EngineText { text: text.chars().take(64).collect() })
    }
}

/// An agent's name: 1 to 128 of `A-Z a-z 0-9 . _ - /`, unique among the agents that talk to each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct AgentName(String);

impl AgentName {
    /// Longest name, in bytes: it appears in every log line and metric label.
    pub const LEN_MAX: usize = 128;

    /// Checks and takes a name.
    ///
    /// # Errors
    /// [`IdError::AgentName`] when it is empty, too long or has another character.
    pub fn new(name: impl Into<String>) -> Result<Self, IdError> {
        let name = name.into();
        let fits = (1..=Self::LEN_MAX).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b));
        if fits { Ok(Self(name)) } else { Err(IdError::AgentName { name: name.chars().take(160).collect() }) }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AgentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for AgentName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_id! {
    /// A region within one agent's boot epoch; never reused in it.
    RegionId(u32)
}
number_id! {
    /// A lease within one agent's boot epoch; never reused in it.
    LeaseId(u64)
}
number_id! {
    /// Which incarnation of an agent: random for each process start, so that a restarted peer is never taken for
    /// the old one.
    BootEpoch(u64)
}
number_id! {
    /// What a fence slot holds: grows with every lease granted or revoked, never reused within a boot epoch.
    Generation(u64)
}

/// Why an id was not accepted.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum IdError {
    /// Give an agent name in the accepted characters and length.
    #[error("agent name {name:?} is not 1 to 128 of A-Z a-z 0-9 . _ - /")]
    AgentName {
        /// The name, cut to 160 characters.
        name: String,
    },
    /// The card or message is corrupt or of another version.
    #[error("an engine id has 16 bytes, not {length}")]
    EngineLength {
        /// Bytes found.
        length: usize,
    },
    /// Give a UUID.
    #[error("engine id {text:?} is not a UUID")]
    EngineText {
        /// The text, cut to 64 characters.
        text: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_id_round_trips_as_text_and_bytes() {
        let id = EngineId::from_bytes([7; 16]);
        assert_eq!(id.to_string().parse::<EngineId>(), Ok(id));
        assert_eq!(EngineId::from_slice(id.as_bytes()), Ok(id));
        assert_eq!(EngineId::from_slice(&[1, 2]), Err(IdError::EngineLength { length: 2 }));
    }

    #[test]
    fn agent_name_refuses_what_would_break_a_log_line() {
        assert!(AgentName::new("prefill-0/rank.1").is_ok());
        for bad in ["", "a b", "a\nb", "é", &"x".repeat(129)] {
            assert!(AgentName::new(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
