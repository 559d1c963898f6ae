//! The endpoints. Every answer, errors and unknown paths included, carries a request id and OpenAI's shapes.

mod generate;
mod health;
mod models;

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{get, post};
use http::{HeaderValue, Method, Uri};

use crate::State;
use crate::error::AnswerError;
use crate::headers;

/// The request's id, as the layer below chose it.
#[derive(Clone, Debug)]
struct RequestId(HeaderValue);

/// The whole service.
pub(crate) fn app(state: Arc<State>) -> axum::Router {
    axum::Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/models", get(models::list))
        .route("/health", get(health::alive))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn(identify))
        .with_state(state)
}

/// Gives the request its id, and the answer the same.
async fn identify(mut request: Request, next: Next) -> Response {
    let id = headers::request_id(request.headers());
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    response.headers_mut().insert(headers::REQUEST_ID, id);
    response
}

async fn unknown(uri: Uri) -> AnswerError {
    AnswerError::NotFound(uri.path().chars().take(256).collect())
}

async fn wrong_method(method: Method) -> AnswerError {
    AnswerError::MethodNotAllowed(method.as_str().chars().take(32).collect())
}
