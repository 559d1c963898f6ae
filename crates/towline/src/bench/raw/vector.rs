//! Blocking `readv` and `writev` between a socket and the pieces of a mapping.
//!
//! **Cost.** One system call for up to [`CALL_BYTES`] or [`PIECES_MAX`] pieces, and the kernel's copy; no allocation.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use anyhow::{Result, bail};
use towline_wire::blocks::Extent;

use super::Mapping;

/// Bytes of one call: where `limits.c` found loopback to be fastest.
const CALL_BYTES: u64 = 1 << 20;
/// Pieces of one call: the kernel's `UIO_MAXIOV`.
const PIECES_MAX: usize = 1024;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

/// Fills `pieces` from the stream, in order.
///
/// # Errors
/// The kernel's, the end of the stream, a piece that leaves the mapping.
pub(crate) fn receive_all(stream: &TcpStream, mapping: &Mapping, pieces: &[Extent]) -> Result<()> {
    Walk::new(mapping, pieces)?.all(stream, Way::In)
}

/// Sends `pieces`, in order.
///
/// # Errors
/// As [`receive_all`].
pub(crate) fn send_all(stream: &TcpStream, mapping: &Mapping, pieces: &[Extent]) -> Result<()> {
    Walk::new(mapping, pieces)?.all(stream, Way::Out)
}

/// How far the pieces have been moved.
struct Walk<'a> {
    mapping: &'a Mapping,
    pieces: &'a [Extent],
    /// Bytes of the first piece that are done.
    done: u64,
}

impl<'a> Walk<'a> {
    fn new(mapping: &'a Mapping, pieces: &'a [Extent]) -> Result<Self> {
        pieces.iter().try_for_each(|piece| mapping.check(*piece))?;
        Ok(Self { mapping, pieces, done: 0 })
    }

    fn all(mut self, stream: &TcpStream, way: Way) -> Result<()> {
        let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
        while !self.pieces.is_empty() {
            let count = libc::c_int::try_from(self.gather(&mut vectors))?;
            let (fd, vectors) = (stream.as_raw_fd(), vectors.as_ptr());
            let moved = match way {
                // SAFETY: `count` vectors stand there, each inside the mapping, as `new` checked.
                Way::In => unsafe { libc::readv(fd, vectors, count) },
                // SAFETY: as above; the kernel only reads.
                Way::Out => unsafe { libc::writev(fd, vectors, count) },
            };
            match u64::try_from(moved) {
                Ok(0) => bail!("the stream ended early"),
                Ok(moved) => self.advance(moved),
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error.into()),
                },
            }
        }
        Ok(())
    }

    /// The next call's vectors, and how many.
    fn gather(&self, vectors: &mut [libc::iovec; PIECES_MAX]) -> usize {
        let (mut skip, mut room, mut count) = (self.done, CALL_BYTES, 0);
        for (piece, vector) in self.pieces.iter().zip(vectors) {
            let len = (piece.len - skip).min(room);
            let at = usize::try_from(piece.offset + skip).unwrap_or(usize::MAX);
            let base = self.mapping.base.as_ptr().wrapping_add(at);
            *vector = libc::iovec { iov_base: base.cast(), iov_len: usize::try_from(len).unwrap_or(0) };
            (skip, room, count) = (0, room - len, count + 1);
            if room == 0 {
                break;
            }
        }
        count
    }

    fn advance(&mut self, mut moved: u64) {
        while let [first, rest @ ..] = self.pieces {
            let left = first.len - self.done;
            if moved < left {
                self.done += moved;
                return;
            }
            moved -= left;
            (self.pieces, self.done) = (rest, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::tests::{bytes, mapped};
    use super::*;

    fn streams() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn pieces_travel_in_order_across_partial_calls() {
        let len = 6 << 20;
        let ((far, there), (near, here)) = (mapped(len, 0), mapped(len, 0xff));
        let piece = |offset: usize, len: usize| Extent { offset: offset as u64, len: len as u64 };
        // Many small ones, one longer than a call.
        let mut sent: Vec<Extent> = (0..3000).map(|index| piece(index * 700, 333)).collect();
        sent.push(piece(3 << 20, 2 << 20));
        let mut places: Vec<Extent> = (0..3000).rev().map(|index| piece(index * 800, 333)).collect();
        places.push(piece(3 << 20, 2 << 20));
        let (near_end, far_end) = streams();
        std::thread::scope(|scope| {
            scope.spawn(|| send_all(&far_end, &there, &sent).unwrap());
            receive_all(&near_end, &here, &places).unwrap();
        });
        let place = |at: u64| usize::try_from(at).unwrap();
        for (from, to) in sent.iter().zip(&places) {
            let [from, to] = [(&far, from), (&near, to)]
                .map(|(memory, e)| bytes_at(memory, place(e.offset), place(e.len)));
            assert!(from == to);
        }
        let untouched = bytes(&near)[333];
        assert_eq!(untouched, u8::try_from(333 % 251).unwrap() ^ 0xff);
    }

    fn bytes_at(memory: &towline_fabric::Memory, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        memory.read_into(at as u64, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn pieces_outside_and_streams_that_end_are_errors() {
        let (_memory, mapping) = mapped(4096, 0);
        let (near, far) = streams();
        assert!(send_all(&near, &mapping, &[Extent { offset: 4090, len: 8 }]).is_err());
        drop(far);
        assert!(receive_all(&near, &mapping, &[Extent { offset: 0, len: 8 }]).is_err());
    }
}
