//! The three ways a request can come: plain, as the prefill leg, as the decode leg.
//!
//! ```text
//! plain    no kv_transfer_params           compute here, answer
//! prefill  do_remote_decode: true          compute, keep the KV, answer one token and kv_transfer_params
//! decode   do_remote_prefill: true, …      pull the KV those params name, go on from it
//! ```
//!
//! The names are vLLM's; only parameters with a `towline` object, sealed by a prefill worker of this deployment, are
//! ever acted upon, because they say whom this process connects to.

use std::future::Future;
use std::pin::Pin;

use serde_json::Value;
use towline_fabric::AgentStats;
use towline_wire::kv_params::{KV_TRANSFER_PARAMS, RemoteKv, TransferMode};
use towline_wire::receipt::Receipt;

use super::error::ApiError;
use super::fields::wrong_type;
use super::front::{Front, Role};
use super::request::Ask;
use crate::engine::{FinishedKv, Start};
use crate::handoff::{GrantError, PullError, Pulled};

/// A pull under way; dropping it cancels.
pub type Pull<'a> = Pin<Box<dyn Future<Output = Result<Pulled, PullError>> + Send + 'a>>;

/// What the front needs of the handoff; a trait so that tests can fail in every way a wire can.
pub trait KvHandoff: Send + Sync {
    /// Lends the KV of `prompt`; `cached` of its tokens were found in the prefix cache.
    ///
    /// # Errors
    /// [`GrantError`]: nothing was lent.
    fn grant(
        &self,
        request_id: &str,
        prompt: &[u32],
        cached: usize,
        kv: FinishedKv,
    ) -> Result<RemoteKv, GrantError>;
    /// Pulls the KV of `prompt` that `remote` offers.
    fn pull<'a>(&'a self, remote: &'a RemoteKv, prompt: &'a [u32], salt: &'a str) -> Pull<'a>;
    /// Counters, for metrics.
    fn counts(&self) -> HandoffCounts;
}

/// What a handoff counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandoffCounts {
    /// Leases held now.
    pub leases_held: usize,
    /// Leases that ended because decode had what it wanted.
    pub leases_released: u64,
    /// Leases that ended because nobody came in time.
    pub leases_expired: u64,
    /// Leases taken back at shutdown.
    pub leases_revoked: u64,
    /// What its agent counted.
    pub agent: AgentStats,
}

/// What becomes of a request whose KV could not be pulled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnKvFailure {
    /// It fails: the router may then ask another prefill worker.
    #[default]
    Fail,
    /// This worker computes the prompt itself.
    Recompute,
}

/// What a request asks of the KV.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum KvAsk {
    /// Nothing.
    Plain,
    /// Keep it for a decode worker.
    Keep,
    /// Go on from what is offered.
    Fetch(Box<RemoteKv>),
}

/// Reads `kv_transfer_params`.
pub(super) fn parse(value: Option<Value>) -> Result<KvAsk, ApiError> {
    let Some(value) = value else { return Ok(KvAsk::Plain) };
    let object = value.as_object().ok_or_else(|| wrong_type(KV_TRANSFER_PARAMS, "an object", &value))?;
    let flag = |name: &str| match object.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(wrong_type(&format!("{KV_TRANSFER_PARAMS}.{name}"), "true or false", other)),
    };
    match (flag("do_remote_decode")?, flag("do_remote_prefill")?) {
        (false, false) => Ok(KvAsk::Plain),
        (true, false) => Ok(KvAsk::Keep),
        (false, true) if object.get("towline").is_none_or(Value::is_null) => Err(unsigned()),
        (false, true) => remote(value).map(|remote| KvAsk::Fetch(Box::new(remote))),
        (true, true) => Err(refused("do_remote_prefill and do_remote_decode exclude each other")),
    }
}

fn remote(value: Value) -> Result<RemoteKv, ApiError> {
    let remote: RemoteKv = serde_json::from_value(value).map_err(|error| refused(&error.to_string()))?;
    match remote.transfer_mode {
        TransferMode::Pull => Ok(remote),
        TransferMode::Push => Err(refused("transfer_mode is push: this worker pulls")),
    }
}

