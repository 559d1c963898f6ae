//! The HTTP front of a worker: OpenAI's endpoints over the engine and the handoff.
//!
//! ```text
//! listen ─ connection ─ router ─ admission ─ request ──→ kv ─────→ engine ──→ generate (whole)
//!  bounds                         a place     an Ask      pull?     events     stream (events)
//! ```
//!
//! - `listen`: connections and their bounds; `admission`: requests and theirs;
//! - `body`, `request`, with `fields`, `options`, `messages`, `prompt`, `text`: from JSON to an `Ask`, everything wrong named by field;
//! - `kv`: plain, prefill leg, decode leg;
//! - `generate`, `stream`, with `shape`, `chat`, `completion`: answers, whole and streamed;
//! - `error`: the one table of statuses;
//! - `models`, `health`: the rest.
//!
//! **What it may not do.** Act on `kv_transfer_params` that no prefill worker of this deployment sealed; ignore an
//! option; panic on anything a stranger sends.

mod admission;
mod body;
mod chat;
mod completion;
mod error;
mod fields;
mod front;
mod generate;
mod health;
mod kv;
mod listen;
mod messages;
mod models;
mod options;
mod prompt;
mod request;
mod shape;
mod stream;
mod text;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::IntoResponse;
use axum::routing::{get, post};

pub use error::ApiError;
pub use front::{EngineWithPool, Events, Front, FrontParts, Generate, HttpLimits, Role};
pub use kv::{HandoffCounts, KvHandoff, OnKvFailure, Pull};
pub use listen::serve;
pub use messages::Message;
pub use request::{Served, Text};
pub use text::ModelText;

use error::cut;
use shape::Endpoint;

/// The endpoints over `front`.
pub fn router(front: Arc<Front>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .fallback(no_endpoint)
        .method_not_allowed_fallback(other_method)
        .with_state(front)
}

async fn chat_completions(State(front): State<Arc<Front>>, request: Request) -> impl IntoResponse {
    generate::answer(front, Endpoint::Chat, request).await
}

async fn completions(State(front): State<Arc<Front>>, request: Request) -> impl IntoResponse {
    generate::answer(front, Endpoint::Completions, request).await
}

async fn no_endpoint(request: Request) -> ApiError {
    let (method, path) = (request.method().to_string(), cut(request.uri().path(), 200).into());
    ApiError::NoEndpoint { method, path }
}

async fn other_method(request: Request) -> ApiError {
    let (method, path) = (request.method().to_string(), cut(request.uri().path(), 200).into());
    ApiError::Method { method, path }
}
