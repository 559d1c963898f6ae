//! Sends from memory that the kernel does not copy (`MSG_ZEROCOPY`), and when it is done with the memory.
//!
//! **Cost.** A copy into the socket costs some 0.1 s of a core a GB; a zero-copy send costs the pinning of pages and a
//! completion on the socket's error queue, and pays from some tens of KiB on. Over loopback and other paths that end in
//! this host the kernel copies anyway, later: this is for sockets that leave the host, and a socket whose sends are
//! copied all the same goes back to plain ones.
//!
//! The kernel numbers the sends of a socket from 0 and tells ranges of numbers that it is done with; it may do so out of
//! order (Linux, Documentation/networking/msg_zerocopy.rst). Each send keeps its memory mapped until then.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use super::Memory;

/// Smallest send worth it: the kernel's document names 10 KB; scattered pages cost more than one long piece.
pub(super) const SEND_BYTES_MIN: u64 = 64 * 1024;

/// Most sends of a socket that the kernel is not done with: each is up to 4 MiB in its send buffer, so a healthy socket
/// has a few.
const PENDING_MAX: u32 = 256;

/// Sends in a row that the kernel copied after all until the socket goes back to plain ones.
const COPIED_MAX: u32 = 8;

/// Space for one message of the error queue: its header, the error, and an address of either family.
const CONTROL_BYTES: usize = 128;

/// The zero-copy sends of one socket.
#[derive(Debug, Default)]
pub(crate) struct ZeroCopy {
    /// Sends completed at the front of the queue since the start; the kernel's number of a send is its low 32 bits.
    completed: u64,
    /// The sends after those; `None` for one that was completed before an older one.
    pending: VecDeque<Option<Arc<Memory>>>,
    copied_in_a_row: u32,
    /// Bytes sent so that nobody has counted yet.
    uncounted: u64,
}

