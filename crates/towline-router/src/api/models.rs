//! `GET /v1/models`: what the workers list, merged.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract;

use crate::State;
use crate::error::AnswerError;
use crate::models::{Listing, merged};
use crate::probe;

/// The merged listing; 503 while no worker has given one.
pub(super) async fn list(
    extract::State(state): extract::State<Arc<State>>,
) -> Result<Json<Listing>, AnswerError> {
    let now = Instant::now();
    let unlisted = |(_, worker): (_, &crate::pool::Worker)| {
        worker.models().is_none() && state.pool.is_usable(worker, now)
    };
    if state.pool.workers().any(unlisted) {
        probe::refresh_models(&state).await;
    }
    let listing = merged(&state.pool);
    match state.pool.workers().all(|(_, worker)| worker.models().is_none()) {
        true => Err(AnswerError::NoWorker),
        false => Ok(Json(listing)),
    }
}
