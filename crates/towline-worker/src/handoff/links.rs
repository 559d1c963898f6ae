//! A rank's connections to other engines, and what it pulls over them.
//!
//! Every connection is checked against the ticket that led to it: who answers, which incarnation, that its KV means the
//! same and lies as the ticket says. What happens then is in `pulling`.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use towline_fabric::{Agent, ConnectError, ConnectOptions, HeldLease, Memory, Peer, TransportChoice};
use towline_wire::card::Incompatible;
use towline_wire::contract::Contract;
use towline_wire::digest::DigestMismatch;
use towline_wire::handoff::HandoffError;
use towline_wire::layout::KvLayout;
use towline_wire::receipt::Receipt;
use towline_wire::reshard::RankPool;
use towline_wire::shard::Sharding;
use towline_wire::ticket::{RankTicket, Ticket};

use super::landing::Landings;
use super::peers::Peers;
use super::pulling::Pulling;

/// How often, at least, an agent that pulls tells owners which of their leases it still wants: less than a third of the shortest
/// lease that a worker grants (1 s), as a reader doesn't know how long its owner's last. It costs a message a pair, and only while
/// leases are held.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(300);

/// A rank's way to other engines: its agent, what its connections must be, and those that there are.
pub struct Links {
    agent: Agent,
    transport: TransportChoice,
    contract: Contract,
    peers: Peers,
    pub(super) landings: Landings,
}

/// What one rank pulls.
pub struct RankPull<'a> {
    /// From whom, under which lease, how the KV lies there. Opened, so its seal is good.
    pub ticket: &'a Ticket,
    /// The KV of the whole engine that pulls.
    pub layout: &'a KvLayout,
    /// How its ranks share it.
    pub sharding: &'a Sharding,
    /// This rank and its blocks for the sequence.
    pub pool: RankPool<'a>,
    /// The memory that they lie in.
    pub memory: Arc<Memory>,
    /// What keeps them from being reused, until no transfer can write them any more.
    pub hold: Option<Arc<dyn Any + Send + Sync>>,
    /// Which tokens.
    pub tokens: Range<u64>,
    /// Time for everything.
    pub deadline: Duration,
}

/// Hears how a pull goes on.
pub trait PullWatch: Send {
    /// Part `part` is in place, and every fence held after it: parts come in order, and once. Its digests, where there
    /// are some, are compared at the end only.
    fn handle_part(&mut self, part: u32) {
        let _ = part;
    }

    /// All is in place: compares digests, where the caller has what they cover.
    ///
    /// # Errors
    /// The first block that is not what its owner computed.
    fn check(&mut self) -> Result<(), DigestMismatch> {
        Ok(())
    }
}

impl PullWatch for () {}

impl Links {
    /// Over the transport `transport`, under `contract`.
    pub fn new(agent: Agent, transport: TransportChoice, contract: Contract) -> Self {
        Self { agent, transport, contract, peers: Peers::default(), landings: Landings::default() }
    }

    /// Pulls, and gives a receipt for each rank that was read, by its number.
    ///
    /// Dropping the future cancels: transports let go of the memory first, then `hold` is dropped, and the leases are
    /// released.
    ///
    /// # Errors
    /// [`HandoffError`]; nothing of what arrived may be used then.
    pub async fn pull(
        &self,
        pull: &RankPull<'_>,
        watch: &mut dyn PullWatch,
    ) -> Result<Vec<Receipt>, HandoffError> {
        Pulling::new(self, pull)?.run(watch).await
    }
}

/// Reaches a rank that a ticket names, and keeps its lease from then on: the request may have waited, and the lease must
/// outlive the reads.
pub(super) async fn connect(
    links: &Links,
    pull: &RankPull<'_>,
    rank: &RankTicket,
    deadline: Duration,
) -> Result<(Peer, HeldLease), HandoffError> {
    let (ticket, ours) = (pull.ticket, links.agent.card().fingerprint);
    let options = ConnectOptions {
        agent: Some(rank.agent.clone()),
        boot_epoch: Some(rank.boot_epoch),
        // With a layout of its own in the ticket, the owner's KV must mean the same, but may lie otherwise.
        fingerprint: ticket.layout.is_none().then(|| ours.clone()),
        contract: links.contract.clone(),
        transport: links.transport,
        deadline,
    };
    let peer = links.peers.reach(ticket.engine, rank, || links.agent.connect(&rank.address, options)).await;
    let peer = peer.map_err(connect_error)?;
    let card = peer.card();
    if let Some(layout) = &ticket.layout {
        ours.check_meaning(&card.fingerprint).map_err(incompatible)?;
        if card.fingerprint.layout != layout.describe() {
            return Err(HandoffError::Invalid { detail: "the ticket's layout is not its owner's".into() });
        }
    }
    if card.kv_region != Some(rank.region) || card.fence_region != Some(rank.fence_region) {
        return Err(HandoffError::Invalid {
            detail: "the ticket names regions that its owner does not offer".into(),
        });
    }
    // A heartbeat that is lost shows when the lease turns out to be over.
    let held = peer.hold(rank.lease);
    let held = held.map_err(|error| HandoffError::Unreachable { detail: error.to_string() })?;
    Ok((peer, held))
}

fn incompatible(mismatch: Incompatible) -> HandoffError {
    HandoffError::Incompatible { field: mismatch.field, detail: mismatch.to_string() }
}

fn connect_error(error: ConnectError) -> HandoffError {
    match error {
        ConnectError::PeerRestarted { .. } => HandoffError::PeerRestarted,
        ConnectError::Incompatible(mismatch) => incompatible(mismatch),
        ConnectError::ContractViolation(violation) => {
            HandoffError::ContractViolation { detail: violation.to_string() }
        }
        other => HandoffError::Unreachable { detail: other.to_string() },
    }
}
