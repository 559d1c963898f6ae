//! Raw TCP streams with nothing around them: what the wire between two processes carries at most.
//!
//! One connection a stream, a thread at each end, blocking `readv` and `writev` of the very pieces that the transfer
//! moves, out of and into the very memories: whatever the engine adds (frames, authentication, an event loop, slices)
//! is what is missing here. The owner's side listens beside its agent and serves who shows the token that stands in its
//! control region, which only peers with the cluster's key can read: strangers learn nothing and are hung up on.
//!
//! **Socket buffers matter.** The kernel lets a receiver's grow to tens of MiB, and then data leaves the caches between
//! its two copies. Measured (2026-11-30, 2-core EPYC, loopback, two streams, 256 MiB, ranked above the other work on both
//! cores, medians of 24 rounds in three runs): 3.8 to 4.1 GB/s with the kernel's buffers, 4.2 to 5.3 with 256 KiB; in
//! pages of 4 KiB 2.7 to 3.1 and 2.4 to 3.5. Single rounds differ by more, as the scheduler puts the ends of a stream on
//! one core or on two: hence the best of many.
//!
//! ```text
//!  client                                   owner
//!    token, direction, socket buffer, count (5 words)  ->
//!    count times offset, bytes  ->          refuses what leaves its memory by hanging up
//!                                           <- one byte: all is known
//!    for each round: one byte  ->           sends all pieces            (direction 0, a READ)
//!                    one byte, all pieces  ->  <- one byte              (direction 1, a WRITE)
//! ```

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::net::sockopt;
use towline_wire::blocks::{Extent, Run};
use towline_wire::receipt::Op;

use super::PATIENCE;
use super::raw::{Mapping, receive_all, send_all};

/// Streams of one way to measure a case at most, over all its pairs: a thread each at both ends.
pub(crate) const STREAMS_MAX: usize = 64;
/// Streams served at a time: two ways, and those of the case before may not have ended yet.
const SEATS_MAX: usize = 4 * STREAMS_MAX;
/// Largest socket buffer that may be asked for, in bytes; the kernel has its own, smaller bound.
const BUFFER_BYTES_MAX: u64 = 1 << 30;
/// Most pieces of a stream: 64 MiB of greeting, and as many as the re-sharding planner makes.
const PIECES_MAX: u64 = 1 << 22;
/// How long a connection may take to show its token.
const GREETING: Duration = Duration::from_secs(5);
/// Bytes of the greeting before the pieces.
const GREETING_BYTES: usize = 40;
/// Bytes of a piece in the greeting.
const PIECE_BYTES: usize = 16;

/// The memory that an owner's streams read and write: that of the case at hand.
#[derive(Clone, Default)]
pub(crate) struct Lent(Arc<Mutex<Option<Arc<Mapping>>>>);

impl Lent {
    /// From now on this one; streams that are open keep theirs.
    pub(crate) fn set(&self, mapping: Option<Arc<Mapping>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = mapping;
    }

    fn get(&self) -> Option<Arc<Mapping>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What a stream does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan<'a> {
    /// READ: towards the client.
    pub(crate) op: Op,
    /// Bytes of each socket buffer at both ends; 0 leaves them to the kernel.
    pub(crate) buffer_bytes: u64,
    /// What each round moves.
    pub(crate) runs: &'a [Run],
}

/// The client's end of one stream.
pub(crate) struct Stream {
    stream: TcpStream,
    mapping: Arc<Mapping>,
    pieces: Vec<Extent>,
    op: Op,
}

