//! Raw TCP streams with nothing around them: what the wire between two processes carries at most.
//!
//! One connection a stream, blocking reads and writes of up to 1 MiB, paged data by `readv` and `writev` of the same
//! page size in shuffled order; heap buffers, touched before. The owner's side listens beside its agent and serves who
//! shows the token that stands in its control region, which only peers with the cluster's key can read: strangers
//! learn nothing and are hung up on.
//!
//! ```text
//!  client                                   owner
//!    token, direction, piece, pieces, slots, seed (8 words)  ->
//!    for each round: one byte  ->           sends all pieces            (direction 0, a READ)
//!                    one byte, all pieces  ->  <- one byte              (direction 1, a WRITE)
//! ```

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use towline_wire::receipt::Op;

use super::PATIENCE;
use super::shape::{mix, shuffle};

/// Bytes of one call.
const CALL_BYTES: usize = 1 << 20;
/// Pieces of one call: the kernel's `IOV_MAX`.
const CALL_PIECES: usize = 1024;
/// Streams served at a time: a case has 1 + 2 + 8 at most, and those of the one before may not have ended yet.
const STREAMS_MAX: usize = 22;
/// Most bytes of a stream's buffer: rates don't depend on more.
pub(crate) const BUFFER_BYTES_MAX: u64 = 512 << 20;
/// How long a connection may take to show its token.
const GREETING: Duration = Duration::from_secs(5);
const GREETING_BYTES: usize = 64;

/// What one stream moves each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// READ: towards the client.
    pub(crate) op: Op,
    /// Bytes of a piece.
    pub(crate) piece_bytes: u64,
    /// Pieces moved.
    pub(crate) pieces: u32,
    /// Pieces that a buffer has room for.
    pub(crate) slots: u32,
    /// Where the shuffles start; 0 for pieces in order.
    pub(crate) seed: u64,
}

impl Plan {
    /// Bytes moved each round.
    pub(crate) fn bytes(&self) -> u64 {
        self.piece_bytes * u64::from(self.pieces)
    }

    fn to_bytes(self, token: [u64; 2]) -> [u8; GREETING_BYTES] {
        let direction = if self.op == Op::Read { 0 } else { 1 };
        let words = [
            token[0],
            token[1],
            direction,
            self.piece_bytes,
            self.pieces.into(),
            self.slots.into(),
            self.seed,
            0,
        ];
        let mut bytes = [0; GREETING_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The plan of a greeting that shows `token`; `None` for strangers and for what no client asks.
    fn from_bytes(bytes: &[u8; GREETING_BYTES], token: [u64; 2]) -> Option<Self> {
        let mut words = [0; 8];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(place.try_into().ok()?);
        }
        let [first, second, direction, piece_bytes, pieces, slots, seed, _] = words;
        let [pieces, slots] = [u32::try_from(pieces).ok()?, u32::try_from(slots).ok()?];
        let buffer = piece_bytes.checked_mul(slots.into())?;
        let fits = (1..=BUFFER_BYTES_MAX).contains(&buffer) && (1..=slots).contains(&pieces);
        let op = if direction == 0 { Op::Read } else { Op::Write };
        ([first, second] == token && fits).then_some(Self { op, piece_bytes, pieces, slots, seed })
    }
}

/// The pieces of one end of a stream.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    piece_bytes: usize,
    order: Vec<u32>,
}

impl Buffer {
    /// Every page is touched here.
    pub(crate) fn new(plan: &Plan, salt: u64) -> Result<Self> {
        let piece_bytes = usize::try_from(plan.piece_bytes).context("too large")?;
        let mut order: Vec<u32> = (0..plan.slots).collect();
        if plan.seed != 0 {
            shuffle(&mut order, mix(plan.seed ^ salt));
        }
        order.truncate(plan.pieces as usize);
        Ok(Self { bytes: vec![0x5a; piece_bytes * plan.slots as usize], piece_bytes, order })
    }

    /// Sends all pieces.
    pub(crate) fn send(&self, stream: &mut TcpStream) -> Result<()> {
        let pieces = self.order.iter().flat_map(|index| {
            let at = *index as usize * self.piece_bytes;
            self.bytes[at..at + self.piece_bytes].chunks(CALL_BYTES)
        });
        let pieces: Vec<&[u8]> = pieces.collect();
        for call in pieces.chunks(self.call_pieces()) {
            let mut slices: Vec<IoSlice<'_>> = call.iter().map(|piece| IoSlice::new(piece)).collect();
            let mut rest = slices.as_mut_slice();
            while !rest.is_empty() {
                let sent = stream.write_vectored(rest)?;
                ensure!(sent > 0, "the stream takes no more");
                IoSlice::advance_slices(&mut rest, sent);
            }
        }
        Ok(())
    }

    /// Where arriving pieces go, in order. Made before the clock starts.
    pub(crate) fn places(&mut self) -> Vec<&mut [u8]> {
        let mut slots: Vec<_> = self.bytes.chunks_exact_mut(self.piece_bytes).map(Some).collect();
        let picked = self.order.iter().filter_map(|index| slots[*index as usize].take());
        picked.flat_map(|piece| piece.chunks_mut(CALL_BYTES)).collect()
    }

    /// Pieces of one call.
    pub(crate) fn call_pieces(&self) -> usize {
        (CALL_BYTES / self.piece_bytes).clamp(1, CALL_PIECES)
    }
}

