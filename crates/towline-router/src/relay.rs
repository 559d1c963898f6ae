//! The last stretch: a worker's answer on its way to the client.
//!
//! A stream passes frame by frame as it arrives, at the client's pace: a slow client holds back its worker's
//! connection, not our memory. What must end with the stream (the worker's count, the place inside, the entry in
//! the books) travels in it and is dropped with it. An answer that isn't streamed is held whole first, so that a
//! worker that breaks off is still a proper error.
//! Cost per frame: no copy, no task switch, one timer moved.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use hyper::body::Incoming;
use serde::de::IgnoredAny;
use tokio::time::{Instant, Sleep};

use crate::State;
use crate::admission::Admitted;
use crate::error::{AnswerError, LegError};
use crate::headers;
use crate::metrics::{Outcome, Tally};
use crate::plan::Writing;
use crate::pool::Held;
use crate::request::Delivery;
use crate::sse::{self, Ending, Events};

/// What a request holds until its answer has gone.
#[derive(Debug)]
pub(crate) struct Stay {
    pub(crate) tally: Tally,
    pub(crate) admitted: Admitted,
}

/// Turns a worker's answer into the client's.
pub(crate) async fn deliver(
    state: &Arc<State>,
    delivery: Delivery,
    writing: Writing,
    stay: &mut Option<Stay>,
) -> Result<Response, AnswerError> {
    let (head, body) = writing.response.into_parts();
    let body = match delivery {
        Delivery::Whole => Body::from(whole(state, &writing.held, body, stay).await?),
        Delivery::Stream => Body::new(Relay {
            events: Events::default(),
            idle: Box::pin(tokio::time::sleep(state.config.limits.body_idle_timeout)),
            idle_timeout: state.config.limits.body_idle_timeout,
            state: Arc::clone(state),
            open: stay.take().map(|stay| Open { body, stay, held: writing.held }),
        }),
    };
    let mut response = Response::new(body);
    *response.headers_mut() = headers::for_client(&head.headers);
    Ok(response)
}

async fn whole(
    state: &State,
    held: &Held,
    body: Incoming,
    stay: &mut Option<Stay>,
) -> Result<Bytes, LegError> {
    let role = held.worker().role;
    let read = state.legs.whole(held.worker(), body);
    let bytes = match tokio::time::timeout(state.config.limits.body_idle_timeout, read).await {
        Ok(Ok(bytes)) if is_json(&bytes) => Ok(bytes),
        Ok(Ok(_)) => Err(LegError::Garbage(role, "it is not JSON")),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(LegError::Timeout(role)),
    };
    let bytes = bytes.inspect_err(|error| state.note_failure(held, error))?;
    if let Some(Stay { tally, .. }) = stay {
        tally.handle_byte();
        tally.close(Outcome::Ok);
    }
    Ok(bytes)
}

fn is_json(bytes: &[u8]) -> bool {
    serde_json::from_slice::<IgnoredAny>(bytes).is_ok()
}

/// A stream in passing.
struct Relay {
    events: Events,
    idle: Pin<Box<Sleep>>,
    idle_timeout: Duration,
    state: Arc<State>,
    /// None once the stream has ended, well or not.
    open: Option<Open>,
}

struct Open {
    body: Incoming,
    stay: Stay,
    held: Held,
}

impl HttpBody for Relay {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        loop {
            let Some(open) = &mut this.open else { return Poll::Ready(None) };
            match Pin::new(&mut open.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    this.idle.as_mut().reset(Instant::now() + this.idle_timeout);
                    // Trailers are between the router and the worker.
                    let Ok(data) = frame.into_data() else { continue };
                    if let Some(events) = this.events.push(data) {
                        open.stay.tally.handle_byte();
                        return Poll::Ready(Some(Ok(Frame::data(events))));
                    }
                }
                Poll::Ready(Some(Err(_))) => return Poll::Ready(this.break_off(LegError::Broken)),
                Poll::Ready(None) => return Poll::Ready(this.end()),
                Poll::Pending => {
                    return match this.idle.as_mut().poll(cx) {
                        Poll::Ready(()) => Poll::Ready(this.break_off(LegError::Timeout)),
                        Poll::Pending => Poll::Pending,
                    };
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.open.is_none()
    }
}

type Passed = Option<Result<Frame<Bytes>, std::convert::Infallible>>;

impl Relay {
    /// The worker ended its stream.
    fn end(&mut self) -> Passed {
        let (ending, rest) = self.events.finish();
        let outcome = match ending {
            Ending::Done => Outcome::Ok,
            Ending::Reported => Outcome::StreamBroken,
            Ending::Cut => return self.break_off(LegError::Broken),
        };
        self.open.take()?.stay.tally.close(outcome);
        (!rest.is_empty()).then(|| Ok(Frame::data(rest)))
    }

    /// The worker died or fell silent: the client is told in the stream itself, whose head has long gone.
    fn break_off(&mut self, fault: fn(crate::pool::Role) -> LegError) -> Passed {
        let mut open = self.open.take()?;
        let error = fault(open.held.worker().role);
        self.state.note_failure(&open.held, &error);
        open.stay.tally.close(Outcome::StreamBroken);
        Some(Ok(Frame::data(sse::error_event(&AnswerError::from(error).body()))))
    }
}
