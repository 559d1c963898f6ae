//! From `kv_transfer_params` to verified blocks.
//!
//! The order of things is the state machine's (`towline_wire::handoff`); this file does what it asks for: dial the
//! sealed address, read the blocks that the local prefix cache lacks, read the fence slot, compare digests, release.
//!
//! Cost for a 2,000-token prompt of SmolLM2 (125 blocks of 360 KiB, 45 MB): one connection a pair, once; one copy of
//! 45 MB; one read of 64 bytes; one pass of XXH3 over what arrived. No byte is staged: blocks land in the pool.

use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;
use towline_fabric::Memory;
use towline_fabric::{ConnectError, ConnectOptions, Peer, TransferError, TransferRequest};
use towline_wire::blocks::BlockList;
use towline_wire::fence::SLOT_BYTES;
use towline_wire::handoff::{Action, Event, Handoff as Machine, HandoffError};
use towline_wire::kv_params::RemoteKv;
use towline_wire::prefix::PrefixKey;
use towline_wire::receipt::{Op, Receipt};
use towline_wire::ticket::{Ticket, TicketError};

use super::{Handoff, prompt_hash, transferable_blocks, unix_now};
use crate::pool::{Blocks, PoolFull};

/// Verified KV of a prompt's beginning.
#[derive(Debug)]
pub struct Pulled {
    /// Blocks for the prompt's leading full blocks, found here or pulled.
    pub blocks: Blocks,
    /// Tokens whose KV is in them.
    pub tokens: usize,
    /// Of those, tokens whose KV this worker had already.
    pub cached_tokens: usize,
    /// What carried the rest.
    pub receipt: Receipt,
}

impl Handoff {
    /// Pulls the KV of `prompt` that `remote` offers into blocks of this worker's pool.
    ///
    /// Dropping the future cancels: the transport lets go of the blocks first, then they return to the pool, and the
    /// lease is released.
    ///
    /// # Errors
    /// [`PullError`]; nothing of what arrived is used then.
    pub async fn pull(&self, remote: &RemoteKv, prompt: &[u32], salt: &str) -> Result<Pulled, PullError> {
        let outcome = self.try_pull(remote, prompt, salt).await;
        self.count(&outcome);
        outcome
    }

    async fn try_pull(&self, remote: &RemoteKv, prompt: &[u32], salt: &str) -> Result<Pulled, PullError> {
        let ticket = self.open_ticket(remote, prompt)?;
        let wanted = ticket.blocks.indices.len();
        let keys = self.pool.hasher(salt).keys(prompt, self.pool.block_tokens());
        let keys = keys.into_iter().take(wanted).collect::<Vec<_>>();
        let reservation = self.pool.reserve(&keys, wanted)?;
        let job = Job {
            handoff: self,
            ticket: &ticket,
            keys,
            blocks: Arc::new(reservation.blocks),
            cached: reservation.cached,
            started: Instant::now(),
            deadline: self.pull_deadline,
            digests: Vec::new(),
            peer: None,
            transferred: None,
        };
        job.run().await
    }

    /// Everything about the ticket that can be refused before dialling anyone.
    fn open_ticket(&self, remote: &RemoteKv, prompt: &[u32]) -> Result<Ticket, PullError> {
        let sealed = remote.towline.clone().ok_or(PullError::Unsigned)?;
        let ticket = sealed.open(&self.key, &self.audience, unix_now().as_secs())?;
        let geometry = self.pool.geometry();
        let same_blocks = u64::from(ticket.block_tokens) == geometry.block_tokens as u64
            && ticket.blocks.block_bytes == geometry.block_bytes;
        let invalid = |detail: &str| Err(HandoffError::Invalid { detail: detail.into() }.into());
        if !same_blocks {
            return invalid(
                "the ticket's blocks have another size: start both workers with the same --block-tokens and model",
            );
        }
        if ticket.prompt_hash != prompt_hash(prompt) {
            return invalid("the ticket is for another prompt");
        }
        if ticket.blocks.indices.len() > transferable_blocks(prompt.len(), geometry.block_tokens) {
            return invalid("the ticket has more blocks than the prompt fills");
        }
        Ok(ticket)
    }
}

