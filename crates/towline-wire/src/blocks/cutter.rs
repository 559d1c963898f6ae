//! Which bytes of two block lists belong together, a bounded piece of work at a time.
//!
//! **Cost.** Some ns a block, no memory but for the runs asked for: a transfer of 112,000 pages is cut while it moves,
//! 2 MiB at a time, so that posting it costs its first slices only.

use super::{BlockList, BlockListError};

/// Bytes that are contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset in the local region.
    pub local: u64,
    /// Offset in the remote region.
    pub remote: u64,
    /// Bytes.
    pub len: u64,
}

/// How much [`Cutter::cut`] gives at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of all runs together; at least one.
    pub bytes: u64,
    /// Runs; at least one.
    pub runs: usize,
    /// Bytes of each run; at least one.
    pub run_bytes: u64,
}

/// Pairs the bytes of a local list with those of a remote one, in order, and merges neighbours that are contiguous on
/// both. Block sizes may differ. It remembers where it is and nothing else: always give it the same lists.
#[derive(Clone, Debug, Default)]
pub struct Cutter {
    ours: Cursor,
    theirs: Cursor,
    /// Where the last run ended, on both sides.
    end: Option<(u64, u64)>,
    pieces: u64,
}

impl Cutter {
    /// At the start of two lists.
    ///
    /// # Errors
    /// [`BlockListError::Totals`] when they name different amounts of bytes.
    pub fn new(local: &BlockList, remote: &BlockList) -> Result<Self, BlockListError> {
        if local.bytes() != remote.bytes() {
            return Err(BlockListError::Totals { local: local.bytes(), remote: remote.bytes() });
        }
        Ok(Self::default())
    }

    /// The next runs, as many as `bounds` allow; none at the end.
    pub fn cut(&mut self, local: &BlockList, remote: &BlockList, bounds: Bounds) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut room = bounds.bytes.max(1);
        while room > 0
            && let (Some(our), Some(their)) = (self.ours.rest(local), self.theirs.rest(remote))
        {
            let touches = self.end == Some((our.0, their.0));
            let mut len = our.1.min(their.1).min(room);
            let full = runs.len() >= bounds.runs.max(1);
            match runs.last_mut().filter(|last| touches && last.len < bounds.run_bytes) {
                Some(last) => {
                    len = len.min(bounds.run_bytes - last.len);
                    last.len += len;
                }
                None if full => break,
                None => {
                    len = len.min(bounds.run_bytes.max(1));
                    runs.push(Run { local: our.0, remote: their.0, len });
                    self.pieces += u64::from(!touches);
                }
            }
            self.end = Some((our.0 + len, their.0 + len));
            self.ours.advance(local, len);
            self.theirs.advance(remote, len);
            room -= len;
        }
        runs
    }

    /// Whether everything was cut.
    pub fn is_done(&self, local: &BlockList) -> bool {
        self.ours.rest(local).is_none()
    }

    /// Pieces so far that do not go on, on both sides, where the one before ended: what the lists come to when nothing
    /// but the end of a contiguous stretch ends a run.
    pub fn pieces(&self) -> u64 {
        self.pieces
    }
}

/// A place in a list: a base, an index, and bytes of that block that were used.
#[derive(Clone, Debug, Default)]
struct Cursor {
    base: usize,
    index: usize,
    used: u64,
}

impl Cursor {
    /// What is left of the block it is at: offset and bytes.
    fn rest(&self, list: &BlockList) -> Option<(u64, u64)> {
        let (base, index) = (list.bases.get(self.base)?, list.indices.get(self.index)?);
        let offset = base + u64::from(*index) * list.stride + self.used;
        (list.block_bytes > self.used).then(|| (offset, list.block_bytes - self.used))
    }

    /// Uses `bytes` of what is left of the block, and goes to the next when that was all.
    fn advance(&mut self, list: &BlockList, bytes: u64) {
        self.used += bytes;
        if self.used < list.block_bytes {
            return;
        }
        (self.used, self.index) = (0, self.index + 1);
        if self.index >= list.indices.len() {
            (self.index, self.base) = (0, self.base + 1);
        }
    }
}

