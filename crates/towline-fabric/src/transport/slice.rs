//! The unit of work of a transport: at most 2 MiB and 4096 runs of one transfer.
//!
//! A slice owns what its transport needs and nothing more. It completes exactly once: by [`Slice::complete`], or, when
//! dropped, with an error. It lets go of the local memory *before* it reports, so that whoever counts completions
//! knows that nothing touches the memory any more.

use std::sync::Arc;

use towline_wire::blocks::{Extent, Run};
use towline_wire::id::RegionId;
use towline_wire::receipt::Op;

use super::{Lease, PathError};
use crate::region::Memory;

/// Takes the completions of a transfer's slices, on any thread, once a slice.
pub trait SliceSink: Send + Sync {
    /// A slice ended: with what the transport counted, or with the reason why the bytes are not in place. The
    /// transport holds no reference to the memory any more.
    fn handle_slice(&self, outcome: Result<Moved, PathError>);

    /// Whether a slice that has not been started should still be.
    fn is_wanted(&self) -> bool;
}

/// What a transport counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Bytes that are in place.
    pub bytes: u64,
    /// Which of the path's rails carried them.
    pub rail: usize,
}

/// Up to 2 MiB of one transfer.
pub struct Slice {
    op: Op,
    region: RegionId,
    lease: Lease,
    runs: Arc<[Run]>,
    bytes: u64,
    part_of_bytes: u64,
    local: Option<Arc<Memory>>,
    sink: Option<Arc<dyn SliceSink>>,
}

/// What a slice is made of.
pub(crate) struct SliceParts {
    pub(crate) op: Op,
    pub(crate) region: RegionId,
    pub(crate) lease: Lease,
    pub(crate) runs: Arc<[Run]>,
    /// Bytes of the whole transfer.
    pub(crate) part_of_bytes: u64,
    pub(crate) local: Arc<Memory>,
}

impl Slice {
    pub(crate) fn new(parts: SliceParts, sink: Arc<dyn SliceSink>) -> Self {
        let SliceParts { op, region, lease, runs, part_of_bytes, local } = parts;
        let bytes = runs.iter().map(|run| run.len).sum();
        Self { op, region, lease, runs, bytes, part_of_bytes, local: Some(local), sink: Some(sink) }
    }

    /// Read or write.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The peer's region.
    pub fn region(&self) -> RegionId {
        self.region
    }

    /// The lease to name.
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// Bytes to move.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the whole transfer that it is a part of.
    pub fn part_of_bytes(&self) -> u64 {
        self.part_of_bytes
    }

    /// The pieces, in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The pieces, for longer than the slice.
    pub(crate) fn shared_runs(&self) -> Arc<[Run]> {
        Arc::clone(&self.runs)
    }

    /// The pieces on the peer's side.
    pub fn remote_extents(&self) -> Vec<Extent> {
        self.runs().iter().map(|run| Extent { offset: run.remote, len: run.len }).collect()
    }

    /// The pieces on this side.
    pub fn local_extents(&self) -> Vec<Extent> {
        self.runs().iter().map(|run| Extent { offset: run.local, len: run.len }).collect()
    }

    /// The local memory. Give up every clone before completing the slice.
    pub fn local(&self) -> Option<&Arc<Memory>> {
        self.local.as_ref()
    }

    /// Whether somebody still wants it; ask before starting it.
    pub fn is_wanted(&self) -> bool {
        self.sink.as_ref().is_some_and(|sink| sink.is_wanted())
    }

    /// Ends it: `outcome` is what the transport counted, or why the bytes are not in place.
    pub fn complete(mut self, outcome: Result<Moved, PathError>) {
        self.finish(outcome);
    }

    fn finish(&mut self, outcome: Result<Moved, PathError>) {
        self.local = None;
        if let Some(sink) = self.sink.take() {
            sink.handle_slice(outcome);
        }
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        self.finish(Err(PathError::Down("the transport dropped the request".into())));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use towline_wire::id::{Generation, LeaseId};

    use super::*;

    struct Seen {
        memory: std::sync::Weak<Memory>,
        outcomes: Mutex<Vec<Result<Moved, PathError>>>,
    }

    impl SliceSink for Seen {
        fn handle_slice(&self, outcome: Result<Moved, PathError>) {
            assert!(self.memory.upgrade().is_none(), "the slice lets go of the memory before it reports");
            self.outcomes.lock().unwrap().push(outcome);
        }

        fn is_wanted(&self) -> bool {
            true
        }
    }

    fn slice() -> (Slice, Arc<Seen>) {
        let local = Arc::new(Memory::allocate("slice", 4096).unwrap());
        let seen = Arc::new(Seen { memory: Arc::downgrade(&local), outcomes: Mutex::default() });
        let parts = SliceParts {
            op: Op::Read,
            region: RegionId(1),
            lease: Some((LeaseId(1), Generation(1))),
            runs: vec![Run { local: 0, remote: 8, len: 5 }; 2].into(),
            part_of_bytes: 15,
            local,
        };
        (Slice::new(parts, Arc::<Seen>::clone(&seen)), seen)
    }

    #[test]
    fn a_slice_completes_once_and_after_letting_go() {
        let (slice, seen) = slice();
        assert_eq!((slice.bytes(), slice.remote_extents().len()), (10, 2));
        let moved = Moved { bytes: 10, rail: 0 };
        slice.complete(Ok(moved));
        assert_eq!(*seen.outcomes.lock().unwrap(), [Ok(moved)]);
    }

    #[test]
    fn a_dropped_slice_completes_with_an_error() {
        let (slice, seen) = slice();
        drop(slice);
        assert!(matches!(seen.outcomes.lock().unwrap().as_slice(), [Err(PathError::Down(_))]));
    }
}
