//! The card: what an agent offers its peers, versioned, self-describing and bounded.
//!
//! A card travels inside an authenticated session, or sealed as a [`CarriedCard`](crate::carried_card::CarriedCard). Its
//! encoding is the `Card` message of the control protocol. It changes while its agent lives, as regions come and go:
//! [`AgentCard::revision`] tells which of two is newer.

use thiserror::Error;

use crate::control::v1;
use crate::id::{AgentName, BootEpoch, EngineId, IdError, RegionId};
use crate::receipt::TransportKind;

/// Version that this build writes and reads.
pub const CARD_VERSION: u32 = 1;
/// Most bytes of an encoded card.
pub const CARD_BYTES_MAX: usize = 64 * 1024;
/// Most regions on a card.
pub const REGIONS_MAX: usize = 256;
/// Most endpoints on a card.
pub const ENDPOINTS_MAX: usize = 16;
/// Longest place on a card, in bytes of JSON.
pub const PLACE_BYTES_MAX: usize = 8 * 1024;
/// Longest address or key of a transport, in bytes (a packed UCX rkey has a few hundred).
pub const KEY_BYTES_MAX: usize = 4096;

/// What must be equal on both sides for KV to mean the same thing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint {
    /// Hash of the weights after requantisation.
    pub weights: String,
    /// Layers, heads, dimensions.
    pub architecture: String,
    /// Base, dimension, convention, scaling.
    pub rope: String,
    /// Element type of the cache.
    pub cache_dtype: String,
    /// The [`KvLayout`](crate::layout::KvLayout), as text.
    pub layout: String,
    /// Scheme of prefix keys.
    pub prefix_hash: String,
}

impl Fingerprint {
    /// The fields with their names, in the order in which a mismatch is looked for.
    pub fn fields(&self) -> [(&'static str, &str); 6] {
        [
            ("architecture", &self.architecture),
            ("weights", &self.weights),
            ("rope", &self.rope),
            ("cache_dtype", &self.cache_dtype),
            ("layout", &self.layout),
            ("prefix_hash", &self.prefix_hash),
        ]
    }

    /// Whether KV of `peer` can be used here.
    ///
    /// # Errors
    /// [`Incompatible`] naming the first field that differs.
    pub fn check(&self, peer: &Self) -> Result<(), Incompatible> {
        for ((field, ours), (_, theirs)) in self.fields().into_iter().zip(peer.fields()) {
            if ours != theirs {
                return Err(Incompatible { field, ours: shorten(ours), theirs: shorten(theirs) });
            }
        }
        Ok(())
    }

    /// Whether KV of `peer` means the same, however either side lays it out and shares it over ranks. Layouts are
    /// then compared, part by part, by [`crate::reshard::plan`].
    ///
    /// # Errors
    /// [`Incompatible`] naming the first field but `layout` that differs.
    pub fn check_meaning(&self, peer: &Self) -> Result<(), Incompatible> {
        self.check(&Self { layout: self.layout.clone(), ..peer.clone() })
    }

    /// All fields as one text: the seed of prefix keys.
    pub fn describe(&self) -> String {
        self.fields().iter().map(|(name, value)| format!("{name}={value}\n")).collect()
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(120).collect()
}

/// KV of that peer means something else.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "incompatible {field}: this engine has {ours:?}, the peer {theirs:?}; serve the same model file with the same options on both"
)]
pub struct Incompatible {
    /// The field that differs.
    pub field: &'static str,
    /// Ours, cut to 120 characters.
    pub ours: String,
    /// The peer's, cut to 120 characters.
    pub theirs: String,
}

/// A way to reach an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Over which transport.
    pub transport: TransportKind,
    /// That transport's own address.
    pub address: Vec<u8>,
}

/// A region as peers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionCard {
    /// Its id.
    pub id: RegionId,
    /// Its size in bytes.
    pub len_bytes: u64,
    /// `host` or `cuda:N`.
    pub place: String,
    /// A key for each transport that it is registered with.
    pub keys: Vec<(TransportKind, Vec<u8>)>,
    /// Whether peers may write into it.
    pub peer_writable: bool,
}

