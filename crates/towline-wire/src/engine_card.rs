//! The engine's card: an engine of several ranks as its peers see it, versioned, self-describing and bounded.
//!
//! It says how heads and layers are shared over ranks, what the KV means, and how to reach each rank: by its agent's
//! whole card, or by an address to ask for that card (engines of many ranks, whose cards together are too long). It
//! travels only inside an authenticated session, as the answer to `EngineCardRequest`. Its encoding is the `EngineCard`
//! message of the control protocol. The layout is that of the whole engine, and stands once, in the fingerprint.

use prost::Message;
use thiserror::Error;

use crate::card::{
    AgentCard, CardError, Fingerprint, Incompatible, fingerprint_from_wire, fingerprint_to_wire,
};
use crate::control::v1::{self, engine_rank::Agent};
use crate::id::{AgentName, EngineId, IdError};
use crate::layout::{KvLayout, LayoutError};
use crate::shard::{RANKS_MAX, ShardError, Sharding};

/// Version that this build writes and reads.
pub const ENGINE_CARD_VERSION: u32 = 1;
/// Most bytes of an encoded engine card: it fits a control frame with room.
pub const ENGINE_CARD_BYTES_MAX: usize = 64 * 1024;
/// Longest address of an agent in bytes: a host name of 253 and a port.
pub const ADDRESS_BYTES_MAX: usize = 260;

/// How to reach a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankAgent {
    /// Its agent's card.
    Card(Box<AgentCard>),
    /// Where to ask for it. Check what comes with [`EngineCard::admit`].
    Address {
        /// The agent's name.
        agent: AgentName,
        /// `host:port`.
        address: String,
    },
}

impl RankAgent {
    /// The agent's name.
    pub fn agent(&self) -> &AgentName {
        match self {
            Self::Card(card) => &card.agent,
            Self::Address { agent, .. } => agent,
        }
    }
}

/// What an engine of one or more ranks offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineCard {
    /// Its id.
    pub engine: EngineId,
    /// How its ranks share the KV.
    pub sharding: Sharding,
    /// The KV of the whole engine: all heads, all layers.
    pub layout: KvLayout,
    /// What its KV means; `layout` is [`EngineCard::layout`] as text.
    pub fingerprint: Fingerprint,
    /// How to reach each rank, by the rank's number.
    pub ranks: Vec<RankAgent>,
}

impl EngineCard {
    /// Whether KV of `peer` means the same. Layout and sharding may differ: [`crate::reshard::plan`] decides on them.
    ///
    /// # Errors
    /// [`Incompatible`] naming the first field that differs.
    pub fn check(&self, peer: &Self) -> Result<(), Incompatible> {
        self.fingerprint.check_meaning(&peer.fingerprint)
    }

    /// Checks an agent's card, fetched from rank `index`, against this card.
    ///
    /// # Errors
    /// [`EngineCardError::Rank`] when it is another agent's or engine's, or there is no such rank;
    /// [`EngineCardError::Incompatible`] when its KV means something else.
    pub fn admit(&self, index: u32, card: &AgentCard) -> Result<(), EngineCardError> {
        let wrong = |what| Err(EngineCardError::Rank { index, what });
        let Some(expected) = self.ranks.get(index as usize) else { return wrong("there is no such rank") };
        if card.agent != *expected.agent() {
            return wrong("its card is another agent's");
        }
        if card.engine != self.engine {
            return wrong("its card is another engine's");
        }
        self.fingerprint
            .check(&card.fingerprint)
            .map_err(|mismatch| EngineCardError::Incompatible { index, mismatch })
    }

