//! One peer over shared memory: its regions as this process reaches them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use towline_wire::id::RegionId;
use towline_wire::receipt::{Evidence, EvidenceClass};

use super::copy::{INLINE_BYTES, Reach, Work};
use super::foreign::Borrowed;
use super::{CMA, MAPPING};
use crate::agent::Environment;
use crate::region::{Access, Memory};
use crate::transport::{Path, PathError, Slice, refuse_write};

/// What the peer's files and addresses became.
pub(super) struct ShmPath {
    environment: Arc<Environment>,
    mapped: HashMap<RegionId, Arc<Memory>>,
    borrowed: Arc<Borrowed>,
    closed: Arc<AtomicBool>,
}

impl ShmPath {
    pub(super) fn new(
        environment: &Arc<Environment>,
        mapped: HashMap<RegionId, Arc<Memory>>,
        borrowed: Arc<Borrowed>,
    ) -> Self {
        let closed = Arc::new(AtomicBool::new(false));
        Self { environment: Arc::clone(environment), mapped, borrowed, closed }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// How the region of a slice is reached, if it may be for that.
    fn reach(&self, slice: &Slice) -> Result<Reach, PathError> {
        let Some(memory) = self.mapped.get(&slice.region()) else {
            let found = self.borrowed.find(slice.region(), slice.op()).map(Reach::Address);
            // Set before they were given up: then that is why there are none.
            return found.map_err(|error| if self.is_closed() { closed() } else { error });
        };
        let access = if memory.is_writable() { Access::PeersWrite } else { Access::PeersRead };
        refuse_write(slice.op(), access)?;
        Ok(Reach::Mapping(Arc::clone(memory)))
    }
}

fn closed() -> PathError {
    PathError::Closed("the path was closed".into())
}

fn evidence(source: &str) -> Evidence {
    Evidence { class: EvidenceClass::LibraryExact, source: source.into() }
}

impl Path for ShmPath {
    fn evidence(&self) -> Evidence {
        match (self.borrowed.is_unused(), self.mapped.is_empty()) {
            (true, _) => evidence(MAPPING),
            (false, true) => evidence(CMA),
            (false, false) => evidence(&format!("{MAPPING}+{CMA}")),
        }
    }

    fn evidence_of(&self, region: RegionId) -> Evidence {
        evidence(if self.mapped.contains_key(&region) { MAPPING } else { CMA })
    }

    fn rails(&self) -> Vec<String> {
        super::RAILS.map(String::from).into()
    }

    fn post(&self, slice: Slice) {
        let reach = match self.reach(&slice) {
            Ok(reach) => reach,
            Err(error) => return slice.complete(Err(error)),
        };
        let inline = slice.bytes() <= INLINE_BYTES;
        let work = Work { slice, reach, closed: Arc::clone(&self.closed) };
        if inline { work.run() } else { self.environment.copiers.submit(work) }
    }

    /// Slices that wait complete when a thread comes to them, without being copied; one being copied takes as long
    /// as 2 MiB take.
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.borrowed.clear();
    }
}

impl Drop for ShmPath {
    /// Whoever forgets to close it must not keep the owner's memory. What waits to be copied out of mappings goes on: a
    /// path is dropped unclosed when another replaces it.
    fn drop(&mut self) {
        self.borrowed.clear();
    }
}
