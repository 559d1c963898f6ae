//! One peer over UCX, as the agent sees it.

use std::sync::Arc;

use towline_wire::receipt::Evidence;

use super::Shared;
use super::inbox::{Order, PathId};
use crate::transport::{Path, PathError, Slice};

/// A path whose endpoint the thread has.
pub(super) struct UcxPath {
    pub(super) shared: Arc<Shared>,
    pub(super) id: PathId,
    pub(super) evidence: Evidence,
    pub(super) rails: Vec<String>,
}

impl Path for UcxPath {
    fn evidence(&self) -> Evidence {
        self.evidence.clone()
    }

    fn rails(&self) -> Vec<String> {
        self.rails.clone()
    }

    fn post(&self, slice: Slice) {
        if let Err(Order::Post(_, slice)) = self.shared.inbox.push(Order::Post(self.id, slice)) {
            slice.complete(Err(PathError::Closed("the agent stopped".into())));
        }
    }

    fn close(&self) {
        // If the thread has ended, so has the path.
        _ = self.shared.inbox.push(Order::Close(self.id));
    }
}

impl Drop for UcxPath {
    /// What was posted before is done first: orders keep their order, and a path that is forgotten drains.
    fn drop(&mut self) {
        _ = self.shared.inbox.push(Order::Forget(self.id));
    }
}