    /// Checks what [`EngineCard::decode`] promises; call it on a card made here, before it is sent.
    ///
    /// # Errors
    /// [`EngineCardError`] naming what is wrong.
    pub fn validate(&self) -> Result<(), EngineCardError> {
        self.layout.validate()?;
        self.layout.check_sharding(&self.sharding)?;
        if self.fingerprint.layout != self.layout.describe() {
            return Err(EngineCardError::LayoutText {
                detail: "it is not the layout as this build writes it",
            });
        }
        let ranks = self.sharding.ranks().count();
        if self.ranks.len() != ranks {
            return Err(EngineCardError::Count { found: self.ranks.len(), ranks });
        }
        for (index, agent) in (0..).zip(&self.ranks) {
            let wrong = |what| Err(EngineCardError::Rank { index, what });
            if self.ranks.iter().filter(|other| other.agent() == agent.agent()).count() > 1 {
                return wrong("its agent is also another rank's");
            }
            match agent {
                RankAgent::Card(card) => self.admit(index, card)?,
                RankAgent::Address { address, .. } if !is_address(address) => {
                    return wrong("its address is not host:port");
                }
                RankAgent::Address { .. } => {}
            }
        }
        let length = self.to_wire().encoded_len();
        if length > ENGINE_CARD_BYTES_MAX { Err(EngineCardError::TooLarge { length }) } else { Ok(()) }
    }

    /// As a control message.
    pub fn to_wire(&self) -> v1::EngineCard {
        let ranks = self.sharding.ranks().zip(&self.ranks).map(|(rank, agent)| v1::EngineRank {
            tp_index: rank.tp_index,
            pp_index: rank.pp_index,
            agent: Some(match agent {
                RankAgent::Card(card) => Agent::Card(card.to_wire()),
                RankAgent::Address { agent, address } => {
                    Agent::Address(v1::AgentAddress { agent: agent.to_string(), address: address.clone() })
                }
            }),
        });
        v1::EngineCard {
            version: ENGINE_CARD_VERSION,
            engine: self.engine.as_bytes().to_vec(),
            tp_size: self.sharding.tp_size,
            stage_layers: self.sharding.stage_layers.clone(),
            fingerprint: Some(fingerprint_to_wire(&self.fingerprint)),
            ranks: ranks.collect(),
        }
    }

    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        self.to_wire().encode_to_vec()
    }

    /// Reads a card that a peer sent as bytes.
    ///
    /// # Errors
    /// [`EngineCardError`] naming what is wrong; nothing is allocated for a card that is too long.
    pub fn decode(bytes: &[u8]) -> Result<Self, EngineCardError> {
        if bytes.len() > ENGINE_CARD_BYTES_MAX {
            return Err(EngineCardError::TooLarge { length: bytes.len() });
        }
        let card = v1::EngineCard::decode(bytes)
            .map_err(|error| EngineCardError::Malformed { detail: error.to_string() })?;
        Self::from_wire(card)
    }

    /// Checks a card that a peer sent.
    ///
    /// # Errors
    /// [`EngineCardError`] naming what is wrong.
    pub fn from_wire(card: v1::EngineCard) -> Result<Self, EngineCardError> {
        if card.version != ENGINE_CARD_VERSION {
            return Err(EngineCardError::Version { found: card.version });
        }
        let length = card.encoded_len();
        if length > ENGINE_CARD_BYTES_MAX {
            return Err(EngineCardError::TooLarge { length });
        }
        let fingerprint = fingerprint_from_wire(card.fingerprint.unwrap_or_default());
        let layout: KvLayout = serde_json::from_str(&fingerprint.layout)
            .map_err(|_| EngineCardError::LayoutText { detail: "it is no layout" })?;
        let sharding = Sharding { tp_size: card.tp_size, stage_layers: card.stage_layers };
        sharding.validate()?;
        let ranks = ranks_from_wire(card.ranks, &sharding)?;
        let card = Self { engine: EngineId::from_slice(&card.engine)?, sharding, layout, fingerprint, ranks };
        card.validate().map(|()| card)
    }
}

