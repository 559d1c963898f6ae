//! How a request becomes legs. A plan turns a chosen route into the head of the answer that the client will get.

mod leg_body;
mod serial;
mod single;

use http::{HeaderMap, Response};
use hyper::body::Incoming;

use crate::State;
use crate::error::{AnswerError, LegError};
use crate::legs::is_of_type;
use crate::pool::{Held, HeldRoute};
use crate::request::{Delivery, Request};

/// A request on its way: what every leg is made from.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) request: Request,
    /// Headers of a leg that writes no tokens.
    pub(crate) headers: HeaderMap,
    /// Headers of the leg that writes the tokens.
    pub(crate) writer_headers: HeaderMap,
}

/// A worker that has begun its answer.
#[derive(Debug)]
pub(crate) struct Writing {
    pub(crate) response: Response<Incoming>,
    pub(crate) held: Held,
}

/// Chooses a route and walks it, up to the head of the answer.
pub(crate) async fn run(state: &State, call: &Call) -> Result<Writing, AnswerError> {
    let request = &call.request;
    match state.pool.route(&request.model, request.shape) {
        Some(HeldRoute::Pair { prefill, decode }) => Ok(serial::run(state, call, prefill, decode).await?),
        Some(HeldRoute::Aggregated(held)) => Ok(single::run(state, call, held).await?),
        None if state.cannot_batch(call) => Err(AnswerError::invalid(
            "prompt",
            "several prompts in one request can't be served by prefill and decode pairs: send one a request",
        )),
        None => Err(AnswerError::NoWorker),
    }
}

impl State {
    /// Whether the deployment has nobody, up or down, for a request that needs one worker.
    fn cannot_batch(&self, call: &Call) -> bool {
        call.request.shape == crate::choose::Shape::OneWorker && self.config.aggregated.is_empty()
    }
}

/// When a failed leg may be sent to another worker. One retry at most: a request that kills workers should not
/// meet them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    /// Nothing has reached the client, and doing it twice does no harm.
    Repeatable,
    /// Only what never left the router may be sent again: the first worker may have used up the KV.
    Unsent,
}

/// Another worker for a leg that failed, if one may be asked and is there. Lets go of the first.
fn second(state: &State, call: &Call, first: Held, error: &LegError, retry: Retry) -> Option<Held> {
    let may = match retry {
        Retry::Repeatable => {
            matches!(error, LegError::Unreachable(_) | LegError::Broken(_) | LegError::Failed(..))
        }
        Retry::Unsent => matches!(error, LegError::Unreachable(_)),
    };
    let other = if may { state.pool.other(&call.request.model, first.id()) } else { None };
    if other.is_some() {
        state.metrics.count_retry(first.worker().role);
    }
    other
}

/// Writes a leg's end into the books: the worker's health, and the count of failures.
fn settle<T>(state: &State, held: &Held, result: Result<T, LegError>) -> Result<T, LegError> {
    match &result {
        Ok(_) => held.handle_success(),
        Err(error) => state.note_failure(held, error),
    }
    result
}

impl State {
    /// A leg failed.
    pub(crate) fn note_failure(&self, held: &Held, error: &LegError) {
        let worker = held.worker();
        tracing::warn!(worker = %worker.url, role = worker.role.word(), reason = error.reason(), "leg failed");
        self.metrics.count_leg_failure(worker.role, error);
        if error.is_workers_fault() {
            held.handle_failure();
        } else if matches!(error, LegError::Rejected(_)) {
            held.handle_success();
        }
    }
}

/// Asks the worker that writes the tokens, and checks that its answer is of the kind the client asked for.
async fn ask_writer(
    state: &State,
    call: &Call,
    held: &Held,
    body: bytes::Bytes,
) -> Result<Response<Incoming>, LegError> {
    let worker = held.worker();
    let path = call.request.endpoint.path();
    let post = state.legs.post(worker, path, call.writer_headers.clone(), body);
    let head = match tokio::time::timeout(state.config.limits.decode_head_timeout, post).await {
        Ok(head) => head.and_then(|head| check_type(call.request.delivery, head, held)),
        Err(_) => Err(LegError::Timeout(worker.role)),
    };
    settle(state, held, head)
}

fn check_type(
    delivery: Delivery,
    head: Response<Incoming>,
    held: &Held,
) -> Result<Response<Incoming>, LegError> {
    let (media, fault) = match delivery {
        Delivery::Whole => ("application/json", "it is not JSON"),
        Delivery::Stream => ("text/event-stream", "it is not an event stream"),
    };
    match is_of_type(head.headers(), media) {
        true => Ok(head),
        false => Err(LegError::Garbage(held.worker().role, fault)),
    }
}