/// What an agent offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentCard {
    /// Its name.
    pub agent: AgentName,
    /// Its engine.
    pub engine: EngineId,
    /// Its incarnation.
    pub boot_epoch: BootEpoch,
    /// Ways to reach it.
    pub endpoints: Vec<Endpoint>,
    /// Its regions.
    pub regions: Vec<RegionCard>,
    /// What its KV means.
    pub fingerprint: Fingerprint,
    /// Which region holds fence slots.
    pub fence_region: Option<RegionId>,
    /// Which region holds the KV pool.
    pub kv_region: Option<RegionId>,
    /// Grows with each change of the card within a boot epoch.
    pub revision: u64,
    /// Where its process runs: a `Place` of `towline-topo` as JSON, empty when it is not said. A claim, for choosing and
    /// for people; no byte of it is trusted with memory.
    pub place: String,
}

impl AgentCard {
    /// This card with these regions only, in the order of the card, and the roles that fall on them.
    ///
    /// # Errors
    /// [`CardError::UnknownRegion`] for one that the card does not list.
    pub fn with_regions(&self, ids: &[RegionId]) -> Result<Self, CardError> {
        if let Some(region) = ids.iter().copied().find(|id| self.region(*id).is_none()) {
            return Err(CardError::UnknownRegion { region });
        }
        let mut card = self.clone();
        card.regions.retain(|region| ids.contains(&region.id));
        card.fence_region = self.fence_region.filter(|id| ids.contains(id));
        card.kv_region = self.kv_region.filter(|id| ids.contains(id));
        Ok(card)
    }

    /// This card with the ways over these transports only: endpoints, and keys of regions.
    pub fn with_transports(&self, kinds: &[TransportKind]) -> Self {
        let mut card = self.clone();
        card.endpoints.retain(|endpoint| kinds.contains(&endpoint.transport));
        for region in &mut card.regions {
            region.keys.retain(|(kind, _)| kinds.contains(kind));
        }
        card
    }

    /// The region of that id.
    pub fn region(&self, id: RegionId) -> Option<&RegionCard> {
        self.regions.iter().find(|region| region.id == id)
    }

    /// The address for that transport.
    pub fn endpoint(&self, transport: TransportKind) -> Option<&[u8]> {
        self.endpoints
            .iter()
            .find(|endpoint| endpoint.transport == transport)
            .map(|endpoint| endpoint.address.as_slice())
    }

    /// As a control message.
    pub fn to_wire(&self) -> v1::Card {
        v1::Card {
            version: CARD_VERSION,
            agent: self.agent.to_string(),
            engine: self.engine.as_bytes().to_vec(),
            boot_epoch: self.boot_epoch.0,
            endpoints: self
                .endpoints
                .iter()
                .map(|e| v1::Endpoint { transport: e.transport.to_string(), address: e.address.clone() })
                .collect(),
            regions: self.regions.iter().map(region_to_wire).collect(),
            fingerprint: Some(fingerprint_to_wire(&self.fingerprint)),
            fence_region: self.fence_region.map(|id| id.0),
            kv_region: self.kv_region.map(|id| id.0),
            revision: self.revision,
            place: self.place.clone(),
        }
    }

    /// Checks a card that a peer sent. Endpoints and keys of transports that this build doesn't know are left out.
    ///
    /// # Errors
    /// [`CardError`] naming what is wrong.
    pub fn from_wire(mut card: v1::Card) -> Result<Self, CardError> {
        if card.version != CARD_VERSION {
            return Err(CardError::Version { found: card.version });
        }
        // Counted as this build would write it, so that what was taken can be sent again.
        card.fingerprint.get_or_insert_default();
        let length = prost::Message::encoded_len(&card);
        if length > CARD_BYTES_MAX || card.regions.len() > REGIONS_MAX || card.endpoints.len() > ENDPOINTS_MAX
        {
            return Err(CardError::TooLarge { length });
        }
        let endpoints = card.endpoints.into_iter().filter_map(|endpoint| {
            let transport = TransportKind::parse(&endpoint.transport)?;
            Some(Endpoint { transport, address: endpoint.address })
        });
        let endpoints: Vec<_> = endpoints.collect();
        if endpoints.iter().any(|endpoint| endpoint.address.len() > KEY_BYTES_MAX) {
            return Err(CardError::TooLarge { length });
        }
        if card.place.len() > PLACE_BYTES_MAX {
            return Err(CardError::Place { length: card.place.len() });
        }
        let regions = card.regions.into_iter().map(region_from_wire).collect::<Result<Vec<_>, _>>()?;
        let mut ids: Vec<_> = regions.iter().map(|region| region.id).collect();
        ids.sort_unstable();
        if ids.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(CardError::Region { what: "two regions share an id" });
        }
        let named = |id: Option<u32>| match id.map(RegionId) {
            Some(id) if ids.binary_search(&id).is_err() => {
                Err(CardError::Region { what: "the card names a region that it does not list" })
            }
            id => Ok(id),
        };
        Ok(Self {
            agent: AgentName::new(card.agent)?,
            engine: EngineId::from_slice(&card.engine)?,
            boot_epoch: BootEpoch(card.boot_epoch),
            fence_region: named(card.fence_region)?,
            kv_region: named(card.kv_region)?,
            fingerprint: fingerprint_from_wire(card.fingerprint.unwrap_or_default()),
            endpoints,
            regions,
            revision: card.revision,
            place: card.place,
        })
    }
}

