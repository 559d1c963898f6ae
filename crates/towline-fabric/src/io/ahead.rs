//! Bytes that were read before anybody asked for them.
//!
//! **Cost.** A small frame with its payload comes with one system call instead of three or four, and a read that gave less
//! than there was room for spares the one that would say that nothing is left. What is read ahead is copied once more, so a
//! channel reads ahead only while it expects little. Nothing is kept while nothing waits: an idle session holds no buffer.
//!
//! That the socket was empty holds for one turn of its session: it is edge-triggered, so what comes later brings another.

use std::io;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    bytes: Vec<u8>,
    at: usize,
    /// Whether the last read left the socket empty.
    dry: bool,
}

impl Ahead {
    /// Reads up to `room` bytes with `read`, when everything before was taken.
    ///
    /// # Errors
    /// What `read` gives; `WouldBlock` without asking after a read that left the socket empty in this turn.
    pub(super) fn fill(
        &mut self,
        room: usize,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if self.dry {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.bytes.resize(room, 0);
        self.at = 0;
        let outcome = read(&mut self.bytes);
        let count = *outcome.as_ref().unwrap_or(&0);
        self.bytes.truncate(count);
        self.dry = count > 0 && count < room;
        outcome
    }

    /// A new turn, or a read past this one: nothing is known of the socket any more.
    pub(super) fn forget(&mut self) {
        self.dry = false;
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
    fn a_read_that_left_room_spares_the_next_one_in_a_turn() {
        let mut ahead = Ahead::default();
        let mut reads = 0;
        let mut fill = |ahead: &mut Ahead, give: usize| {
            ahead.fill(4, |into| {
                reads += 1;
                into[..give].fill(7);
                Ok(give)
            })
        };
        assert_eq!(fill(&mut ahead, 4).unwrap(), 4);
        ahead.consume(1);
        assert_eq!(ahead.rest(), [7; 3]);
        ahead.consume(3);
        assert_eq!(fill(&mut ahead, 2).unwrap(), 2, "a full read says nothing about the rest");
        ahead.consume(2);
        assert_eq!(fill(&mut ahead, 4).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        ahead.forget();
        assert_eq!(fill(&mut ahead, 0).unwrap(), 0, "the end of the stream is not an empty socket");
        assert_eq!((fill(&mut ahead, 1).unwrap(), reads), (1, 4));
    }
}
