//! The paged KV cache as the engine sees it: blocks of registered memory.
//!
//! Who may touch a block when is bookkeeping that lives elsewhere (scheduler, leases). Here blocks are only written
//! and read by copying, so that no reference into memory that a transfer may write ever exists.
//!
//! Layout: block b starts at `b * block_bytes`; in it, for each layer, K then V; in each, `[kv_head][token][dim]` in
//! f16, little-endian ([`KvLayout::gqa`]).

use std::sync::Arc;

use thiserror::Error;
use towline_fabric::Memory;
use towline_wire::layout::{Arrangement, GroupKind, HeadOrder, KvLayout};

use crate::kernel::attention;

/// A pool of KV blocks in registered memory.
#[derive(Clone, Debug)]
pub struct KvCache {
    memory: Arc<Memory>,
    layout: KvLayout,
    blocks: u32,
    block_tokens: usize,
    block_bytes: u64,
    /// Start of K and of V in a block, a layer each.
    layers: Vec<(u64, u64)>,
    /// Bytes of K of one layer in a block.
    part_bytes: u64,
}

impl KvCache {
    /// A cache over the whole of `memory`: as many blocks of `layout` as fit.
    ///
    /// # Errors
    /// [`CacheError`] when the layout is not uniform attention with layers together, or not one block fits.
    pub fn new(memory: Arc<Memory>, layout: &KvLayout) -> Result<Self, CacheError> {
        layout.validate().map_err(|error| CacheError::Layout { what: error.to_string() })?;
        let wrong = |what: &str| CacheError::Layout { what: what.into() };
        let [group] = layout.groups.as_slice() else { return Err(wrong("it has several groups")) };
        let uniform = group.kind == GroupKind::Full
            && group.heads == HeadOrder::Hnd
            && group.arrangement == Arrangement::BlockMajor
            && group.parts.iter().map(|part| part.name.as_str()).eq(["k", "v"])
            && group.parts.iter().all(|part| part.bytes == group.parts[0].bytes);
        if !uniform {
            return Err(wrong("it is not equal K and V, heads before tokens, layers together"));
        }
        let layers = (0..group.layers.len())
            .filter_map(|layer| Some((group.offset(layer, 0)?, group.offset(layer, 1)?)));
        let block_bytes = group.block_bytes();
        let blocks = u32::try_from(memory.len() / block_bytes).unwrap_or(u32::MAX);
        if blocks == 0 {
            return Err(CacheError::Memory { block_bytes, memory_bytes: memory.len() });
        }
        Ok(Self {
            layers: layers.collect(),
            blocks,
            block_tokens: group.block_tokens as usize,
            block_bytes,
            part_bytes: group.parts[0].bytes,
            layout: layout.clone(),
            memory,
        })
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Its layout.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Blocks there are.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Tokens a block holds.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Bytes of a block, all layers.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Layers it has.
    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of K (or V) of one layer in a block.
    pub(super) fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    /// A layer, as the attention kernel reads it.
    pub(super) fn layer(&self, layer: usize) -> attention::Layer<'_> {
        let (k, v) = self.layers[layer];
        attention::Layer { memory: &self.memory, block_bytes: self.block_bytes, k, v }
    }

    /// Writes one token's heads, `[kv_head][dim]` in f16, as K and V of a layer.
    pub(super) fn write(&self, place: Place, k: &[u8], v: &[u8]) {
        let (k_start, v_start) = self.layers[place.layer];
        for (start, heads) in [(k_start, k), (v_start, v)] {
            for (head, bytes) in heads.chunks_exact(place.head_bytes).enumerate() {
                let token = (head * self.block_tokens + place.slot) * place.head_bytes;
                let at = u64::from(place.block) * self.block_bytes + start + token as u64;
                let written = self.memory.write_from(at, bytes);
                debug_assert!(written.is_ok(), "the batch was checked");
            }
        }
    }
}

/// Where a token's K and V of a layer go.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) layer: usize,
    pub(super) block: u32,
    /// Token in the block.
    pub(super) slot: usize,
    /// Bytes of a head of one token.
    pub(super) head_bytes: usize,
}

/// Why memory cannot be a cache.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CacheError {
    /// Use the layout that the model gives.
    #[error("this engine cannot compute on the layout: {what}")]
    Layout {
        /// What is wrong with it.
        what: String,
    },
    /// Allocate more memory.
    #[error("a block has {block_bytes} bytes, the memory {memory_bytes}")]
    Memory {
        /// Bytes of a block.
        block_bytes: u64,
        /// Bytes of the memory.
        memory_bytes: u64,
    },
}
