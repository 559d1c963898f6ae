//! Pieces for one copy between processes, as the kernel wants them: ranges here and ranges there, filled in order.
//!
//! Neighbours are joined on each side by itself, as the sides need not be cut alike: a whole local buffer that is filled from
//! scattered pages is one range.

/// Ranges of one call on a side: the kernel's most (`UIO_MAXIOV`, 1,024), less one for the nonce.
const RANGES_MAX: usize = 1023;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Batch {
    local: List,
    remote: List,
    /// In all.
    pub(super) bytes: u64,
}

/// Ranges in the order in which they are filled or read.
#[derive(Debug, Default)]
struct List {
    ranges: Vec<libc::iovec>,
    /// How many of them are done with.
    done: usize,
}

impl Batch {
    /// Adds a piece; the kernel checks the address there.
    pub(super) fn push(&mut self, here: *mut u8, there: u64, len: usize) {
        if len == 0 {
            return;
        }
        let there = std::ptr::without_provenance_mut(usize::try_from(there).unwrap_or(usize::MAX));
        self.local.push(here, len);
        self.remote.push(there, len);
        self.bytes += len as u64;
    }

    /// Whether one side has as many ranges as leave room for the nonce.
    pub(super) fn is_full(&self) -> bool {
        self.local.ranges.len() >= RANGES_MAX || self.remote.ranges.len() >= RANGES_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// What is left, here and there.
    pub(super) fn lists(&self) -> (&[libc::iovec], &[libc::iovec]) {
        (self.local.left(), self.remote.left())
    }

    /// `count` bytes of what was left have moved.
    pub(super) fn advance(&mut self, count: usize) {
        self.local.advance(count);
        self.remote.advance(count);
    }
}

impl List {
    fn push(&mut self, at: *mut u8, len: usize) {
        match self.ranges.last_mut() {
            Some(last) if last.iov_base.addr().checked_add(last.iov_len) == Some(at.addr()) => {
                last.iov_len += len;
            }
            _ => self.ranges.push(libc::iovec { iov_base: at.cast(), iov_len: len }),
        }
    }

    fn left(&self) -> &[libc::iovec] {
        self.ranges.get(self.done..).unwrap_or_default()
    }

    fn advance(&mut self, mut count: usize) {
        while let Some(range) = self.ranges.get_mut(self.done) {
            if count < range.iov_len {
                range.iov_base = range.iov_base.wrapping_byte_add(count);
                range.iov_len -= count;
                return;
            }
            count -= range.iov_len;
            self.done += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: usize) -> *mut u8 {
        std::ptr::without_provenance_mut(address)
    }

    fn seen(list: &[libc::iovec]) -> Vec<(usize, usize)> {
        list.iter().map(|range| (range.iov_base.addr(), range.iov_len)).collect()
    }

    #[test]
    fn what_is_left_starts_where_the_call_stopped() {
        let left = |counts: &[usize]| {
            let mut batch = Batch::default();
            for (here, there, len) in [(100, 900, 4), (200, 904, 1), (300, 700, 9)] {
                batch.push(at(here), there, len);
            }
            counts.iter().for_each(|count| batch.advance(*count));
            let (local, remote) = batch.lists();
            (seen(local), seen(remote))
        };
        assert_eq!(left(&[0]), (vec![(100, 4), (200, 1), (300, 9)], vec![(900, 5), (700, 9)]));
        assert_eq!(left(&[3]), (vec![(103, 1), (200, 1), (300, 9)], vec![(903, 2), (700, 9)]));
        assert_eq!(left(&[4]), (vec![(200, 1), (300, 9)], vec![(904, 1), (700, 9)]));
        assert_eq!(left(&[3, 3]), (vec![(301, 8)], vec![(701, 8)]));
        assert_eq!(left(&[14]), (vec![], vec![]));
    }

    #[test]
    fn a_batch_is_full_when_one_side_is() {
        let mut batch = Batch::default();
        batch.push(at(9), 9, 0);
        assert!(batch.is_empty(), "nothing is no piece");
        for index in 0..RANGES_MAX {
            assert!(!batch.is_full());
            // Neighbours here, none there.
            batch.push(at(4096 + index), 4096 + 2 * index as u64, 1);
        }
        assert!(batch.is_full());
        assert_eq!((batch.lists().0.len(), batch.lists().1.len()), (1, RANGES_MAX));
    }
}
