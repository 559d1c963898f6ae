//! Bytes straight between a socket and mapped memory, without a buffer between.
//!
//! **Cost.** One `recvmsg` or `sendmsg` moves up to [`PIECES`] extents or [`BYTES`] bytes, whichever is less: the
//! kernel's own copy and nothing else, no allocation. The iovecs hold raw addresses: memory that a peer may write is
//! never a slice here, and what a concurrent writer does to the bytes is the fence's and the digest's business.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use towline_wire::blocks::Extent;

use super::{Memory, RangeError, ZeroCopy};

/// Extents of one call: 2 KiB of iovecs on the stack, and at 4 KiB a page already 512 KiB a call.
const PIECES: usize = 128;
/// Bytes of one call: more than a socket takes at once.
const BYTES: u64 = 4 << 20;

/// A list of extents of one memory that is being received or sent, and how far that has come.
pub(crate) struct Payload {
    memory: Arc<Memory>,
    extents: Vec<Extent>,
    index: usize,
    into_extent: u64,
    left: u64,
    moved: u64,
    /// What was received already could not be put in its place: it is lost, and nothing may follow it.
    broken: bool,
}

impl Payload {
    /// A payload to fill from a socket.
    ///
    /// # Errors
    /// [`RangeError`] when an extent leaves the memory or the memory takes no writes.
    pub(crate) fn incoming(memory: Arc<Memory>, extents: Vec<Extent>) -> Result<Self, RangeError> {
        extents.iter().try_for_each(|extent| memory.check_writable(extent.offset, extent.len).map(drop))?;
        Ok(Self::new(memory, extents))
    }

    /// A payload to send to a socket.
    ///
    /// # Errors
    /// [`RangeError`] when an extent leaves the memory.
    pub(crate) fn outgoing(memory: Arc<Memory>, extents: Vec<Extent>) -> Result<Self, RangeError> {
        extents.iter().try_for_each(|extent| memory.check(extent.offset, extent.len).map(drop))?;
        Ok(Self::new(memory, extents))
    }

    fn new(memory: Arc<Memory>, mut extents: Vec<Extent>) -> Self {
        // Pages that are scattered at the peer often lie side by side here.
        extents.dedup_by(|next, last| {
            let touches = last.offset + last.len == next.offset;
            last.len += if touches { next.len } else { 0 };
            touches
        });
        let left = extents.iter().map(|extent| extent.len).sum();
        Self { memory, extents, index: 0, into_extent: 0, left, moved: 0, broken: false }
    }

    /// Whether every byte has moved.
    pub(crate) fn is_complete(&self) -> bool {
        self.left == 0
    }

    /// Bytes that sockets took or gave.
    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    /// Receives what one call gives. Zero bytes mean that the peer hung up.
    ///
    /// # Errors
    /// The kernel's, `WouldBlock` included.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<u64> {
        if self.broken {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        let mut pieces = [EMPTY; PIECES];
        let mut message = self.gather(&mut pieces);
        // SAFETY: the message points to `pieces`, and those into the mapping, which `self.memory` keeps; the
        // constructor checked that each extent lies inside and may be written.
        let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
        self.advance(count)
    }

    /// Takes what was received already; bytes beyond the end stay.
    pub(crate) fn take(&mut self, received: &[u8]) -> usize {
        let mut taken = 0;
        while let (Some(extent), true) = (self.extents.get(self.index), taken < received.len()) {
            let here = usize::try_from(extent.len - self.into_extent).unwrap_or(usize::MAX);
            let piece = &received[taken..][..here.min(received.len() - taken)];
            if self.memory.write_from(extent.offset + self.into_extent, piece).is_err() {
                // The constructor checked every extent, so it is a file's that was cut short since.
                self.broken = true;
                break;
            }
            taken += piece.len();
            self.advance_by(piece.len() as u64);
        }
        taken
    }