/// In whatever order they came, the ranks by number, each there once.
fn ranks_from_wire(
    sent: Vec<v1::EngineRank>,
    sharding: &Sharding,
) -> Result<Vec<RankAgent>, EngineCardError> {
    let count = sharding.ranks().count();
    if sent.len() > RANKS_MAX as usize {
        return Err(EngineCardError::Count { found: sent.len(), ranks: count });
    }
    let mut ranks: Vec<Option<RankAgent>> = vec![None; count];
    for rank in sent {
        let place =
            sharding.ranks().find(|place| (place.tp_index, place.pp_index) == (rank.tp_index, rank.pp_index));
        let Some(index) = place.map(|place| place.index()) else {
            return Err(EngineCardError::Place { tp_index: rank.tp_index, pp_index: rank.pp_index });
        };
        let agent = match rank.agent {
            Some(Agent::Card(card)) => RankAgent::Card(Box::new(
                AgentCard::from_wire(card).map_err(|error| EngineCardError::Card { index, error })?,
            )),
            Some(Agent::Address(v1::AgentAddress { agent, address })) => {
                RankAgent::Address { agent: AgentName::new(agent)?, address }
            }
            None => return Err(EngineCardError::Rank { index, what: "it has neither card nor address" }),
        };
        if ranks[index as usize].replace(agent).is_some() {
            return Err(EngineCardError::Rank { index, what: "it is listed twice" });
        }
    }
    let missing = |index| EngineCardError::Rank { index, what: "it is missing" };
    (0..).zip(ranks).map(|(index, rank)| rank.ok_or_else(|| missing(index))).collect()
}

/// `host:port`, the host not empty. Whether it can be dialled shows when it is.
pub(crate) fn is_address(text: &str) -> bool {
    text.len() <= ADDRESS_BYTES_MAX
        && text.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && host.bytes().all(|b| b.is_ascii_graphic()) && port.parse::<u16>().is_ok()
        })
}

/// Why an engine's card was refused. Unless said otherwise, the peer is broken or hostile.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EngineCardError {
    /// Run the same release on both sides.
    #[error("the engine card has version {found}, this build reads {ENGINE_CARD_VERSION}")]
    Version {
        /// The card's version.
        found: u32,
    },
    /// When this is our own card: give addresses in place of agents' cards.
    #[error("an engine card of {length} bytes is longer than {ENGINE_CARD_BYTES_MAX}")]
    TooLarge {
        /// Bytes found.
        length: usize,
    },
    /// It was cut short, or is none.
    #[error("malformed engine card: {detail}")]
    Malformed {
        /// The decoder's words.
        detail: String,
    },
    /// Run the same release on both sides; a newer one may know more of layouts.
    #[error("the fingerprint's layout: {detail}")]
    LayoutText {
        /// What is wrong.
        detail: &'static str,
    },
    /// The layout breaks its bounds.
    #[error("the engine's layout: {0}")]
    Layout(#[from] LayoutError),
    /// Layout and ranks do not fit each other.
    #[error("the engine's ranks: {0}")]
    Sharding(#[from] ShardError),
    /// There are more or fewer ranks than the sharding has.
    #[error("the engine card lists {found} ranks, the engine has {ranks}")]
    Count {
        /// Ranks listed.
        found: usize,
        /// Ranks there must be.
        ranks: usize,
    },
    /// A rank is listed that the engine can't have.
    #[error("the engine has no rank at tp {tp_index}, pp {pp_index}")]
    Place {
        /// Its tensor-parallel index.
        tp_index: u32,
        /// Its stage.
        pp_index: u32,
    },
    /// One rank is wrong.
    #[error("rank {index} of the engine: {what}")]
    Rank {
        /// The rank's number.
        index: u32,
        /// What is wrong.
        what: &'static str,
    },
    /// One rank's KV means something else: it serves other weights, or was restarted with other options.
    #[error("rank {index} of the engine: {mismatch}")]
    Incompatible {
        /// The rank's number.
        index: u32,
        /// The field that differs.
        mismatch: Incompatible,
    },
    /// One rank's agent card is refused.
    #[error("rank {index} of the engine: {error}")]
    Card {
        /// The rank's number.
        index: u32,
        /// Why.
        error: CardError,
    },
    /// An id is malformed.
    #[error("malformed engine card: {0}")]
    Id(#[from] IdError),
}

#[cfg(test)]
mod tests;