fn region_to_wire(region: &RegionCard) -> v1::Region {
    v1::Region {
        id: region.id.0,
        len_bytes: region.len_bytes,
        place: region.place.clone(),
        keys: region
            .keys
            .iter()
            .map(|(transport, key)| v1::RegionKey { transport: transport.to_string(), key: key.clone() })
            .collect(),
        peer_writable: region.peer_writable,
    }
}

fn region_from_wire(region: v1::Region) -> Result<RegionCard, CardError> {
    if region.len_bytes == 0 || region.place.len() > 64 {
        return Err(CardError::Region { what: "a region is empty or its place is too long" });
    }
    if region.keys.iter().any(|key| key.key.len() > KEY_BYTES_MAX) {
        return Err(CardError::Region { what: "a region's key is too long" });
    }
    let keys = region
        .keys
        .into_iter()
        .filter_map(|key| Some((TransportKind::parse(&key.transport)?, key.key)))
        .collect();
    Ok(RegionCard {
        id: RegionId(region.id),
        len_bytes: region.len_bytes,
        place: region.place,
        keys,
        peer_writable: region.peer_writable,
    })
}

pub(crate) fn fingerprint_to_wire(fingerprint: &Fingerprint) -> v1::Fingerprint {
    let Fingerprint { weights, architecture, rope, cache_dtype, layout, prefix_hash } = fingerprint.clone();
    v1::Fingerprint { weights, architecture, rope, cache_dtype, layout, prefix_hash }
}

pub(crate) fn fingerprint_from_wire(fingerprint: v1::Fingerprint) -> Fingerprint {
    let v1::Fingerprint { weights, architecture, rope, cache_dtype, layout, prefix_hash } = fingerprint;
    Fingerprint { weights, architecture, rope, cache_dtype, layout, prefix_hash }
}

