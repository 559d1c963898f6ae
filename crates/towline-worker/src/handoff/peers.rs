//! One connection for each rank that was read, made when first needed and kept while it is good.
//!
//! Only addresses from sealed tickets come here. A connection is replaced when it closed, or when a ticket names
//! another incarnation of the rank: KV of a restarted one is never read through the old session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Mutex as AsyncMutex;
use towline_fabric::{ConnectError, Peer};
use towline_wire::id::EngineId;
use towline_wire::ticket::RankTicket;

/// Most ranks that one rank keeps a connection to. One more first drops those that are closed and, if
/// all are open, forgets all: connecting again takes a millisecond, and pulls under way keep their own handle.
const PEERS_MAX: usize = 1024;

type Slot = Arc<AsyncMutex<Option<Peer>>>;

#[derive(Default)]
pub(super) struct Peers {
    slots: Mutex<HashMap<String, Slot>>,
}

impl Peers {
    /// The connection to the ticket's owner, a rank of `engine`: a kept one, or one that `connect` makes. Requests for
    /// the same owner wait for one attempt instead of making several.
    pub(super) async fn reach<F>(
        &self,
        engine: EngineId,
        ticket: &RankTicket,
        connect: impl FnOnce() -> F,
    ) -> Result<Peer, ConnectError>
    where
        F: Future<Output = Result<Peer, ConnectError>>,
    {
        let slot = self.slot(&ticket.address);
        let mut kept = slot.lock().await;
        if let Some(peer) = kept.as_ref().filter(|peer| is_owner(peer, engine, ticket)) {
            return Ok(peer.clone());
        }
        *kept = None;
        let peer = connect().await?;
        *kept = Some(peer.clone());
        Ok(peer)
    }

    fn slot(&self, address: &str) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() >= PEERS_MAX && !slots.contains_key(address) {
            slots.retain(|_, slot| {
                Arc::strong_count(slot) > 1 || slot.try_lock().is_ok_and(|peer| is_open(peer.as_ref()))
            });
            if slots.len() >= PEERS_MAX {
                slots.clear();
            }
        }
        Arc::clone(slots.entry(address.to_owned()).or_default())
    }
}

fn is_open(peer: Option<&Peer>) -> bool {
    peer.is_some_and(Peer::is_open)
}

fn is_owner(peer: &Peer, engine: EngineId, ticket: &RankTicket) -> bool {
    let card = peer.card();
    peer.is_open()
        && card.boot_epoch == ticket.boot_epoch
        && card.agent == ticket.agent
        && card.engine == engine
}