impl Stream {
    /// Connects and says what each round moves between `mapping` and the owner's memory.
    ///
    /// # Errors
    /// The kernel's, and an owner that hangs up: a stranger to it, or pieces that leave its memory.
    pub(crate) fn open(
        (address, token): (SocketAddr, [u64; 2]),
        mapping: Arc<Mapping>,
        plan: Plan<'_>,
    ) -> Result<Self> {
        let Plan { op, buffer_bytes, runs } = plan;
        let mut stream = TcpStream::connect_timeout(&address, GREETING).context("can't connect")?;
        tune(&stream, buffer_bytes)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let direction = if op == Op::Read { 0 } else { 1 };
        let head = [token[0], token[1], direction, buffer_bytes, runs.len() as u64];
        let pieces = runs.iter().flat_map(|run| [run.remote, run.len]);
        let greeting: Vec<u8> = head.into_iter().chain(pieces).flat_map(u64::to_le_bytes).collect();
        stream.write_all(&greeting).context("the owner doesn't listen")?;
        stream.read_exact(&mut [0]).context("the owner hung up")?;
        let pieces = runs.iter().map(|run| Extent { offset: run.local, len: run.len }).collect();
        Ok(Self { stream, mapping, pieces, op })
    }

    /// Moves everything once.
    ///
    /// # Errors
    /// The kernel's, or a stream that ended.
    pub(crate) fn round(&mut self) -> Result<()> {
        self.stream.write_all(&[1])?;
        if self.op == Op::Read {
            return receive_all(&self.stream, &self.mapping, &self.pieces);
        }
        send_all(&self.stream, &self.mapping, &self.pieces)?;
        self.stream.read_exact(&mut [0]).context("no word that it all arrived")
    }
}

