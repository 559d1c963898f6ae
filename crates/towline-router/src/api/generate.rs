//! `POST /v1/chat/completions` and `POST /v1/completions`: the same road, two wires.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_LENGTH;
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::RequestId;
use crate::State;
use crate::config::Limits;
use crate::error::AnswerError;
use crate::headers::{Credentials, for_leg, with_receipt};
use crate::metrics::{Outcome, Tally};
use crate::plan::{self, Call};
use crate::pool::Knowledge;
use crate::probe;
use crate::relay::{Stay, deliver};
use crate::request::{Endpoint, Request};

/// `POST /v1/chat/completions`.
pub(super) async fn chat(
    extract::State(state): extract::State<Arc<State>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    answer(&state, Endpoint::Chat, Arrival { id, headers, body }).await
}

/// `POST /v1/completions`.
pub(super) async fn completions(
    extract::State(state): extract::State<Arc<State>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    answer(&state, Endpoint::Completions, Arrival { id, headers, body }).await
}

/// A request as it came.
struct Arrival {
    id: RequestId,
    headers: HeaderMap,
    body: Body,
}

async fn answer(state: &Arc<State>, endpoint: Endpoint, arrival: Arrival) -> Response {
    let mut tally = Tally::open(&state.metrics, endpoint);
    let admitted = match body_bytes(&arrival.headers, &state.config.limits)
        .and_then(|bytes| state.admission.admit(bytes))
    {
        Ok(admitted) => admitted,
        Err(error) => {
            tally.close(Outcome::of(error.status()));
            return error.into_response();
        }
    };
    let mut stay = Some(Stay { tally, admitted });
    match walk(state, endpoint, arrival, &mut stay).await {
        Ok(response) => response,
        Err(error) => {
            if let Some(Stay { tally, .. }) = &mut stay {
                tally.close(Outcome::of(error.status()));
            }
            error.into_response()
        }
    }
}

/// From a body to an answer.
async fn walk(
    state: &Arc<State>,
    endpoint: Endpoint,
    arrival: Arrival,
    stay: &mut Option<Stay>,
) -> Result<Response, AnswerError> {
    let body = read(arrival.body, &state.config.limits).await?;
    if let Some(Stay { admitted, .. }) = stay {
        admitted.shrink(body.len());
    }
    let request = Request::parse(endpoint, &body)?;
    drop(body);
    state.metrics.count_dropped(&request.dropped);
    check_model(state, &request.model).await?;
    let credentials = match state.config.forward_authorization {
        true => Credentials::Forward,
        false => Credentials::Keep,
    };
    let headers = for_leg(&arrival.headers, &arrival.id.0, credentials);
    let writer_headers = with_receipt(headers.clone(), &arrival.headers);
    let call = Call { request, headers, writer_headers };
    let writing = match plan::run(state, &call).await {
        // While workers are still being listed, nobody to ask may mean that nobody serves the model.
        Err(AnswerError::NoWorker) => {
            return Err(unknown_model(state, &call.request.model).await.unwrap_or(AnswerError::NoWorker));
        }
        begun => begun?,
    };
    deliver(state, call.request.delivery, writing, stay).await
}

/// The most bytes a body can take: what its head says, or the bound.
fn body_bytes(headers: &HeaderMap, limits: &Limits) -> Result<usize, AnswerError> {
    let Some(length) = headers.get(CONTENT_LENGTH) else { return Ok(limits.body_bytes_max) };
    let length = length.to_str().ok().and_then(|length| length.parse::<usize>().ok());
    match length {
        Some(length) if length <= limits.body_bytes_max => Ok(length),
        _ => Err(AnswerError::TooLarge),
    }
}

async fn read(body: Body, limits: &Limits) -> Result<Bytes, AnswerError> {
    let whole = Limited::new(body, limits.body_bytes_max).collect();
    match tokio::time::timeout(limits.body_timeout, whole).await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(AnswerError::TooLarge),
        Ok(Err(_)) => Err(AnswerError::Invalid {
            message: "the request body broke off".to_owned(),
            param: None,
            code: "incomplete_body",
        }),
        Err(_) => Err(AnswerError::BodyTimeout),
    }
}

/// Refuses a model that nobody serves.
async fn check_model(state: &State, model: &str) -> Result<(), AnswerError> {
    if state.pool.knowledge(model) != Knowledge::Absent {
        return Ok(());
    }
    unknown_model(state, model).await.map_or(Ok(()), Err)
}

/// The refusal of a model that nobody serves; asks the workers again before it says so, now and then.
async fn unknown_model(state: &State, model: &str) -> Option<AnswerError> {
    probe::refresh_models(state).await;
    let absent = state.pool.knowledge(model) == Knowledge::Absent;
    absent.then(|| AnswerError::ModelNotFound(model.chars().take(128).collect()))
}
