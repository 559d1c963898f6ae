//! A path that follows its peer's card, for transports whose paths know each region by its key.
//!
//! When regions come, a further path is opened for them alone; what was mapped stays mapped. When regions go, the path
//! that knows them is replaced by one for what is left of it, so that this process does not keep the memory of a peer
//! that wants it back. Transports whose requests the owner judges (tcp) need none of this.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use towline_wire::card::AgentCard;
use towline_wire::frame::Status;
use towline_wire::id::RegionId;
use towline_wire::receipt::Evidence;

use super::view::View;
use crate::transport::{Path, PathError, PeerAddress, Slice, Transport};

/// Time for a further path to open: a mapping takes milliseconds.
const OPEN: Duration = Duration::from_secs(5);

/// See the head of this file.
pub(super) struct FollowingPath {
    transport: Arc<dyn Transport>,
    address: PeerAddress,
    /// Of the first path; those that follow are of its kind.
    evidence: Evidence,
    rails: Vec<String>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    branches: Vec<Branch>,
    /// Regions that no path could be opened for, with the reason.
    unreached: HashMap<RegionId, String>,
    /// A path is being opened; `next` waits for that.
    opening: bool,
    next: Option<(Arc<AgentCard>, Arc<View>)>,
    closed: bool,
}

struct Branch {
    regions: Vec<RegionId>,
    path: Arc<dyn Path>,
}

impl FollowingPath {
    /// Begins with `path`, opened at `address` for the regions of its card.
    pub(super) fn new(
        transport: &Arc<dyn Transport>,
        address: PeerAddress,
        path: Arc<dyn Path>,
    ) -> Arc<Self> {
        let (evidence, rails) = (path.evidence(), path.rails());
        let state =
            State { branches: vec![Branch { regions: ids(&address.card), path }], ..State::default() };
        Arc::new(Self {
            transport: Arc::clone(transport),
            address,
            evidence,
            rails,
            state: Mutex::new(state),
        })
    }

    /// Opens and closes what `card` asks for, then publishes it in `view`. Cards that come meanwhile wait; of several the
    /// last counts.
    pub(super) fn follow(self: &Arc<Self>, card: Arc<AgentCard>, view: &Arc<View>) {
        let mut state = self.lock();
        if state.opening {
            state.next = Some((card, Arc::clone(view)));
            return;
        }
        let wanted = ids(&card);
        let covered: Vec<_> =
            state.branches.iter().filter(|branch| branch.is_live(&wanted)).flat_map(|b| &b.regions).collect();
        let missing: Vec<_> = wanted.iter().copied().filter(|id| !covered.contains(&id)).collect();
        if missing.is_empty() || state.closed {
            // Unmapped after the lock: that takes time.
            let _stale = state.replace(&wanted, None);
            drop(state);
            return view.publish(card);
        }
        // All missing regions are the card's.
        let Ok(part) = card.with_regions(&missing) else { return };
        state.opening = true;
        drop(state);
        let address = PeerAddress {
            card: Arc::new(part),
            until: Instant::now() + OPEN,
            events: Arc::clone(&self.address.events),
            ..self.address
        };
        let (following, view) = (Arc::clone(self), Arc::clone(view));
        let opened = move |path| following.handle_opened(path, (missing, card), &view);
        self.transport.connect(&address, Box::new(opened));
    }

    fn handle_opened(
        self: &Arc<Self>,
        path: Result<Arc<dyn Path>, PathError>,
        (regions, card): (Vec<RegionId>, Arc<AgentCard>),
        view: &Arc<View>,
    ) {
        let mut state = self.lock();
        let mut stale = Vec::new();
        match path {
            Ok(path) if state.closed => path.close(),
            Ok(path) => {
                state.unreached.clear();
                stale = state.replace(&ids(&card), Some(Branch { regions, path }));
            }
            Err(error) => {
                // What is served still stays so; the rest is tried again with the next card.
                tracing::warn!(peer = %card.agent, %error, "the peer's new regions cannot be reached");
                let served: Vec<_> = state.branches.iter().flat_map(|b| b.regions.clone()).collect();
                let new = regions.into_iter().filter(|id| !served.contains(id));
                let why = |id: RegionId| format!("its region {id} cannot be reached: {error}");
                state.unreached = new.map(|id| (id, why(id))).collect();
            }
        }
        state.opening = false;
        let next = state.next.take();
        drop(state);
        drop(stale);
        view.publish(card);
        if let Some((card, view)) = next {
            self.follow(card, &view);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the branches out that know regions which are gone, and puts `more` in.
    fn replace(&mut self, wanted: &[RegionId], more: Option<Branch>) -> Vec<Branch> {
        let (live, stale) =
            std::mem::take(&mut self.branches).into_iter().partition(|branch| branch.is_live(wanted));
        self.branches = live;
        self.branches.extend(more);
        stale
    }
}

impl Branch {
    /// Whether all its regions are still there.
    fn is_live(&self, wanted: &[RegionId]) -> bool {
        !self.regions.is_empty() && self.regions.iter().all(|id| wanted.contains(id))
    }
}

fn ids(card: &AgentCard) -> Vec<RegionId> {
    card.regions.iter().map(|region| region.id).collect()
}

impl Path for FollowingPath {
    fn evidence(&self) -> Evidence {
        self.evidence.clone()
    }

    fn evidence_of(&self, region: RegionId) -> Evidence {
        let state = self.lock();
        let branch = state.branches.iter().find(|branch| branch.regions.contains(&region));
        let path = branch.map(|branch| Arc::clone(&branch.path));
        drop(state);
        path.map_or_else(|| self.evidence(), |path| path.evidence_of(region))
    }

    fn rails(&self) -> Vec<String> {
        self.rails.clone()
    }

    fn post(&self, slice: Slice) {
        let state = self.lock();
        let region = slice.region();
        let branch = state.branches.iter().find(|branch| branch.regions.contains(&region));
        let error = match (branch, state.unreached.get(&region)) {
            (Some(branch), _) => {
                let path = Arc::clone(&branch.path);
                drop(state);
                return path.post(slice);
            }
            (None, Some(reason)) => PathError::Unfit(reason.clone()),
            (None, None) => PathError::Refused(Status::UnknownRegion),
        };
        drop(state);
        slice.complete(Err(error));
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let paths: Vec<_> = state.branches.iter().map(|branch| Arc::clone(&branch.path)).collect();
        drop(state);
        for path in paths {
            path.close();
        }
    }
}