/// One pull under way.
struct Job<'a> {
    handoff: &'a Handoff,
    ticket: &'a Ticket,
    keys: Vec<PrefixKey>,
    /// Shared with the transfer, which holds them until the transport has let go.
    blocks: Arc<Blocks>,
    cached: usize,
    started: Instant,
    deadline: Duration,
    /// Of the pulled blocks, where digests were checked.
    digests: Vec<Option<u64>>,
    peer: Option<Peer>,
    transferred: Option<Transferred>,
}

struct Transferred {
    receipt: Receipt,
    arrived: Instant,
}

impl Job<'_> {
    async fn run(mut self) -> Result<Pulled, PullError> {
        let mut machine = Machine::new(self.ticket.generation, 1, self.deadline);
        while let Some(action) = machine.poll_action() {
            let event = match action {
                Action::Connect => self.connect().await,
                Action::ReadBlocks => self.read_blocks().await,
                Action::ReadFence => self.read_fence().await,
                Action::Digest => Ok(self.digest()),
                Action::Release => {
                    self.release();
                    continue;
                }
            };
            let event = event.unwrap_or_else(Event::Failed);
            machine.handle_event(self.started.elapsed(), event);
        }
        match (machine.outcome(), self.transferred.take()) {
            (Some(Ok(())), Some(transferred)) => Ok(self.finish(transferred)),
            (Some(Err(error)), _) => Err(error.clone().into()),
            // The machine reaches success only through the data; an open end means that nobody wants it any more.
            _ => Err(HandoffError::Cancelled.into()),
        }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_sub(self.started.elapsed())
    }

    async fn connect(&mut self) -> Result<Event, HandoffError> {
        let (handoff, ticket) = (self.handoff, self.ticket);
        let options = ConnectOptions {
            agent: Some(ticket.agent.clone()),
            boot_epoch: Some(ticket.boot_epoch),
            fingerprint: Some(handoff.agent.card().fingerprint),
            contract: handoff.contract.clone(),
            transport: handoff.transport,
            deadline: self.left(),
        };
        let peer = handoff.peers.reach(ticket, || handoff.agent.connect(&ticket.address, options)).await;
        let peer = peer.map_err(connect_error)?;
        let card = peer.card();
        if card.kv_region != Some(ticket.region) || card.fence_region != Some(ticket.fence_region) {
            return Err(HandoffError::Invalid {
                detail: "the ticket names regions that its owner does not offer".into(),
            });
        }
        // The request may have waited; the lease must outlive the read.
        // A message that is lost shows when the lease turns out to be over.
        _ = peer.heartbeat(&[ticket.lease]);
        self.peer = Some(peer);
        Ok(Event::Connected)
    }

    async fn read_blocks(&mut self) -> Result<Event, HandoffError> {
        let theirs = &self.ticket.blocks;
        let geometry = self.handoff.pool.geometry();
        let list = |indices: &[u32]| BlockList {
            group: 0,
            bases: vec![0],
            block_bytes: geometry.block_bytes,
            stride: geometry.block_bytes,
            indices: indices.to_vec(),
        };
        let request = TransferRequest {
            op: Op::Read,
            local: Arc::clone(self.handoff.pool.memory()),
            local_blocks: list(&self.blocks.ids()[self.cached..]),
            remote_region: self.ticket.region,
            remote_blocks: BlockList { indices: theirs.indices[self.cached..].to_vec(), ..theirs.clone() },
            lease: Some((self.ticket.lease, self.ticket.generation)),
            deadline: self.left(),
            hold: Some(Arc::clone(&self.blocks) as Arc<_>),
            notify: None,
        };
        let receipt = self.transfer(request).await?;
        self.transferred = Some(Transferred { receipt, arrived: Instant::now() });
        Ok(Event::DataArrived)
    }

    async fn read_fence(&self) -> Result<Event, HandoffError> {
        let landing = Memory::allocate("towline-fence-landing", SLOT_BYTES).map_err(|error| {
            HandoffError::Invalid { detail: format!("no memory to read the fence into: {error}") }
        })?;
        let landing = Arc::new(landing);
        let slot = |indices| BlockList {
            group: 0,
            bases: vec![0],
            block_bytes: SLOT_BYTES,
            stride: SLOT_BYTES,
            indices,
        };
        let request = TransferRequest {
            op: Op::Read,
            local: Arc::clone(&landing),
            local_blocks: slot(vec![0]),
            remote_region: self.ticket.fence_region,
            remote_blocks: slot(vec![self.ticket.slot]),
            lease: None,
            deadline: self.left(),
            hold: None,
            notify: None,
        };
        self.transfer(request).await?;
        let mut bytes = [0; 24];
        landing
            .read_into(0, &mut bytes)
            .map_err(|error| HandoffError::Invalid { detail: error.to_string() })?;
        Ok(Event::FenceRead(bytes))
    }

    async fn transfer(&self, request: TransferRequest) -> Result<Receipt, HandoffError> {
        let Some(peer) = &self.peer else {
            return Err(HandoffError::Unreachable { detail: "not connected".into() });
        };
        let deadline = self.deadline;
        let transfer = peer.transfer(request).map_err(|error| transfer_error(error, deadline))?;
        transfer.await.map_err(|error| transfer_error(error, deadline))
    }

    /// Digests the pulled blocks, as far as the ticket covers them, and keeps the digests for the pool.
    fn digest(&mut self) -> Event {
        let mut kept = vec![None; self.blocks.len()];
        let outcome = self.ticket.digests.check(self.cached, self.blocks.len(), |position| {
            // A block outside the memory can't have been read into; 0 then differs from what was promised.
            let digest = self.handoff.pool.computed_digest(self.blocks.ids()[position]).unwrap_or_default();
            kept[position] = Some(digest);
            digest
        });
        self.digests = kept;
        Event::Digested(outcome)
    }

    fn release(&mut self) {
        if let Some(peer) = self.peer.take() {
            // No answer is awaited: should the message be lost, the lease expires.
            drop(peer.release(self.ticket.lease, self.ticket.generation));
        }
    }

    /// Hands the verified blocks over; from here on later prompts find them.
    fn finish(&self, transferred: Transferred) -> Pulled {
        let pool = &self.handoff.pool;
        let pulled = self.blocks.ids().iter().zip(&self.keys).zip(&self.digests).skip(self.cached);
        for ((id, key), digest) in pulled {
            pool.publish(*id, *key, *digest);
        }
        let mut receipt = transferred.receipt;
        receipt.lease = Some(self.ticket.lease);
        receipt.timings.verify_s = transferred.arrived.elapsed().as_secs_f64();
        Pulled {
            blocks: self.blocks.share(),
            tokens: self.blocks.len() * pool.block_tokens(),
            cached_tokens: self.cached * pool.block_tokens(),
            receipt,
        }
    }
}

