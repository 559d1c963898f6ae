//! `/v1/models`: the one model that is served.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::error::{ApiError, cut};
use super::front::Front;

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: [Model<'a>; 1],
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// vLLM's name for the context.
    max_model_len: usize,
}

fn model(front: &Front) -> Model<'_> {
    Model {
        id: &front.served().name,
        object: "model",
        created: front.created(),
        owned_by: "towline",
        max_model_len: front.served().context,
    }
}

/// `GET /v1/models`
pub(super) async fn list(State(front): State<Arc<Front>>) -> Response {
    Json(List { object: "list", data: [model(&front)] }).into_response()
}

/// `GET /v1/models/{name}`; names may have slashes.
pub(super) async fn one(State(front): State<Arc<Front>>, Path(name): Path<String>) -> Response {
    let served = &front.served().name;
    if name == *served {
        return Json(model(&front)).into_response();
    }
    ApiError::UnknownModel { name: cut(&name, 200).into(), served: served.clone() }.into_response()
}
