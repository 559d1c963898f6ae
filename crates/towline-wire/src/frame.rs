//! Sealed frames: what follows the handshake on control and data connections alike.
//!
//! ```text
//!  0        4      5        8               24                24+len
//!  | len u32 | kind | 0 0 0 | mac, 16 bytes | body, len bytes | [payload: raw bytes, only after kinds that say so]
//! ```
//!
//! The MAC covers direction (its key), position (a counter), kind and body, and the rest of the header must be 0: a frame
//! cannot be altered, replayed, reordered or moved between sessions. Payload bytes are not covered: KV is checked by fence and digest. Integers are
//! little-endian. Every length is bounded before anything is allocated.

use thiserror::Error;

use crate::blocks::Extent;
use crate::id::{Generation, LeaseId, RegionId};

/// Bytes before a frame's body.
pub const HEADER_BYTES: usize = 24;
/// Largest body: a card (64 KiB) or a full request (64 KiB) fit with room.
pub const BODY_BYTES_MAX: usize = 96 * 1024;
/// Most extents a request frame carries (64 KiB of them); longer lists take several frames.
pub const EXTENTS_MAX: usize = 4096;
/// Most payload bytes of one request: bounds what a connection owes at a time and how long a cancel waits.
pub const PAYLOAD_BYTES_MAX: u64 = 2 << 20;

/// What a frame's body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A [`Control`](crate::control::Control) message.
    Control = 1,
    /// A [`Request`] to read.
    Read = 2,
    /// A [`Reply`]; on success the payload of the read follows.
    ReadReply = 3,
    /// A [`Request`] to write; its payload follows.
    Write = 4,
    /// A [`Reply`] to a write: the bytes are in place.
    WriteReply = 5,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Control,
            2 => Self::Read,
            3 => Self::ReadReply,
            4 => Self::Write,
            5 => Self::WriteReply,
            _ => return None,
        })
    }
}

/// Seals what one side sends.
#[derive(Debug)]
pub struct Sealer(Position);

/// Opens what the other side sends.
#[derive(Debug)]
pub struct Opener(Position);

struct Position {
    key: [u8; 32],
    count: u64,
}

impl std::fmt::Debug for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "frame {}", self.count)
    }
}

impl Position {
    fn mac(&self, kind: u8, body: &[u8]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.count.to_le_bytes()).update(&[kind]).update(body);
        let mut mac = [0; 16];
        hasher.finalize_xof().fill(&mut mac);
        mac
    }
}

impl Sealer {
    /// For one direction's session key.
    pub fn new(key: [u8; 32]) -> Self {
        Self(Position { key, count: 0 })
    }

    /// The next frame, header and body. The body is at most [`BODY_BYTES_MAX`]; a longer one is a bug of the caller
    /// and gives [`FrameError::Length`].
    ///
    /// # Errors
    /// [`FrameError::Length`].
    pub fn seal(&mut self, kind: FrameKind, body: &[u8]) -> Result<Vec<u8>, FrameError> {
        let fits = u32::try_from(body.len()).ok().filter(|_| body.len() <= BODY_BYTES_MAX);
        let Some(len) = fits else { return Err(FrameError::Length { length: body.len() }) };
        let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
        frame.extend_from_slice(&len.to_le_bytes());
        frame.extend_from_slice(&[kind as u8, 0, 0, 0]);
        frame.extend_from_slice(&self.0.mac(kind as u8, body));
        frame.extend_from_slice(body);
        self.0.count += 1;
        Ok(frame)
    }
}

/// A header whose body is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the body is.
    pub kind: FrameKind,
    /// Bytes of the body.
    pub len: usize,
    mac: [u8; 16],
}

impl Header {
    /// Reads a header. Nothing is trusted yet but its bounds.
    ///
    /// # Errors
    /// [`FrameError::Kind`], [`FrameError::Reserved`], [`FrameError::Length`].
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let kind = FrameKind::from_byte(bytes[4]).ok_or(FrameError::Kind { kind: bytes[4] })?;
        if bytes[5..8] != [0; 3] {
            return Err(FrameError::Reserved);
        }
        let len = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        if len > BODY_BYTES_MAX {
            return Err(FrameError::Length { length: len });
        }
        let mut mac = [0; 16];
        mac.copy_from_slice(&bytes[8..]);
        Ok(Self { kind, len, mac })
    }
}

impl Opener {
    /// For one direction's session key.
    pub fn new(key: [u8; 32]) -> Self {
        Self(Position { key, count: 0 })
    }