/// All runs of two lists at once, each of at most `run_bytes_max`. `O(blocks)` time, and memory for the runs only.
///
/// # Errors
/// [`BlockListError::Totals`] when the lists name different amounts of bytes.
pub fn runs(local: &BlockList, remote: &BlockList, run_bytes_max: u64) -> Result<Vec<Run>, BlockListError> {
    let whole = Bounds { bytes: u64::MAX, runs: usize::MAX, run_bytes: run_bytes_max };
    Ok(Cutter::new(local, remote)?.cut(local, remote, whole))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(bases: Vec<u64>, block_bytes: u64, stride: u64, indices: Vec<u32>) -> BlockList {
        BlockList { group: 0, bases, block_bytes, stride, indices }
    }

    #[test]
    fn neighbours_on_both_sides_become_one_run() {
        let local = list(vec![0], 10, 10, vec![0, 1, 2, 7]);
        let remote = list(vec![1000], 10, 10, vec![4, 5, 6, 0]);
        let found = runs(&local, &remote, u64::MAX).unwrap();
        assert_eq!(
            found,
            vec![Run { local: 0, remote: 1040, len: 30 }, Run { local: 70, remote: 1000, len: 10 }]
        );
    }

    #[test]
    fn unequal_totals_are_refused() {
        let short = list(vec![0], 10, 10, vec![0]);
        let long = list(vec![0], 10, 10, vec![0, 1]);
        assert_eq!(runs(&short, &long, 64), Err(BlockListError::Totals { local: 10, remote: 20 }));
    }

    #[test]
    fn a_stretch_that_several_pieces_of_work_share_counts_once() {
        let (local, remote) = (list(vec![0], 10, 10, vec![0, 1, 2, 7]), list(vec![0], 40, 40, vec![1]));
        let mut cutter = Cutter::new(&local, &remote).unwrap();
        let bounds = Bounds { bytes: 12, runs: 9, run_bytes: 7 };
        let mut cuts = Vec::new();
        while !cutter.is_done(&local) {
            cuts.push(cutter.cut(&local, &remote, bounds).iter().map(|run| run.len).collect::<Vec<_>>());
        }
        assert_eq!(cuts, [vec![7, 5], vec![7, 5], vec![6, 6], vec![4]]);
        assert_eq!(cutter.pieces(), 2);
        assert!(cutter.cut(&local, &remote, bounds).is_empty());
    }

    proptest! {
        /// The naive pairing, byte by byte, is the oracle.
        #[test]
        fn cuts_pair_the_same_bytes_as_a_naive_walk_within_their_bounds(
            ours in prop::collection::vec(0u32..20, 1..12),
            theirs in prop::collection::vec(0u32..20, 1..12),
            bases in 1usize..4,
            unit in 1u64..5,
            (bytes, count, run_bytes) in (1u64..80, 1usize..6, 1u64..60),
        ) {
            let bases: Vec<u64> = (0..bases as u64).map(|b| b * 10_000).collect();
            let local = list(bases.clone(), unit * theirs.len() as u64, 100, ours);
            let remote = list(bases, unit * local.indices.len() as u64, 128, theirs);
            let whole = |l: &BlockList| l.extents().flat_map(|e| e.offset..e.offset + e.len).collect::<Vec<_>>();
            let naive: Vec<_> = whole(&local).into_iter().zip(whole(&remote)).collect();
            let expand = |runs: &[Run]| {
                runs.iter().flat_map(|run| (0..run.len).map(|i| (run.local + i, run.remote + i))).collect::<Vec<_>>()
            };
            let mut cutter = Cutter::new(&local, &remote).unwrap();
            let mut cut = Vec::new();
            while !cutter.is_done(&local) {
                let some = cutter.cut(&local, &remote, Bounds { bytes, runs: count, run_bytes });
                prop_assert!((1..=count).contains(&some.len()));
                prop_assert!(some.iter().map(|run| run.len).sum::<u64>() <= bytes);
                prop_assert!(some.iter().all(|run| (1..=run_bytes).contains(&run.len)));
                cut.extend(expand(&some));
            }
            prop_assert_eq!(&cut, &naive);
            let merged = runs(&local, &remote, u64::MAX).unwrap();
            prop_assert_eq!(merged.len() as u64, cutter.pieces());
            prop_assert_eq!(expand(&merged), naive);
        }
    }
}
