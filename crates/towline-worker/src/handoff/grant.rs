//! From a prompt of this worker to `kv_transfer_params`: which blocks are lent, digested, and how the ticket travels.
//!
//! Cost: one read of the blocks for their digests (XXH3, near memory speed: about 4 ms for 45 MB), kept with the block
//! so that a shared prefix is digested once; a few KiB of JSON. KV that is lent before it is computed has no digests:
//! the ticket goes out first.

use towline_wire::digest::{DigestMode, Digests};
use towline_wire::kv_params::{RemoteKv, TransferMode};
use towline_wire::lease::Readers;
use towline_wire::parts::Parts;
use towline_wire::ticket::BlockTable;

use super::Handoff;
use super::lender::{GrantError, Lender, Lent, Loan, RankShare};
use crate::engine::FinishedKv;
use crate::pool::{Blocks, KvPool};

/// What this worker, an engine of one rank, lends with.
pub(super) struct Granter {
    pub(super) lender: Lender,
    pub(super) pool: KvPool,
    pub(super) digest: DigestMode,
    /// Layers of the model.
    pub(super) depth: u32,
}

/// When the KV is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Computed {
    /// Before it is lent.
    Already,
    /// Layer by layer, after it was lent.
    ByLayer,
}

/// A prompt whose KV is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) request_id: &'a str,
    pub(super) prompt: &'a [u32],
    /// Tokens of it that were found in the prefix cache here, where known.
    pub(super) cached: usize,
}

impl Handoff {
    /// Lends the KV of `prompt` to one decode worker; `cached` of its tokens were found in the prefix cache here.
    /// The lease starts now and ends by release, expiry or shutdown.
    ///
    /// # Errors
    /// [`GrantError`]: all leases are held, or the agent's address can't be told.
    pub fn grant(
        &self,
        request_id: &str,
        prompt: &[u32],
        cached: usize,
        kv: FinishedKv,
    ) -> Result<RemoteKv, GrantError> {
        let asked = Asked { request_id, prompt, cached };
        self.granter.grant(asked, kv.blocks, Computed::Already).map(|(remote, _)| remote)
    }
}

impl Granter {
    /// Lends the full ones of `blocks`, which hold the prompt's KV or will.
    pub(super) fn grant(
        &self,
        asked: Asked<'_>,
        mut blocks: Blocks,
        computed: Computed,
    ) -> Result<(RemoteKv, Lent), GrantError> {
        let block_tokens = self.pool.block_tokens();
        blocks.truncate(super::transferable_blocks(asked.prompt.len(), block_tokens));
        let ids = blocks.ids().to_vec();
        let tokens = u32::try_from(ids.len() * block_tokens).map_err(|_| GrantError::Tokens)?;
        let [rank] = self.lender.ranks.as_slice() else { return Err(GrantError::NotStarted) };
        let (host, port) = split_address(&rank.address)?;
        let (parts, layers, mode) = match computed {
            Computed::Already => (Parts::whole(self.depth), self.depth, self.digest),
            Computed::ByLayer => (Parts::by_layer(self.depth), 0, DigestMode::Off),
        };
        let digests = Digests::of(mode, ids.len(), |at| self.pool.digest(ids[at]).unwrap_or_default());
        let lent = self.lender.lend(Loan {
            prompt_hash: super::prompt_hash(asked.prompt),
            tokens,
            tables: vec![BlockTable { first_block: 0, blocks: ids.clone() }],
            ranks: vec![RankShare { tables: vec![0], computed: layers, digests }],
            parts,
            // Which worker decodes is the router's choice, later.
            readers: Readers::First(1),
            hold: Box::new(blocks),
        })?;
        let remote = RemoteKv {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: vec![ids],
            remote_engine_id: self.lender.engine,
            remote_request_id: asked.request_id.to_owned(),
            remote_host: host,
            remote_port: port,
            tp_size: 1,
            remote_num_tokens: tokens,
            transfer_mode: TransferMode::Pull,
            remote_prefill_cached_tokens: u32::try_from(asked.cached).unwrap_or(u32::MAX),
            towline: Some(lent.ticket.clone()),
        };
        Ok((remote, lent))
    }
}

fn split_address(address: &str) -> Result<(String, u16), GrantError> {
    let unusable = || GrantError::Address { address: address.to_owned() };
    let (host, port) = address.rsplit_once(':').ok_or_else(unusable)?;
    Ok((host.trim_matches(['[', ']']).to_owned(), port.parse().map_err(|_| unusable())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_split_into_host_and_port() {
        assert_eq!(split_address("10.0.0.1:81").unwrap(), ("10.0.0.1".to_owned(), 81));
        assert_eq!(split_address("[::1]:9").unwrap(), ("::1".to_owned(), 9));
        assert!(split_address("nohost").is_err());
        assert!(split_address("a:99999").is_err());
    }
}
