//! Bytes that were read before anybody asked for them.
//!
//! **Cost.** A small frame with its payload comes with one system call instead of three or four. What is read ahead is
//! copied once more, so a channel reads ahead only while it expects little. Nothing is kept while nothing waits: an idle
//! session holds no buffer.
//!
//! That a read left room doesn't say that the socket is empty: the end of the stream may stand behind the bytes, and no
//! event comes for it any more.

use std::io;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    bytes: Vec<u8>,
    at: usize,
}

impl Ahead {
    /// Reads up to `room` bytes with `read`, when everything before was taken.
    ///
    /// # Errors
    /// What `read` gives.
    pub(super) fn fill(
        &mut self,
        room: usize,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.bytes.resize(room, 0);
        self.at = 0;
        let outcome = read(&mut self.bytes);
        self.bytes.truncate(*outcome.as_ref().unwrap_or(&0));
        if self.bytes.is_empty() {
            self.bytes = Vec::new();
        }
        outcome
    }

    /// What waits.
    pub(super) fn rest(&self) -> &[u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// Takes `count` bytes of what waits.
    pub(super) fn consume(&mut self, count: usize) {
        self.at += count;
        if self.at >= self.bytes.len() {
            (self.bytes, self.at) = (Vec::new(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_taken_in_order_and_nothing_is_kept_afterwards() {
        let mut ahead = Ahead::default();
        let read = |into: &mut [u8]| {
            into[..3].copy_from_slice(&[1, 2, 3]);
            Ok(3)
        };
        assert_eq!(ahead.fill(8, read).unwrap(), 3);
        assert_eq!(ahead.rest(), [1, 2, 3]);
        ahead.consume(1);
        assert_eq!(ahead.rest(), [2, 3]);
        ahead.consume(2);
        assert!(ahead.rest().is_empty() && ahead.bytes.capacity() == 0);
        assert!(ahead.fill(8, |_| Err(io::ErrorKind::WouldBlock.into())).is_err());
        assert!(ahead.rest().is_empty() && ahead.bytes.capacity() == 0);
    }
}
