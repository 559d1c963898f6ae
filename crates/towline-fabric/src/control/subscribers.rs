//! Which control sessions are told when the agent's card changes.
//!
//! A change pokes each of them; each then sends the newest card when its peer has read what came before. So what waits
//! for a peer is one card, however many changes there were.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::agent::Environment;
use crate::io::SessionId;

/// See the head of this file.
#[derive(Default)]
pub(crate) struct Subscribers(Mutex<BTreeSet<SessionId>>);

impl Subscribers {
    /// Has every session look at the card. They all live on the first io thread.
    pub(crate) fn announce(environment: &Environment) {
        let sessions: Vec<_> = environment.subscribers.lock().iter().copied().collect();
        for session in sessions {
            environment.io.poke(session);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<SessionId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session's place among them, given back when dropped.
pub(super) struct Subscription(Arc<Environment>, SessionId);

impl Subscription {
    pub(super) fn new(environment: &Arc<Environment>, session: SessionId) -> Self {
        environment.subscribers.lock().insert(session);
        Self(Arc::clone(environment), session)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.0.subscribers.lock().remove(&self.1);
    }
}