impl Drop for Job<'_> {
    /// A cancelled pull gives the lease back too.
    fn drop(&mut self) {
        self.release();
    }
}

fn connect_error(error: ConnectError) -> HandoffError {
    match error {
        ConnectError::PeerRestarted { .. } => HandoffError::PeerRestarted,
        ConnectError::Incompatible(mismatch) => {
            HandoffError::Incompatible { field: mismatch.field, detail: mismatch.to_string() }
        }
        ConnectError::ContractViolation(violation) => {
            HandoffError::ContractViolation { detail: violation.to_string() }
        }
        other => HandoffError::Unreachable { detail: other.to_string() },
    }
}

fn transfer_error(error: TransferError, deadline: Duration) -> HandoffError {
    match error {
        TransferError::PeerRestarted { .. } => HandoffError::PeerRestarted,
        TransferError::Stalled { .. } => HandoffError::Stalled { after: deadline },
        TransferError::Expired { .. } => HandoffError::LeaseOver,
        TransferError::Cancelled => HandoffError::Cancelled,
        TransferError::ContractViolation(violation) => {
            HandoffError::ContractViolation { detail: violation.to_string() }
        }
        other => HandoffError::Unreachable { detail: other.to_string() },
    }
}

/// Why there is no KV from elsewhere for this request.
#[derive(Debug, Error)]
pub enum PullError {
    /// The parameters carry no ticket of ours: they came from a client, or from a prefill worker of another make.
    #[error("kv_transfer_params without a sealed ticket are refused")]
    Unsigned,
    /// The ticket is altered, foreign or old.
    #[error(transparent)]
    Ticket(#[from] TicketError),
    /// This worker's pool has no room now; try again later or elsewhere.
    #[error(transparent)]
    Pool(#[from] PoolFull),
    /// The handoff itself failed.
    #[error(transparent)]
    Handoff(#[from] HandoffError),
}

impl PullError {
    /// A stable word for metrics and error codes.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unsigned => "unsigned",
            Self::Ticket(TicketError::Expired) => "expired",
            Self::Ticket(_) => "bad_ticket",
            Self::Pool(_) => "no_room",
            Self::Handoff(error) => error.code(),
        }
    }
}
