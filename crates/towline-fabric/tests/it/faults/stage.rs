//! A transport that a test plays by hand: slices wait on a stage until the test moves them, in the order that it likes.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use towline_fabric::transport::{
    Capabilities, Moved, Opened, Path, PathError, PeerAddress, Slice, Transport,
};
use towline_fabric::{Access, Memory, RegisterError};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Evidence, EvidenceClass, TransportKind};

use crate::support::PATIENCE;

/// One stage serves both sides: the owner registers with it, the reader's path ends there.
#[derive(Default)]
pub(super) struct Stage {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    regions: HashMap<RegionId, Arc<Memory>>,
    waiting: Vec<Slice>,
}

impl Stage {
    /// As the transport of an agent.
    pub(super) fn transport(self: &Arc<Self>) -> Arc<dyn Transport> {
        Arc::new(Staged(Arc::clone(self)))
    }

    /// Takes the slices that wait, once there are `count`.
    pub(super) fn take(&self, count: usize) -> Vec<Slice> {
        let until = Instant::now() + PATIENCE;
        let mut state = self.state.lock().unwrap();
        while state.waiting.len() < count {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{} of {count} slices were posted", state.waiting.len());
            state = self.news.wait_timeout(state, left).unwrap().0;
        }
        std::mem::take(&mut state.waiting)
    }

    /// Slices that wait now.
    pub(super) fn waiting(&self) -> usize {
        self.state.lock().unwrap().waiting.len()
    }

    /// Moves a slice's bytes as they are at this moment, and completes it.
    pub(super) fn play(&self, slice: Slice) {
        let remote = Arc::clone(&self.state.lock().unwrap().regions[&slice.region()]);
        for run in slice.runs() {
            slice.local().unwrap().copy_from(run.local, &remote, run.remote, run.len).unwrap();
        }
        let bytes = slice.bytes();
        slice.complete(Ok(Moved { bytes, rail: 0 }));
    }
}

struct Staged(Arc<Stage>);

impl Transport for Staged {
    fn kind(&self) -> TransportKind {
        TransportKind::Ucx
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: true,
            device_memory: false,
            checked_by_owner: false,
            ordered: false,
            extents_max: 4096,
        }
    }

    fn endpoint(&self) -> Option<Vec<u8>> {
        Some(Vec::new())
    }

    fn register(
        &self,
        id: RegionId,
        memory: &Arc<Memory>,
        _: Access,
    ) -> Result<Option<Vec<u8>>, RegisterError> {
        self.0.state.lock().unwrap().regions.insert(id, Arc::clone(memory));
        Ok(Some(Vec::new()))
    }

    fn deregister(&self, id: RegionId) {
        self.0.state.lock().unwrap().regions.remove(&id);
    }

    fn connect(&self, _: &PeerAddress, opened: Opened) {
        opened(Ok(Arc::new(StagedPath(Arc::clone(&self.0)))));
    }
}

struct StagedPath(Arc<Stage>);

impl Path for StagedPath {
    fn evidence(&self) -> Evidence {
        Evidence { class: EvidenceClass::None, source: "a test".into() }
    }

    fn rails(&self) -> Vec<String> {
        vec!["stage".into()]
    }

    fn post(&self, slice: Slice) {
        self.0.state.lock().unwrap().waiting.push(slice);
        self.0.news.notify_all();
    }

    fn close(&self) {
        let waiting = std::mem::take(&mut self.0.state.lock().unwrap().waiting);
        for slice in waiting {
            slice.complete(Err(PathError::Closed("the stage is closed".into())));
        }
    }
}