impl ZeroCopy {
    /// Asks the kernel to allow it for this socket; `None` where it does not.
    pub(crate) fn open(socket: BorrowedFd<'_>) -> Option<Self> {
        let on: libc::c_int = 1;
        let len = libc::socklen_t::try_from(size_of_val(&on)).ok()?;
        // SAFETY: the value is an int that outlives the call, and its length is given.
        let refused = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ZEROCOPY,
                (&raw const on).cast(),
                len,
            )
        };
        (refused == 0).then(Self::default)
    }

    /// Whether a call that sends `bytes` should do it so.
    pub(super) fn admit(&self, bytes: u64) -> bool {
        bytes >= SEND_BYTES_MIN
            && self.copied_in_a_row < COPIED_MAX
            && self.pending.len() < PENDING_MAX as usize
    }

    /// Notes a call that sent `bytes` of `memory`.
    pub(super) fn note(&mut self, memory: &Arc<Memory>, bytes: u64) {
        self.pending.push_back(Some(Arc::clone(memory)));
        self.uncounted += bytes;
    }

    /// Bytes sent so since the last call.
    pub(crate) fn take_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.uncounted)
    }

    /// Sends since the start.
    pub(crate) fn sent(&self) -> u64 {
        self.completed + self.pending.len() as u64
    }

    /// How many of the oldest sends are all completed.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Takes the completions that are there.
    ///
    /// # Errors
    /// The kernel's, other than that there is nothing.
    pub(crate) fn collect(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while !self.pending.is_empty() {
            match receive(socket) {
                Ok(Some((numbers, copied))) => self.handle_completed(numbers, copied),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn handle_completed(&mut self, (first, last): (u32, u32), copied: bool) {
        self.copied_in_a_row = if copied { self.copied_in_a_row.saturating_add(1) } else { 0 };
        // The low bits of what was completed; numbers before it were taken earlier.
        #[expect(clippy::cast_possible_truncation, reason = "the kernel counts with 32 bits")]
        let front = self.completed as u32;
        for step in 0..=last.wrapping_sub(first).min(PENDING_MAX) {
            let index = first.wrapping_add(step).wrapping_sub(front);
            if let Some(send) = usize::try_from(index).ok().and_then(|index| self.pending.get_mut(index)) {
                *send = None;
            }
        }
        while self.pending.front().is_some_and(Option::is_none) {
            self.pending.pop_front();
            self.completed += 1;
        }
    }
}

/// One message of the error queue: which calls the kernel is done with, and whether it copied after all. `None` for a
/// message about something else.
fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<((u32, u32), bool)>> {
    // `u64`s, so that the headers in it are aligned.
    let mut control = [0_u64; CONTROL_BYTES / 8];
    // SAFETY: a msghdr of zeros is a valid empty message (all its fields are integers and pointers).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the message has no data, and control space that outlives the call.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel filled `message`, whose control space is `control`.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: null, or a header inside `control`, which is aligned for it.
    let Some(found) = (unsafe { header.as_ref() }) else { return Ok(None) };
    let about_errors = matches!(
        (found.cmsg_level, found.cmsg_type),
        (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
    );
    // SAFETY: the length without data, from a constant.
    let needed = unsafe { libc::CMSG_LEN(u32::try_from(size_of::<libc::sock_extended_err>()).unwrap_or(0)) };
    if !about_errors || found.cmsg_len < usize::try_from(needed).unwrap_or(usize::MAX) {
        return Ok(None);
    }
    // SAFETY: the header lies inside `control`; its data follow.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: the header's length says that the data hold an error; they may be unaligned.
    let error = unsafe { data.cast::<libc::sock_extended_err>().read_unaligned() };
    if error.ee_origin != ORIGIN {
        return Ok(None);
    }
    Ok(Some(((error.ee_info, error.ee_data), error.ee_code == COPIED)))
}

/// `SO_EE_ORIGIN_ZEROCOPY` of Linux's `errqueue.h`, which libc does not name.
const ORIGIN: u8 = 5;
/// `SO_EE_CODE_ZEROCOPY_COPIED`.
const COPIED: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn sends(count: usize) -> (ZeroCopy, Arc<Memory>) {
        let memory = Arc::new(Memory::allocate("zerocopy", 4096).unwrap());
        let mut sends = ZeroCopy::default();
        (0..count).for_each(|_| sends.note(&memory, 1));
        (sends, memory)
    }

    #[test]
    fn completions_come_in_any_order_and_let_go_of_the_memory() {
        let (mut sends, memory) = sends(5);
        sends.handle_completed((1, 2), false);
        assert_eq!((sends.sent(), sends.completed(), Arc::strong_count(&memory)), (5, 0, 4));
        sends.handle_completed((0, 0), false);
        assert_eq!((sends.sent(), sends.completed(), Arc::strong_count(&memory)), (5, 3, 3));
        sends.handle_completed((3, 4), false);
        assert_eq!((sends.sent(), sends.completed(), Arc::strong_count(&memory)), (5, 5, 1));
    }

    #[test]
    fn numbers_wrap_and_strange_ones_change_nothing() {
        let (mut sends, memory) = sends(2);
        sends.completed = u64::from(u32::MAX);
        sends.handle_completed((7, 9), false);
        sends.handle_completed((9, 7), false);
        assert_eq!(Arc::strong_count(&memory), 3);
        sends.handle_completed((u32::MAX, 0), false);
        assert_eq!((sends.completed(), Arc::strong_count(&memory)), (u64::from(u32::MAX) + 2, 1));
    }

    #[test]
    fn a_socket_whose_sends_are_copied_goes_back_to_plain_ones() {
        let (mut sends, _memory) = sends(20);
        assert!(sends.admit(SEND_BYTES_MIN) && !sends.admit(SEND_BYTES_MIN - 1));
        (0..COPIED_MAX - 1).for_each(|number| sends.handle_completed((number, number), true));
        assert!(sends.admit(SEND_BYTES_MIN));
        sends.handle_completed((COPIED_MAX, COPIED_MAX), true);
        assert!(!sends.admit(SEND_BYTES_MIN));
    }
}