    /// Checks that `body` is the next frame of this session.
    ///
    /// # Errors
    /// [`FrameError::Seal`]: close the session.
    pub fn open(&mut self, header: &Header, body: &[u8]) -> Result<(), FrameError> {
        let differs =
            self.0.mac(header.kind as u8, body).iter().zip(header.mac).fold(0, |sum, (a, b)| sum | (a ^ b));
        if differs != 0 {
            return Err(FrameError::Seal);
        }
        self.0.count += 1;
        Ok(())
    }
}

/// A one-sided read or write of pieces of one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Echoed in the reply.
    pub call: u64,
    /// Which region of the serving agent.
    pub region: RegionId,
    /// The lease under which it is asked, with its generation; `None` for regions without leases (fence slots).
    pub lease: Option<(LeaseId, Generation)>,
    /// The pieces, in the order in which payload bytes travel.
    pub extents: Vec<Extent>,
}

impl Request {
    /// Payload bytes of all extents. Never overflows: [`Request::decode`] and [`Request::encode`] check the sum.
    pub fn payload_bytes(&self) -> u64 {
        self.extents.iter().map(|extent| extent.len).sum()
    }

    /// The body of a frame.
    ///
    /// # Errors
    /// [`FrameError::Request`] when it breaks the bounds of [`Request::decode`].
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        check_extents(&self.extents)?;
        let mut body = Vec::with_capacity(40 + self.extents.len() * 16);
        body.extend_from_slice(&self.call.to_le_bytes());
        let (lease, generation) = self.lease.map_or((0, 0), |(lease, generation)| (lease.0, generation.0));
        body.extend_from_slice(&lease.to_le_bytes());
        body.extend_from_slice(&generation.to_le_bytes());
        body.extend_from_slice(&self.region.0.to_le_bytes());
        body.extend_from_slice(&u32::from(self.lease.is_some()).to_le_bytes());
        for extent in &self.extents {
            body.extend_from_slice(&extent.offset.to_le_bytes());
            body.extend_from_slice(&extent.len.to_le_bytes());
        }
        Ok(body)
    }

    /// Reads a body: 1 to [`EXTENTS_MAX`] extents, none empty or wrapping, together at most [`PAYLOAD_BYTES_MAX`].
    ///
    /// # Errors
    /// [`FrameError::Request`].
    pub fn decode(body: &[u8]) -> Result<Self, FrameError> {
        let (head, tail) =
            body.split_first_chunk::<32>().ok_or(FrameError::Request("it is shorter than its head"))?;
        if tail.len() % 16 != 0 {
            return Err(FrameError::Request("its extents are cut"));
        }
        check_count(tail.len() / 16)?; // before anything is allocated for them
        let word = |at: usize| u64_at(head, at);
        let lease = match u32_at(head, 28) {
            0 => None,
            1 => Some((LeaseId(word(8)), Generation(word(16)))),
            _ => return Err(FrameError::Request("its lease flag is neither 0 nor 1")),
        };
        let extents: Vec<Extent> = tail
            .chunks_exact(16)
            .map(|chunk| Extent { offset: u64_at(chunk, 0), len: u64_at(chunk, 8) })
            .collect();
        check_extents(&extents)?;
        Ok(Self { call: word(0), region: RegionId(u32_at(head, 24)), lease, extents })
    }
}

fn check_count(extents: usize) -> Result<(), FrameError> {
    if (1..=EXTENTS_MAX).contains(&extents) {
        return Ok(());
    }
    Err(FrameError::Request("it has no extents or more than 4096"))
}

fn check_extents(extents: &[Extent]) -> Result<(), FrameError> {
    check_count(extents.len())?;
    let mut total: u64 = 0;
    for extent in extents {
        if extent.len == 0 || extent.offset.checked_add(extent.len).is_none() {
            return Err(FrameError::Request("an extent is empty or wraps"));
        }
        total = total.saturating_add(extent.len);
    }
    if total > PAYLOAD_BYTES_MAX { Err(FrameError::Request("it moves more than 2 MiB")) } else { Ok(()) }
}

/// The answer to a [`Request`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request's.
    pub call: u64,
    /// What became of it.
    pub status: Status,
    /// Bytes moved: the request's payload on success, else 0.
    pub len: u64,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// No such region: never registered, or deregistered.
    UnknownRegion = 1,
    /// An extent leaves the region.
    OutOfRange = 2,
    /// The region does not take writes from peers.
    NotWritable = 3,
    /// The lease is over, is another generation's, or does not cover the extents.
    LeaseExpired = 4,
    /// A region with leases was asked for without one.
    LeaseRequired = 5,
}

impl Reply {
    /// Bytes of a reply's body.
    pub const BYTES: usize = 24;