/// Why a card was refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CardError {
    /// Run the same release on both sides.
    #[error("the card has version {found}, this build reads {CARD_VERSION}")]
    Version {
        /// The card's version.
        found: u32,
    },
    /// The peer registered too much, or is hostile.
    #[error("a card of {length} bytes passes its bounds")]
    TooLarge {
        /// Bytes found.
        length: usize,
    },
    /// The peer is broken or hostile.
    #[error("malformed card: a place of {length} bytes is longer than {PLACE_BYTES_MAX}")]
    Place {
        /// Bytes found.
        length: usize,
    },
    /// Name regions that are registered.
    #[error("the card lists no region {region}")]
    UnknownRegion {
        /// The region asked for.
        region: RegionId,
    },
    /// The peer is broken or hostile.
    #[error("malformed card: {what}")]
    Region {
        /// What is wrong.
        what: &'static str,
    },
    /// The peer is broken or hostile.
    #[error("malformed card: {0}")]
    Id(#[from] IdError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> AgentCard {
        let region = RegionCard {
            id: RegionId(1),
            len_bytes: 4096,
            place: "host".into(),
            keys: vec![(TransportKind::Shm, vec![1, 2])],
            peer_writable: false,
        };
        AgentCard {
            agent: AgentName::new("prefill-0").unwrap(),
            engine: EngineId::from_bytes([3; 16]),
            boot_epoch: BootEpoch(9),
            endpoints: vec![Endpoint { transport: TransportKind::Tcp, address: b"127.0.0.1:1".to_vec() }],
            regions: vec![region.clone(), RegionCard { id: RegionId(2), ..region }],
            fingerprint: Fingerprint { rope: "base=100000".into(), ..Fingerprint::default() },
            fence_region: Some(RegionId(2)),
            kv_region: Some(RegionId(1)),
            revision: 3,
            place: r#"{"host_name":"node-7"}"#.into(),
        }
    }

    #[test]
    fn a_card_round_trips() {
        assert_eq!(AgentCard::from_wire(card().to_wire()), Ok(card()));
    }

    #[test]
    fn tampered_cards_are_refused_by_name() {
        type Tamper = fn(&mut v1::Card);
        let cases: [(Tamper, &str); 7] = [
            (|c| c.version = 2, "version 2"),
            (|c| c.agent = "a b".into(), "agent name"),
            (|c| c.engine = vec![1], "16 bytes"),
            (|c| c.regions[0].id = 2, "share an id"),
            (|c| c.kv_region = Some(9), "does not list"),
            (|c| c.place = "x".repeat(PLACE_BYTES_MAX + 1), "a place of 8193 bytes"),
            (|c| c.regions[0].keys[0].key = vec![0; KEY_BYTES_MAX + 1], "too long"),
        ];
        for (tamper, word) in cases {
            let mut wire = card().to_wire();
            tamper(&mut wire);
            let error = AgentCard::from_wire(wire).unwrap_err().to_string();
            assert!(error.contains(word), "{error:?} does not say {word:?}");
        }
    }

    #[test]
    fn a_card_that_is_taken_can_be_sent_again() {
        use prost::Message;
        let mut wire = card().to_wire();
        wire.fingerprint = None;
        wire.regions[0].keys =
            vec![v1::RegionKey { transport: "tcp".into(), key: vec![7; KEY_BYTES_MAX] }; 15];
        wire.endpoints[0].address = vec![b'a'; KEY_BYTES_MAX];
        while wire.encoded_len() > CARD_BYTES_MAX {
            wire.endpoints[0].address.pop();
        }
        assert_eq!(wire.encoded_len(), CARD_BYTES_MAX);
        let refused = AgentCard::from_wire(wire.clone());
        assert!(matches!(refused, Err(CardError::TooLarge { .. })), "sent again it would be longer");
        wire.endpoints[0].address.truncate(8);
        let taken = AgentCard::from_wire(wire).unwrap();
        assert_eq!(AgentCard::from_wire(taken.to_wire()), Ok(taken));
    }

    #[test]
    fn transports_of_a_newer_build_are_left_out() {
        let mut wire = card().to_wire();
        wire.endpoints.push(v1::Endpoint { transport: "warp".into(), address: vec![] });
        assert_eq!(AgentCard::from_wire(wire), Ok(card()));
    }

    #[test]
    fn a_partial_card_has_what_was_asked_for_and_the_roles_that_fall_on_it() {
        let part = card().with_regions(&[RegionId(2)]).unwrap();
        assert_eq!((part.regions.len(), part.fence_region, part.kv_region), (1, Some(RegionId(2)), None));
        assert_eq!(AgentCard::from_wire(part.to_wire()), Ok(part), "it stands alone");
        let missing = card().with_regions(&[RegionId(2), RegionId(9)]);
        assert_eq!(missing, Err(CardError::UnknownRegion { region: RegionId(9) }));
        let tcp = card().with_transports(&[TransportKind::Tcp]);
        assert_eq!((tcp.endpoints.len(), tcp.regions[0].keys.len()), (1, 0));
        assert!(card().with_transports(&[TransportKind::Shm]).endpoints.is_empty());
    }

    #[test]
    fn a_mismatch_names_its_field() {
        let ours = card().fingerprint;
        let theirs = Fingerprint { rope: "base=10000".into(), ..ours.clone() };
        assert_eq!(ours.check(&theirs).unwrap_err().field, "rope");
        assert_eq!(ours.check(&ours.clone()), Ok(()));
    }
}
