//! `GET /health`, `GET /ready` and `GET /metrics`: for probes and for Prometheus.

use std::sync::Arc;

use axum::Json;
use axum::extract;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;

use crate::State;
use crate::choose::{self, Candidate, Fitness, Shape, View};
use crate::error::AnswerError;
use crate::pool::Role;

/// The process answers; it says nothing about workers.
pub(super) async fn alive() -> Response {
    Json(serde_json::json!({"status": "ok"})).into_response()
}

/// 200 when some request could be served now: a prefill and decode pair, or an aggregated worker. Else 503.
pub(super) async fn ready(extract::State(state): extract::State<Arc<State>>) -> Response {
    let view = state.pool.view(None);
    if choose::route(&view, Shape::Any, 0).is_none() {
        return AnswerError::NoWorker.into_response();
    }
    let count = |candidates: &[Candidate]| usable(candidates);
    Json(serde_json::json!({"status": "ready", "usable": {"prefill": count(&view.prefill),
        "decode": count(&view.decode), "aggregated": count(&view.aggregated)}}))
    .into_response()
}

/// The metrics, as OpenMetrics text.
pub(super) async fn metrics(extract::State(state): extract::State<Arc<State>>) -> Response {
    let View { prefill, decode, aggregated } = state.pool.view(None);
    for (role, all) in [(Role::Prefill, &prefill), (Role::Decode, &decode), (Role::Aggregated, &aggregated)] {
        state.metrics.set_workers(role, usable(all), all.len());
    }
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(CONTENT_TYPE, kind)], state.metrics.text()).into_response()
}

fn usable(candidates: &[Candidate]) -> usize {
    candidates.iter().filter(|candidate| candidate.fitness == Fitness::Usable).count()
}
