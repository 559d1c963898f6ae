//! Streamed answers: server-sent events, one for each token, sent as they come.
//!
//! The body's stream yields when an event of the engine has something to show; hyper writes and flushes whenever the
//! stream has nothing more at the moment, so a token never waits for the next one.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;

use super::admission::Admission;
use super::error::ApiError;
use super::generate::{Generation, finish_reason, lost};
use super::shape::{Chunk, Piece};
use crate::engine::{Event, Finished};

/// The end of every stream.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Streams the rest of `generation`.
pub(super) fn response(generation: Generation, admission: Admission) -> Response {
    let writer = Writer { generation, admission, opened: false, done: false };
    let mut response = Response::new(Body::from_stream(futures_util::stream::unfold(writer, Writer::next)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx buffers streams unless told not to.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Writer {
    generation: Generation,
    admission: Admission,
    opened: bool,
    done: bool,
}

impl Writer {
    /// Waits until there is something to send.
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        let mut out = Vec::new();
        while out.is_empty() && !self.done {
            match self.generation.next().await {
                Some(Event::Token { id, text, logprob }) => {
                    let piece = self.generation.piece(id, text, logprob);
                    self.token(&piece, &mut out);
                }
                Some(Event::Finished(finished)) => self.finish(&finished, &mut out),
                Some(Event::Failed(error)) => self.fail(&error.into(), &mut out),
                None => self.fail(&lost(), &mut out),
            }
        }
        (!out.is_empty()).then(|| (Ok(Bytes::from(out)), self))
    }

    /// The role first, where the endpoint has one; the prompt's tokens go with whatever is first.
    fn open(&mut self, out: &mut Vec<u8>) -> bool {
        if std::mem::replace(&mut self.opened, true) {
            return false;
        }
        let opening = self.generation.endpoint.opening(&self.generation.head, self.generation.prompt());
        opening.as_deref().map(|json| frame(out, json)).is_none()
    }

    fn token(&mut self, piece: &Piece, out: &mut Vec<u8>) {
        let first = self.open(out);
        let head = &self.generation.head;
        if piece.text.is_empty() && !head.token_ids && piece.logprobs.is_empty() {
            return;
        }
        let end = Chunk { finish_reason: None, prompt: self.generation.prompt().filter(|_| first) };
        frame(out, &self.generation.endpoint.chunk(head, piece, end));
    }

    fn finish(&mut self, finished: &Finished, out: &mut Vec<u8>) {
        let first = self.open(out);
        let usage = self.generation.usage(finished);
        let Generation { endpoint, head, include_usage, .. } = &self.generation;
        let end = Chunk {
            finish_reason: Some(finish_reason(finished.reason)),
            prompt: self.generation.prompt().filter(|_| first),
        };
        frame(out, &endpoint.chunk(head, &Piece::default(), end));
        if *include_usage {
            frame(out, &endpoint.usage_chunk(head, &usage));
        }
        self.admission.succeed();
        self.close(out);
    }

    /// The status is sent already; clients find the error in the stream.
    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.admission.fail(error);
        frame(out, &serde_json::to_vec(&error.body()).unwrap_or_default());
        self.close(out);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(DONE);
        self.done = true;
    }
}

fn frame(out: &mut Vec<u8>, json: &[u8]) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(json);
    out.extend_from_slice(b"\n\n");
}