/// Receives into `places`, at most `call_pieces` with one call.
pub(crate) fn receive(stream: &mut TcpStream, places: Vec<&mut [u8]>, call_pieces: usize) -> Result<()> {
    let mut places = places.into_iter().map(IoSliceMut::new).peekable();
    while places.peek().is_some() {
        let mut slices: Vec<_> = places.by_ref().take(call_pieces).collect();
        let mut rest = slices.as_mut_slice();
        while !rest.is_empty() {
            let got = stream.read_vectored(rest)?;
            ensure!(got > 0, "the stream ended early");
            IoSliceMut::advance_slices(&mut rest, got);
        }
    }
    Ok(())
}

/// The client's end of one stream.
pub(crate) struct Stream {
    stream: TcpStream,
    buffer: Buffer,
    op: Op,
}

impl Stream {
    /// Connects and says what each round moves.
    pub(crate) fn open(address: SocketAddr, token: [u64; 2], plan: &Plan) -> Result<Self> {
        let mut stream = TcpStream::connect_timeout(&address, GREETING).context("can't connect")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(&plan.to_bytes(token))?;
        Ok(Self { stream, buffer: Buffer::new(plan, 1)?, op: plan.op })
    }

    /// Moves everything once. `ready` is called when all is prepared: the clock starts when it returns.
    pub(crate) fn round(&mut self, ready: impl FnOnce()) -> Result<()> {
        let call = self.buffer.call_pieces();
        if self.op == Op::Read {
            let places = self.buffer.places();
            ready();
            self.stream.write_all(&[1])?;
            return receive(&mut self.stream, places, call);
        }
        ready();
        self.stream.write_all(&[1])?;
        self.buffer.send(&mut self.stream)?;
        self.stream.read_exact(&mut [0]).context("no word that it all arrived")
    }
}

/// Serves streams on a free port of `ip` until the process ends; gives the port.
///
/// # Errors
/// When the kernel refuses the socket or the thread.
pub(crate) fn serve(ip: IpAddr, token: [u64; 2]) -> Result<u16> {
    let listener = TcpListener::bind((ip, 0)).context("can't listen for raw streams")?;
    let port = listener.local_addr()?.port();
    let open = Arc::new(AtomicUsize::new(0));
    let accept = move || {
        for stream in listener.incoming().flatten() {
            let open = Arc::clone(&open);
            if open.fetch_add(1, Ordering::AcqRel) >= STREAMS_MAX {
                open.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let seat = Seat(open);
            // Refused by the kernel: the seat and the stream go, and the client reads the end.
            _ = std::thread::Builder::new().name("flood".into()).spawn(move || {
                let _seat = seat;
                if let Err(error) = attend(stream, token) {
                    tracing::debug!("raw stream: {error:#}");
                }
            });
        }
    };
    std::thread::Builder::new().name("flood-accept".into()).spawn(accept).context("can't start a thread")?;
    Ok(port)
}

/// One of the streams served.
struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn attend(mut stream: TcpStream, token: [u64; 2]) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING))?;
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting)?;
    let Some(plan) = Plan::from_bytes(&greeting, token) else { bail!("a stranger") };
    let mut buffer = Buffer::new(&plan, 2)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let call = buffer.call_pieces();
    loop {
        let places = if plan.op == Op::Write { buffer.places() } else { Vec::new() };
        if stream.read(&mut [0])? == 0 {
            return Ok(());
        }
        if plan.op == Op::Write {
            receive(&mut stream, places, call)?;
            stream.write_all(&[1])?;
        } else {
            buffer.send(&mut stream)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: [u64; 2] = [3, 4];

    fn paged(op: Op) -> Plan {
        Plan { op, piece_bytes: 4096, pieces: 300, slots: 600, seed: 9 }
    }

    #[test]
    fn streams_move_what_was_asked_in_both_directions() {
        let port = serve([127, 0, 0, 1].into(), TOKEN).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let whole = |op| Plan { op, piece_bytes: 3 << 20, pieces: 1, slots: 1, seed: 0 };
        for plan in [paged(Op::Read), paged(Op::Write), whole(Op::Read), whole(Op::Write)] {
            let mut stream = Stream::open(address, TOKEN, &plan).unwrap();
            stream.buffer.bytes.fill(0);
            let mut calls = 0;
            for _ in 0..2 {
                stream.round(|| calls += 1).unwrap();
            }
            assert_eq!(calls, 2);
            let arrived = stream.buffer.bytes.iter().filter(|byte| **byte == 0x5a).count() as u64;
            assert_eq!(arrived, if plan.op == Op::Read { plan.bytes() } else { 0 });
        }
    }

    #[test]
    fn strangers_are_hung_up_on() {
        let port = serve([127, 0, 0, 1].into(), TOKEN).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut stream = Stream::open(address, [3, 5], &paged(Op::Read)).unwrap();
        assert!(stream.round(|| ()).is_err());
    }

    #[test]
    fn greetings_beyond_the_bounds_are_refused() {
        let read = |plan: Plan| Plan::from_bytes(&plan.to_bytes(TOKEN), TOKEN);
        assert_eq!(read(paged(Op::Write)), Some(paged(Op::Write)));
        for bad in [
            Plan { piece_bytes: 0, ..paged(Op::Read) },
            Plan { piece_bytes: u64::MAX, ..paged(Op::Read) },
            Plan { piece_bytes: BUFFER_BYTES_MAX, ..paged(Op::Read) },
            Plan { pieces: 601, ..paged(Op::Read) },
            Plan { pieces: 0, ..paged(Op::Read) },
        ] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }
}