fn unsigned() -> ApiError {
    ApiError::Field {
        param: format!("{KV_TRANSFER_PARAMS}.towline"),
        code: "unsigned_kv_transfer_params",
        message: "kv_transfer_params come without the towline object that a prefill worker of this deployment seals. \
                  They say whom this worker connects to, so unsealed ones are refused: send requests through the router"
            .into(),
    }
}

fn refused(why: &str) -> ApiError {
    ApiError::Field {
        param: KV_TRANSFER_PARAMS.into(),
        code: "invalid_kv_transfer_params",
        message: format!("{KV_TRANSFER_PARAMS}: {why}"),
    }
}

/// Where the answer starts from.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) start: Start,
    pub(super) receipt: Option<Receipt>,
}

/// Pulls what the request offers, and decides what follows when that fails.
pub(super) async fn open(front: &Front, ask: &Ask, request_id: &str) -> Result<Opening, ApiError> {
    const FRESH: Opening = Opening { start: Start::Fresh, receipt: None };
    let handoff = allowed(front, &ask.kv)?;
    let (KvAsk::Fetch(remote), Some(handoff)) = (&ask.kv, handoff) else { return Ok(FRESH) };
    match handoff.pull(remote, &ask.prompt, &ask.salt).await {
        Ok(pulled) => {
            front.metrics().pulled(&pulled.receipt);
            tell(request_id, &pulled.receipt);
            let start = Start::Loaded { blocks: pulled.blocks, tokens: pulled.tokens };
            Ok(Opening { start, receipt: Some(pulled.receipt) })
        }
        Err(error) => {
            front.metrics().pull_failed(error.code());
            tracing::warn!(target: "kv_transfer", request_id, code = error.code(), %error, "no KV from prefill");
            recover(front.on_kv_failure(), error).map(|()| FRESH)
        }
    }
}

/// The handoff, if this worker's role takes such a leg.
fn allowed<'a>(front: &'a Front, kv: &KvAsk) -> Result<Option<&'a dyn KvHandoff>, ApiError> {
    let (leg, other) = match kv {
        KvAsk::Plain => return Ok(None),
        KvAsk::Keep => ("do_remote_decode asks for a prefill worker", Role::Decode),
        KvAsk::Fetch(_) => ("do_remote_prefill asks for a decode worker", Role::Prefill),
    };
    match front.handoff() {
        Some(handoff) if front.role() != other => Ok(Some(handoff)),
        _ => {
            let message =
                format!("{KV_TRANSFER_PARAMS}: {leg}, and this worker's role is {}", front.role().as_str());
            Err(ApiError::Field { param: KV_TRANSFER_PARAMS.into(), code: "wrong_worker_role", message })
        }
    }
}

/// Whether to go on without the KV. Parameters that no prefill worker of ours made are refused either way.
fn recover(policy: OnKvFailure, error: PullError) -> Result<(), ApiError> {
    match (policy, &error) {
        (_, PullError::Unsigned) => Err(unsigned()),
        (_, PullError::Ticket(ticket)) if error.code() == "bad_ticket" => Err(refused(&ticket.to_string())),
        (OnKvFailure::Recompute, _) => Ok(()),
        (OnKvFailure::Fail, PullError::Pool(full)) => Err(ApiError::Overloaded { detail: full.to_string() }),
        (OnKvFailure::Fail, _) => Err(ApiError::KvTransfer { cause: error }),
    }
}

/// The one line a transfer leaves in the log.
fn tell(request_id: &str, receipt: &Receipt) {
    tracing::info!(
        target: "kv_transfer",
        request_id,
        transport = receipt.transport.as_str(),
        bytes = receipt.bytes,
        blocks = receipt.blocks,
        seconds = receipt.seconds,
        gb_per_s = receipt.gb_per_s,
        lease = receipt.lease.map(|lease| lease.0),
        verified_by = receipt.verified_by,
        peer = receipt.remote_agent,
        "KV pulled"
    );
}
