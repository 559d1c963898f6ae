//! Lending a prompt's KV before it is computed, layer by layer.
//!
//! ```text
//!  engine                        prefill's side of the handoff          decode
//!  the job gets its blocks ──→   lease, no part ready, ticket   ──────→ connects, reads the slot
//!  layer 0 stored          ──→   1 part counted in the slot     ──────→ reads layer 0 … while layer 1 is computed
//!  …                             …
//!  the last layer stored   ──→   all counted                    ──────→ reads the rest, releases
//!  preempted, failed, cancelled: the lease is taken back, the reader's data expires
//! ```
//!
//! The engine's thread waits for each count: a lock and a store of 8 bytes a layer.

use std::sync::Arc;

use tokio::sync::oneshot;
use towline_wire::kv_params::RemoteKv;

use super::Handoff;
use super::grant::{Asked, Computed, Granter};
use super::lender::{GrantError, Lent};
use crate::engine::KvProgress;
use crate::pool::Blocks;

type Answer = Result<RemoteKv, GrantError>;

/// The ticket of KV that is still to be computed.
#[derive(Debug)]
pub struct EarlyTicket(oneshot::Receiver<Answer>);

impl EarlyTicket {
    /// Waits until the job has its blocks and they are lent.
    ///
    /// # Errors
    /// [`GrantError`]; [`GrantError::NotStarted`] when the job ended before.
    pub async fn ready(self) -> Answer {
        self.0.await.unwrap_or(Err(GrantError::NotStarted))
    }
}

impl Handoff {
    /// Will lend the KV of `prompt` to one decode worker as soon as the engine has blocks for it, and count its layers as
    /// they are computed. Give the first to the job, as [`Job::progress`](crate::engine::Job::progress); the second
    /// brings what decode needs. Should the job end, or be preempted, before all layers are computed, the lease is taken
    /// back.
    pub fn lend_early(&self, request_id: &str, prompt: &[u32]) -> (Box<dyn KvProgress>, EarlyTicket) {
        let (tell, ticket) = oneshot::channel();
        let early = Early {
            granter: Arc::clone(&self.granter),
            request_id: request_id.to_owned(),
            prompt: prompt.to_vec(),
            tell: Some(tell),
            lent: None,
        };
        (Box::new(early), EarlyTicket(ticket))
    }
}

/// One prompt that is lent early.
struct Early {
    granter: Arc<Granter>,
    request_id: String,
    prompt: Vec<u32>,
    /// Taken when the ticket goes out: a prompt is lent once, even if it is then computed again.
    tell: Option<oneshot::Sender<Answer>>,
    /// What was lent and is not complete.
    lent: Option<Lent>,
}

impl KvProgress for Early {
    fn handle_started(&mut self, blocks: Blocks) {
        let Some(tell) = self.tell.take() else { return };
        let asked = Asked { request_id: &self.request_id, prompt: &self.prompt, cached: 0 };
        let answer = self.granter.grant(asked, blocks, Computed::ByLayer).map(|(remote, lent)| {
            self.lent = Some(lent);
            remote
        });
        if tell.send(answer).is_err() {
            // Nobody waits for the ticket any more.
            self.take_back();
        }
    }

    fn handle_layers(&mut self, layers: usize) {
        let Some(lent) = &self.lent else { return };
        let layers = u32::try_from(layers).unwrap_or(u32::MAX);
        // A lease that is over has no reader that could miss the count.
        let over = self.granter.lender.computed(lent, 0, layers).is_err();
        if over || layers >= self.granter.depth {
            self.lent = None;
        }
    }

    fn handle_stopped(&mut self) {
        self.take_back();
    }
}

impl Early {
    fn take_back(&mut self) {
        if let Some(lent) = self.lent.take() {
            self.granter.lender.revoke(&lent);
        }
    }
}

impl Drop for Early {
    /// The job ended with layers missing, or it never began.
    fn drop(&mut self) {
        self.take_back();
    }
}

impl std::fmt::Debug for Early {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Early").field("request_id", &self.request_id).finish_non_exhaustive()
    }
}
