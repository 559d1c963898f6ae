//! Two legs, one after the other: prefill computes the prompt and keeps its KV, decode fetches it and writes.
//!
//! The wire is vLLM's (NIXL connector, pull; measured against 0.32): the prefill answer's `kv_transfer_params` go
//! to the decode worker byte for byte, so what they hold is between the two workers. The prefill worker's lease
//! runs while the decode leg is sent; a leg that is given up costs it no more than that lease.

use std::time::Instant;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::State;
use crate::error::LegError;
use crate::plan::{Call, Retry, Writing, ask_writer, leg_body, second, settle};
use crate::pool::{Held, Role};

/// Runs both legs, up to the head of the decode worker's answer.
pub(super) async fn run(
    state: &State,
    call: &Call,
    prefill: Held,
    decode: Held,
) -> Result<Writing, LegError> {
    let started = Instant::now();
    let kv = first_leg(state, call, prefill).await?;
    state.metrics.observe_prefill(started.elapsed());
    second_leg(state, call, decode, &kv).await
}

/// The prefill leg. Nothing has been delivered yet and computing a prompt twice does no harm, so another worker
/// may be asked whatever happened to the first.
async fn first_leg(state: &State, call: &Call, held: Held) -> Result<Box<RawValue>, LegError> {
    let body = leg_body::prefill(&call.request);
    let error = match ask_prefill(state, call, &held, body.clone()).await {
        Ok(kv) => return Ok(kv),
        Err(error) => error,
    };
    let Some(held) = second(state, call, held, &error, Retry::Repeatable) else { return Err(error) };
    ask_prefill(state, call, &held, body).await
}

async fn ask_prefill(
    state: &State,
    call: &Call,
    held: &Held,
    body: Bytes,
) -> Result<Box<RawValue>, LegError> {
    let worker = held.worker();
    let leg = async {
        let path = call.request.endpoint.path();
        let response = state.legs.post(worker, path, call.headers.clone(), body).await?;
        kv_of(&state.legs.whole(worker, response.into_body()).await?)
    };
    let timeout = tokio::time::timeout(state.config.limits.prefill_timeout, leg).await;
    settle(state, held, timeout.unwrap_or(Err(LegError::Timeout(Role::Prefill))))
}

/// The decode leg. Once a worker has been sent the parameters it may have fetched the KV and let prefill free it,
/// so a second one is asked only if the first was never reached.
async fn second_leg(state: &State, call: &Call, held: Held, kv: &RawValue) -> Result<Writing, LegError> {
    let body = leg_body::decode(&call.request, kv);
    let error = match ask_writer(state, call, &held, body.clone()).await {
        Ok(response) => return Ok(Writing { response, held }),
        Err(error) => error,
    };
    let Some(held) = second(state, call, held, &error, Retry::Unsent) else { return Err(error) };
    let response = ask_writer(state, call, &held, body).await?;
    Ok(Writing { response, held })
}

/// The top-level `kv_transfer_params` of a prefill answer, unparsed: an object, or there is no handoff.
fn kv_of(answer: &[u8]) -> Result<Box<RawValue>, LegError> {
    #[derive(Deserialize)]
    struct Answer {
        kv_transfer_params: Option<Box<RawValue>>,
    }
    let answer: Answer =
        serde_json::from_slice(answer).map_err(|_| LegError::Garbage(Role::Prefill, "it is not JSON"))?;
    match answer.kv_transfer_params {
        Some(kv) if kv.get().starts_with('{') => Ok(kv),
        _ => Err(LegError::NoKv),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_taken_byte_for_byte() {
        let kv = kv_of(br#"{"id":"x", "kv_transfer_params": {"b": 1.50, "a" : null}, "usage":{}}"#).unwrap();
        assert_eq!(kv.get(), r#"{"b": 1.50, "a" : null}"#);
    }

    #[test]
    fn answers_without_parameters_are_told_from_garbage() {
        for answer in ["{}", r#"{"kv_transfer_params":null}"#, r#"{"kv_transfer_params":[]}"#] {
            assert_eq!(kv_of(answer.as_bytes()).unwrap_err(), LegError::NoKv, "{answer}");
        }
        for answer in ["", "hello", "[", "data: {}"] {
            assert!(matches!(kv_of(answer.as_bytes()), Err(LegError::Garbage(..))), "{answer}");
        }
    }
}