/// Serves streams over `lent` on a free port of `ip` until the process ends; gives the port.
///
/// # Errors
/// When the kernel refuses the socket or the thread.
pub(crate) fn serve(ip: IpAddr, token: [u64; 2], lent: Lent) -> Result<u16> {
    let listener = TcpListener::bind((ip, 0)).context("can't listen for raw streams")?;
    let port = listener.local_addr()?.port();
    let open = Arc::new(AtomicUsize::new(0));
    let accept = move || {
        for stream in listener.incoming().flatten() {
            let open = Arc::clone(&open);
            if open.fetch_add(1, Ordering::AcqRel) >= SEATS_MAX {
                open.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let (seat, lent) = (Seat(open), lent.clone());
            // Refused by the kernel: the seat and the stream go, and the client reads the end.
            _ = std::thread::Builder::new().name("flood".into()).spawn(move || {
                let _seat = seat;
                if let Err(error) = attend(stream, token, &lent) {
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

fn tune(stream: &TcpStream, buffer_bytes: u64) -> Result<()> {
    stream.set_nodelay(true)?;
    if buffer_bytes > 0 {
        let bytes = usize::try_from(buffer_bytes)?;
        sockopt::set_socket_send_buffer_size(stream, bytes)?;
        sockopt::set_socket_recv_buffer_size(stream, bytes)?;
    }
    Ok(())
}

fn attend(mut stream: TcpStream, token: [u64; 2], lent: &Lent) -> Result<()> {
    stream.set_read_timeout(Some(GREETING))?;
    let mut head = [0; GREETING_BYTES];
    stream.read_exact(&mut head)?;
    let [first, second, direction, buffer_bytes, count] = words(&head);
    if [first, second] != token {
        bail!("a stranger");
    }
    ensure!(buffer_bytes <= BUFFER_BYTES_MAX, "a socket buffer of {buffer_bytes} bytes");
    tune(&stream, buffer_bytes)?;
    ensure!((1..=PIECES_MAX).contains(&count), "{count} pieces");
    let mut list = vec![0; usize::try_from(count)? * PIECE_BYTES];
    stream.read_exact(&mut list)?;
    let mapping = lent.get().context("no memory was prepared")?;
    let mut pieces = Vec::with_capacity(list.len() / PIECE_BYTES);
    for piece in list.chunks_exact(PIECE_BYTES) {
        let [offset, len] = words(piece);
        ensure!(len > 0, "an empty piece");
        mapping.check(Extent { offset, len })?;
        pieces.push(Extent { offset, len });
    }
    drop(list);
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&[1])?;
    loop {
        if stream.read(&mut [0])? == 0 {
            return Ok(());
        }
        if direction == 0 {
            send_all(&stream, &mapping, &pieces)?;
        } else {
            receive_all(&stream, &mapping, &pieces)?;
            stream.write_all(&[1])?;
        }
    }
}

/// The first words of `bytes`, little-endian; 0 where they end early.
fn words<const COUNT: usize>(bytes: &[u8]) -> [u64; COUNT] {
    let mut found = [0; COUNT];
    for (word, place) in found.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = place.try_into().map_or(0, u64::from_le_bytes);
    }
    found
}

#[cfg(test)]
mod tests {
    use towline_fabric::{Access, Memory};

    use super::*;

    const TOKEN: [u64; 2] = [3, 4];
    const LEN: u64 = 1 << 20;

    fn memory(fill: u8) -> (Memory, Arc<Mapping>) {
        let memory = Memory::allocate_for("flood", LEN, Access::PeersWrite).unwrap();
        memory.write_from(0, &vec![fill; usize::try_from(LEN).unwrap()]).unwrap();
        let mapping = Arc::new(Mapping::of(&memory).unwrap());
        (memory, mapping)
    }

    fn count(memory: &Memory, value: u8) -> usize {
        let mut bytes = vec![0; usize::try_from(LEN).unwrap()];
        memory.read_into(0, &mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte == value).count()
    }

    /// An owner whose memory is all 0x5a, and where it is.
    fn owner() -> (Memory, Lent, SocketAddr) {
        let ((memory, mapping), lent) = (memory(0x5a), Lent::default());
        lent.set(Some(mapping));
        let port = serve([127, 0, 0, 1].into(), TOKEN, lent.clone()).unwrap();
        (memory, lent, SocketAddr::from(([127, 0, 0, 1], port)))
    }

    #[test]
    fn streams_move_what_was_asked_in_both_directions() {
        let (far, _lent, address) = owner();
        let pages: Vec<Run> =
            (0..100).map(|page| Run { local: page * 4096, remote: (199 - page) * 4096, len: 4096 }).collect();
        let whole = vec![Run { local: 4096, remote: 8, len: 600_000 }];
        for runs in [pages, whole] {
            let bytes = runs.iter().map(|run| usize::try_from(run.len).unwrap()).sum::<usize>();
            let (near, mapping) = memory(0);
            let plan = Plan { op: Op::Read, buffer_bytes: 0, runs: &runs };
            let mut stream = Stream::open((address, TOKEN), Arc::clone(&mapping), plan).unwrap();
            stream.round().unwrap();
            stream.round().unwrap();
            assert_eq!(count(&near, 0x5a), bytes);
            near.write_from(0, &vec![0x77; usize::try_from(LEN).unwrap()]).unwrap();
            let plan = Plan { op: Op::Write, buffer_bytes: 64 << 10, runs: &runs };
            let mut stream = Stream::open((address, TOKEN), mapping, plan).unwrap();
            stream.round().unwrap();
            assert_eq!(count(&far, 0x77), bytes);
            far.write_from(0, &vec![0x5a; usize::try_from(LEN).unwrap()]).unwrap();
        }
    }

    #[test]
    fn strangers_and_pieces_outside_are_hung_up_on() {
        let (_far, lent, address) = owner();
        let (_near, mapping) = memory(0);
        let open = |token, runs: &[Run]| {
            let plan = Plan { op: Op::Read, buffer_bytes: 0, runs };
            Stream::open((address, token), Arc::clone(&mapping), plan).map(drop)
        };
        let fine = [Run { local: 0, remote: LEN - 8, len: 8 }];
        assert!(open(TOKEN, &fine).is_ok());
        assert!(open([3, 5], &fine).is_err());
        for bad in [(LEN, 8), (u64::MAX, 8), (0, 0), (0, LEN + 1)] {
            assert!(open(TOKEN, &[Run { local: 0, remote: bad.0, len: bad.1 }]).is_err(), "{bad:?}");
        }
        assert!(open(TOKEN, &[]).is_err());
        lent.set(None);
        assert!(open(TOKEN, &fine).is_err(), "nothing is lent any more");
    }
}