    /// The body of a frame.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut body = [0; Self::BYTES];
        body[..8].copy_from_slice(&self.call.to_le_bytes());
        body[8..16].copy_from_slice(&self.len.to_le_bytes());
        body[16..20].copy_from_slice(&(self.status as u32).to_le_bytes());
        body
    }

    /// Reads a body.
    ///
    /// # Errors
    /// [`FrameError::Reply`].
    pub fn decode(body: &[u8]) -> Result<Self, FrameError> {
        if body.len() != Self::BYTES {
            return Err(FrameError::Reply);
        }
        let status = match u32_at(body, 16) {
            0 => Status::Ok,
            1 => Status::UnknownRegion,
            2 => Status::OutOfRange,
            3 => Status::NotWritable,
            4 => Status::LeaseExpired,
            5 => Status::LeaseRequired,
            _ => return Err(FrameError::Reply),
        };
        Ok(Self { call: u64_at(body, 0), status, len: u64_at(body, 8) })
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Why a frame was refused. Every case closes the session: the stream can't be trusted after it.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// The peer is of another version, or hostile.
    #[error("frame kind {kind} is unknown")]
    Kind {
        /// The byte found.
        kind: u8,
    },
    /// Someone altered the frame where the seal does not reach, or the peer is of another version.
    #[error("the reserved bytes of a frame's header are not 0")]
    Reserved,
    /// The peer is broken or hostile.
    #[error("a frame of {length} bytes is longer than {BODY_BYTES_MAX}")]
    Length {
        /// Bytes claimed.
        length: usize,
    },
    /// Someone altered, replayed or reordered frames.
    #[error("a frame's seal is broken")]
    Seal,
    /// The peer is broken or hostile.
    #[error("malformed request: {0}")]
    Request(&'static str),
    /// The peer is broken or hostile.
    #[error("malformed reply")]
    Reply,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn open(opener: &mut Opener, frame: &[u8]) -> Result<FrameKind, FrameError> {
        let (head, body) = frame.split_first_chunk::<HEADER_BYTES>().unwrap();
        let header = Header::parse(head)?;
        opener.open(&header, body).map(|()| header.kind)
    }

    #[test]
    fn frames_open_once_in_order_and_only_unaltered() {
        let (mut sealer, mut opener) = (Sealer::new([1; 32]), Opener::new([1; 32]));
        let first = sealer.seal(FrameKind::Control, b"one").unwrap();
        let second = sealer.seal(FrameKind::Read, b"two").unwrap();
        assert_eq!(open(&mut opener, &second), Err(FrameError::Seal), "out of order");
        assert_eq!(open(&mut opener, &first), Ok(FrameKind::Control));
        assert_eq!(open(&mut opener, &first), Err(FrameError::Seal), "replayed");
        let mut altered = second.clone();
        altered[HEADER_BYTES] ^= 1;
        assert_eq!(open(&mut opener, &altered), Err(FrameError::Seal));
        assert_eq!(open(&mut opener, &second), Ok(FrameKind::Read));
    }

    #[test]
    fn oversized_frames_are_refused_from_the_header_alone() {
        let mut head = [0; HEADER_BYTES];
        head[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        head[4] = 1;
        assert!(matches!(Header::parse(&head), Err(FrameError::Length { .. })));
    }

    #[test]
    fn a_header_has_one_form() {
        let frame = Sealer::new([1; 32]).seal(FrameKind::Control, b"one").unwrap();
        for at in 5..8 {
            let mut altered = frame.clone();
            altered[at] = 1;
            assert_eq!(open(&mut Opener::new([1; 32]), &altered), Err(FrameError::Reserved));
        }
    }

    #[test]
    fn requests_outside_the_bounds_are_refused() {
        let request = |extents| Request { call: 1, region: RegionId(1), lease: None, extents };
        let piece = |offset, len| Extent { offset, len };
        for extents in [
            vec![],
            vec![piece(0, 0)],
            vec![piece(u64::MAX, 2)],
            vec![piece(0, PAYLOAD_BYTES_MAX), piece(0, 1)],
        ] {
            assert!(matches!(request(extents).encode(), Err(FrameError::Request(_))));
        }
        assert!(request(vec![piece(0, 1); EXTENTS_MAX + 1]).encode().is_err());
    }

    proptest! {
        #[test]
        fn requests_round_trip(call: u64, region: u32, lease: Option<(u64, u64)>, pieces in prop::collection::vec((0..u64::MAX / 2, 1..500_u64), 1..50)) {
            let request = Request {
                call,
                region: RegionId(region),
                lease: lease.map(|(lease, generation)| (LeaseId(lease), Generation(generation))),
                extents: pieces.into_iter().map(|(offset, len)| Extent { offset, len }).collect(),
            };
            prop_assert_eq!(Request::decode(&request.encode().unwrap()).unwrap(), request);
        }

        #[test]
        fn no_bytes_make_a_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Request::decode(&bytes);
            let _ = Reply::decode(&bytes);
        }
    }
}
