//! From a finished prompt to `kv_transfer_params`: lend the blocks, digest them, seal the ticket.
//!
//! Cost: one read of the blocks for their digests (XXH3, near memory speed: about 4 ms for 45 MB), kept with the block
//! so that a shared prefix is digested once; a few KiB of JSON.

use thiserror::Error;
use towline_wire::blocks::BlockList;
use towline_wire::digest::Digests;
use towline_wire::kv_params::{RemoteKv, TransferMode};
use towline_wire::lease::LeaseError;
use towline_wire::ticket::{TICKET_SCHEMA, Ticket};

use super::Handoff;
use crate::engine::FinishedKv;

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
        let geometry = self.pool.geometry();
        let full = super::transferable_blocks(prompt.len(), geometry.block_tokens);
        let mut blocks = kv.blocks;
        blocks.truncate(full);
        let indices = blocks.ids().to_vec();
        let digests =
            Digests::of(self.digest, indices.len(), |at| self.pool.digest(indices[at]).unwrap_or_default());
        let (host, port) = split_address(self.address())?;
        let grant = self.keeper.grant(blocks)?;
        let tokens = u32::try_from(indices.len() * geometry.block_tokens).map_err(|_| GrantError::Tokens)?;
        let (region, fence_region) = self.regions();
        let ticket = Ticket {
            schema: TICKET_SCHEMA,
            engine: self.agent.card().engine,
            agent: self.agent.name().clone(),
            boot_epoch: self.agent.boot_epoch(),
            address: self.address().to_owned(),
            lease: grant.lease,
            generation: grant.generation,
            slot: grant.slot,
            region,
            fence_region,
            blocks: BlockList {
                group: 0,
                bases: vec![0],
                block_bytes: geometry.block_bytes,
                stride: geometry.block_bytes,
                indices: indices.clone(),
            },
            block_tokens: u32::try_from(geometry.block_tokens).map_err(|_| GrantError::Tokens)?,
            tokens,
            prompt_hash: super::prompt_hash(prompt),
            digests,
            audience: self.audience.clone(),
            expires_unix_s: super::unix_now().saturating_add(self.keeper.ttl()).as_secs(),
        };
        Ok(RemoteKv {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: vec![indices],
            remote_engine_id: ticket.engine,
            remote_request_id: request_id.to_owned(),
            remote_host: host,
            remote_port: port,
            tp_size: 1,
            remote_num_tokens: tokens,
            transfer_mode: TransferMode::Pull,
            remote_prefill_cached_tokens: u32::try_from(cached).unwrap_or(u32::MAX),
            towline: Some(ticket.seal(&self.key)),
        })
    }
}

fn split_address(address: &str) -> Result<(String, u16), GrantError> {
    let unusable = || GrantError::Address { address: address.to_owned() };
    let (host, port) = address.rsplit_once(':').ok_or_else(unusable)?;
    Ok((host.trim_matches(['[', ']']).to_owned(), port.parse().map_err(|_| unusable())?))
}

/// Why the KV was not lent. It goes back to the pool.
#[derive(Debug, Error)]
pub enum GrantError {
    /// Too many prompts wait for their decode worker.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// Give `--kv-advertise HOST:PORT`.
    #[error("the agent's address {address:?} is not host:port")]
    Address {
        /// The address.
        address: String,
    },
    /// The prompt has more tokens than a ticket can say.
    #[error("the prompt has more than 2^32 tokens")]
    Tokens,
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