    /// Sends what one call takes of `head` and then of this; gives the bytes of `head`. What `zero_copy` allows is
    /// not copied: it may not change nor go before that says that the kernel is done with it.
    ///
    /// # Errors
    /// The kernel's, `WouldBlock` included. A closed socket is an error, never a signal.
    pub(crate) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        head: &[u8],
        zero_copy: Option<&mut ZeroCopy>,
    ) -> io::Result<usize> {
        let mut pieces = [EMPTY; PIECES];
        let mut message = self.gather(&mut pieces[1..]);
        let mut flags = libc::MSG_NOSIGNAL;
        if let Some(sends) = zero_copy.filter(|sends| sends.admit(self.left.min(BYTES))) {
            if head.is_empty() {
                let flags = flags | libc::MSG_ZEROCOPY;
                // SAFETY: as in `receive`; the kernel only reads, until the send that is noted below is completed.
                let count = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
                // Without room for one more (`optmem_max`, the lock limit) the bytes are copied.
                if count >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ENOBUFS) {
                    let count = self.advance(count)?;
                    sends.note(&self.memory, count);
                    return Ok(0);
                }
            } else {
                // A frame is copied: it goes ahead, and waits for its payload in the kernel.
                message.msg_iovlen = 0;
                flags |= libc::MSG_MORE;
            }
        }
        // The kernel only reads it.
        pieces[0] = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen += 1;
        // SAFETY: as in `receive`; the kernel only reads, and `head` outlives the call.
        let count = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        let of_head = count.min(head.len());
        self.advance_by((count - of_head) as u64);
        Ok(of_head)
    }

    fn gather(&self, pieces: &mut [libc::iovec]) -> libc::msghdr {
        let (mut skip, mut budget, mut count) = (self.into_extent, BYTES, 0);
        for (extent, piece) in self.extents.iter().skip(self.index).zip(pieces.iter_mut()) {
            let len = (extent.len - skip).min(budget);
            let at = usize::try_from(extent.offset + skip).unwrap_or(usize::MAX);
            let base = self.memory.base.as_ptr().wrapping_add(at);
            *piece = libc::iovec { iov_base: base.cast(), iov_len: usize::try_from(len).unwrap_or(0) };
            (skip, budget, count) = (0, budget - len, count + 1);
            if budget == 0 {
                break;
            }
        }
        // SAFETY: a msghdr of zeros is a valid empty message (all its fields are integers and pointers).
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = count;
        message
    }

    fn advance(&mut self, count: isize) -> io::Result<u64> {
        let count = u64::try_from(count).map_err(|_| io::Error::last_os_error())?;
        self.advance_by(count);
        Ok(count)
    }

    fn advance_by(&mut self, count: u64) {
        (self.left, self.moved) = (self.left - count, self.moved + count);
        let mut rest = count;
        while rest > 0 {
            let here = self.extents[self.index].len - self.into_extent;
            let step = rest.min(here);
            rest -= step;
            self.into_extent += step;
            if step == here {
                (self.index, self.into_extent) = (self.index + 1, 0);
            }
        }
    }
}

const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn extents(list: &[(u64, u64)]) -> Vec<Extent> {
        list.iter().map(|(offset, len)| Extent { offset: *offset, len: *len }).collect()
    }

    #[test]
    fn bytes_scatter_and_gather_in_order_across_partial_calls() {
        let memory = Arc::new(Memory::allocate("io", 1 << 20).unwrap());
        let list: Vec<(u64, u64)> = (0..300).map(|i| ((299 - i) * 3000, 1 + i % 7)).collect();
        let total: u64 = list.iter().map(|(_, len)| len).sum();
        let sent: Vec<u8> = (0..total).map(|i| u8::try_from(i % 251).unwrap()).collect();
        let (mut far, near) = UnixStream::pair().unwrap();
        let mut incoming = Payload::incoming(Arc::clone(&memory), extents(&list)).unwrap();
        for part in sent.chunks(97) {
            far.write_all(part).unwrap();
            let mut want = part.len() as u64;
            while want > 0 {
                want -= incoming.receive(near.as_fd()).unwrap();
            }
        }
        assert!(incoming.is_complete() && incoming.moved() == total);
        let mut outgoing = Payload::outgoing(memory, extents(&list)).unwrap();
        while !outgoing.is_complete() {
            outgoing.send(near.as_fd(), &[], None).unwrap();
        }
        let mut back = vec![0; sent.len()];
        far.read_exact(&mut back).unwrap();
        assert_eq!(back, sent);
    }

    #[test]
    fn a_payload_for_a_file_that_was_cut_short_is_an_error_and_never_out_of_order() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let memory = Memory::open_file(file.path(), 0, 8192, crate::Access::PeersWrite).unwrap();
        let mut payload = Payload::incoming(Arc::new(memory), extents(&[(0, 8192)])).unwrap();
        assert_eq!(payload.take(&[1; 100]), 100);
        // The rest of the first page is still mapped, and would take what the socket has.
        file.as_file().set_len(100).unwrap();
        assert_eq!(payload.take(&[2; 100]), 0);
        let (mut far, near) = UnixStream::pair().unwrap();
        far.write_all(&[3; 100]).unwrap();
        assert_eq!(payload.receive(near.as_fd()).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        assert!(!payload.is_complete() && payload.moved() == 100);
    }

    #[test]
    fn extents_outside_and_hung_up_sockets_are_errors() {
        let memory = Arc::new(Memory::allocate("io", 4096).unwrap());
        assert!(Payload::incoming(Arc::clone(&memory), extents(&[(4090, 7)])).is_err());
        let (far, near) = UnixStream::pair().unwrap();
        drop(far);
        let mut payload = Payload::outgoing(memory, extents(&[(0, 4096)])).unwrap();
        assert_eq!(payload.send(near.as_fd(), &[], None).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
