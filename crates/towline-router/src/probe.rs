//! Asking workers how they are, beside the requests: health every few seconds, models now and then.
//!
//! Cost: a small `GET` per worker and interval: 16 idle workers make about 3 requests a second at the default pace.

use std::time::Instant;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use crate::State;
use crate::models::Listing;
use crate::pool::Worker;

/// Rounds of health probes between two listings of a worker whose models are known: a minute at the default pace.
const ROUNDS_PER_LISTING: u64 = 12;

/// Probes every worker until told to stop.
pub(crate) async fn run(state: &State, stop: &CancellationToken) {
    let mut ticks = tokio::time::interval(state.config.limits.probe_interval.max(MIN_INTERVAL));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for round in 0_u64.. {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        tokio::select! {
            _ = join_all(state.pool.workers().map(|(_, worker)| probe(state, worker, round))) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Tokio's interval can't be zero, and nobody needs more than this.
const MIN_INTERVAL: std::time::Duration = std::time::Duration::from_millis(10);

async fn probe(state: &State, worker: &Worker, round: u64) {
    let health = state.legs.get(worker, "/health");
    let alive = match tokio::time::timeout(state.config.limits.probe_timeout, health).await {
        // Any answer but a 5xx: a worker without the endpoint is alive all the same.
        Ok(Ok((status, _))) => !status.is_server_error(),
        Ok(Err(_)) | Err(_) => false,
    };
    if !alive {
        worker.health().handle_probe_failure();
        return;
    }
    worker.health().handle_probe_success();
    if worker.models().is_none() || round.is_multiple_of(ROUNDS_PER_LISTING) {
        list(state, worker).await;
    }
}

/// Asks the usable workers for their models, if nobody has just done so. Who comes while it is being done waits
/// for it: at most the probe timeout.
pub(crate) async fn refresh_models(state: &State) {
    let mut listed = state.listed.lock().await;
    let now = Instant::now();
    if listed.is_some_and(|last| now.duration_since(last) < state.config.limits.models_refresh_interval) {
        return;
    }
    let usable = state.pool.workers().filter(|(_, worker)| state.pool.is_usable(worker, now));
    join_all(usable.map(|(_, worker)| list(state, worker))).await;
    *listed = Some(Instant::now());
}

/// Replaces what is known of a worker's models; a worker that can't say keeps what it said last.
async fn list(state: &State, worker: &Worker) {
    let models = state.legs.get(worker, "/v1/models");
    let Ok(Ok((status, body))) = tokio::time::timeout(state.config.limits.probe_timeout, models).await else {
        return;
    };
    if !status.is_success() {
        return;
    }
    if let Ok(listing) = serde_json::from_slice::<Listing>(&body) {
        worker.set_models(listing.data);
    }
}
