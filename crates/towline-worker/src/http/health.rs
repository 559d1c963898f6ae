//! `/health`, `/ready`, `/metrics`: what machines ask.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::error::ApiError;
use super::front::Front;
use crate::metrics::OPENMETRICS;

/// `GET /health`: the process answers.
pub(super) async fn health() -> Response {
    (StatusCode::OK, axum::Json(json!({"status": "ok"}))).into_response()
}

/// `GET /ready`: it takes requests, and which; else why it takes none.
pub(super) async fn ready(State(front): State<Arc<Front>>) -> Response {
    if front.is_draining() {
        return ApiError::Draining.into_response();
    }
    if !front.engine().is_running() {
        return ApiError::EngineStopped.into_response();
    }
    let body = json!({"status": "ready", "role": front.role().as_str(), "model": front.served().name});
    (StatusCode::OK, axum::Json(body)).into_response()
}

/// `GET /metrics`: OpenMetrics text.
pub(super) async fn metrics(State(front): State<Arc<Front>>) -> Response {
    let counts = front.handoff().map(super::kv::KvHandoff::counts);
    let text = front.metrics().render(&front.engine().stats(), &front.engine().blocks(), counts.as_ref());
    ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response()
}
