//! From `kv_transfer_params` to verified blocks of this worker's pool.
//!
//! The order of things is the state machine's (`towline_wire::handoff`), what it asks for is done in `pulling`; here are
//! the ticket's checks, the blocks that the local prefix cache lacks, their digests, and what becomes of them.
//!
//! Cost for a 2,000-token prompt of SmolLM2 (125 blocks of 360 KiB, 45 MB): one connection a pair, once; one copy of
//! 45 MB; one read of 64 bytes; one pass of XXH3 over what arrived. No byte is staged: blocks land in the pool.

use std::sync::Arc;

use thiserror::Error;
use towline_wire::digest::{DigestMismatch, Digests};
use towline_wire::handoff::HandoffError;
use towline_wire::kv_params::RemoteKv;
use towline_wire::prefix::PrefixKey;
use towline_wire::receipt::Receipt;
use towline_wire::reshard::{Array, GroupPool, RankPool};
use towline_wire::ticket::{GroupBlocks, Ticket, TicketError};

use super::links::{PullWatch, RankPull};
use super::{Handoff, prompt_hash, transferable_blocks, unix_now};
use crate::pool::{Blocks, KvPool, PoolFull};

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
        self.pull_parts(remote, prompt, salt, &mut |_| ()).await
    }

    /// As [`Handoff::pull`], and calls `arrived` with each ordered part as it is in place and fenced: a layer each, for
    /// KV that was lent before it was computed; else all of it, part 0.
    ///
    /// # Errors
    /// [`PullError`]; nothing of what arrived is used then, whatever `arrived` was told.
    pub async fn pull_parts(
        &self,
        remote: &RemoteKv,
        prompt: &[u32],
        salt: &str,
        arrived: &mut (dyn FnMut(u32) + Send),
    ) -> Result<Pulled, PullError> {
        let outcome = self.try_pull(remote, prompt, salt, arrived).await;
        self.count(&outcome);
        outcome
    }

    async fn try_pull(
        &self,
        remote: &RemoteKv,
        prompt: &[u32],
        salt: &str,
        arrived: &mut (dyn FnMut(u32) + Send),
    ) -> Result<Pulled, PullError> {
        let (ticket, wanted) = self.open_ticket(remote, prompt)?;
        let keys = self.pool.hasher(salt).keys(prompt, self.pool.block_tokens());
        let keys = keys.into_iter().take(wanted).collect::<Vec<_>>();
        let reservation = self.pool.reserve(&keys, wanted)?;
        let (blocks, cached) = (Arc::new(reservation.blocks), reservation.cached);
        let geometry = self.pool.geometry();
        let arrays = [Array { base: 0, stride: geometry.block_bytes }];
        let group = GroupPool { arrays: &arrays, first_block: 0, blocks: blocks.ids() };
        let tokens = |blocks: usize| (blocks * geometry.block_tokens) as u64;
        let pull = RankPull {
            ticket: &ticket,
            layout: self.pool.cache().layout(),
            sharding: &self.granter.lender.sharding,
            pool: RankPool { rank: 0, region_bytes: self.pool.memory().len(), groups: vec![group] },
            memory: Arc::clone(self.pool.memory()),
            hold: Some(Arc::clone(&blocks) as Arc<_>),
            tokens: tokens(cached)..tokens(wanted),
            deadline: self.pull_deadline,
        };
        let promised = ticket.ranks.first().map(|rank| &rank.digests);
        let digests = vec![None; blocks.len()];
        let mut check = Check { pool: &self.pool, blocks: &blocks, cached, promised, digests, arrived };
        let receipts = self.links.pull(&pull, &mut check).await?;
        let digests = check.digests;
        let pulled = blocks.ids().iter().zip(&keys).zip(&digests).skip(cached);
        // From here on later prompts find them.
        pulled.for_each(|((id, key), digest): ((&u32, &PrefixKey), _)| self.pool.publish(*id, *key, *digest));
        let receipt = receipts.into_iter().next().ok_or(HandoffError::Cancelled)?;
        let tokens = |blocks: usize| blocks * geometry.block_tokens;
        Ok(Pulled {
            blocks: blocks.share(),
            tokens: tokens(blocks.len()),
            cached_tokens: tokens(cached),
            receipt,
        })
    }

    /// Everything about the ticket that can be refused before dialling anyone; and how many blocks it offers.
    fn open_ticket(&self, remote: &RemoteKv, prompt: &[u32]) -> Result<(Ticket, usize), PullError> {
        let sealed = remote.towline.clone().ok_or(PullError::Unsigned)?;
        let ticket = sealed.open(&self.key, &self.audience, unix_now().as_secs())?;
        let geometry = self.pool.geometry();
        let invalid = |detail: &str| Err(HandoffError::Invalid { detail: detail.into() }.into());
        let group = match ticket.ranks.as_slice() {
            [rank] => rank.groups.as_slice(),
            _ => {
                return invalid(
                    "the ticket's engine has several ranks: this worker pulls from engines of one",
                );
            }
        };
        let [GroupBlocks { arrays, .. }] = group else {
            return invalid(
                "the ticket's engine keeps its KV in several groups: serve the same model on both",
            );
        };
        let blocks = ticket.table(&group[0]).blocks.len();
        let same_blocks = *arrays == [Array { base: 0, stride: geometry.block_bytes }]
            && ticket.tokens as usize == blocks * geometry.block_tokens;
        if !same_blocks {
            return invalid(
                "the ticket's blocks have another size: start both workers with the same --block-tokens and model",
            );
        }
        if ticket.prompt_hash != prompt_hash(prompt) {
            return invalid("the ticket is for another prompt");
        }
        if blocks > transferable_blocks(prompt.len(), geometry.block_tokens) {
            return invalid("the ticket has more blocks than the prompt fills");
        }
        Ok((ticket, blocks))
    }
}

/// Digests the pulled blocks, as far as the ticket covers them, and keeps the digests for the pool.
struct Check<'a> {
    pool: &'a KvPool,
    blocks: &'a Blocks,
    cached: usize,
    promised: Option<&'a Digests>,
    /// Of the pulled blocks, where they were checked.
    digests: Vec<Option<u64>>,
    arrived: &'a mut (dyn FnMut(u32) + Send),
}

impl PullWatch for Check<'_> {
    fn handle_part(&mut self, part: u32) {
        (self.arrived)(part);
    }

    fn check(&mut self) -> Result<(), DigestMismatch> {
        let Some(promised) = self.promised else { return Ok(()) };
        let Self { pool, blocks, digests, .. } = self;
        promised.check(self.cached, blocks.len(), |position| {
            // A block outside the memory can't have been read into; 0 then differs from what was promised.
            let digest = pool.computed_digest(blocks.ids()[position]).unwrap_or_default();
            digests[position] = Some(digest);
            digest
        })
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
