//! One leg: a request to one worker, and what its answer is worth.
//!
//! The client pools connections (HTTP/1.1, `TCP_NODELAY`), bounds what a worker may send as a head, follows no
//! redirects and asks for no compression. Dropping a leg's future, or its body, closes the connection at once:
//! that is how a worker learns that nobody waits any more.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Deserialize;
use towline_wire::openai::{ErrorBody, KV_TRANSFER_FAILED};

use crate::config::Limits;
use crate::error::{self, LegError, Rejection};
use crate::pool::Worker;

/// Longest 4xx body relayed, bytes: a message, not a document.
const REJECTION_BYTES_MAX: usize = 64 << 10;
/// Hyper's least buffer, bytes.
const HEAD_BYTES_MIN: usize = 8192;

/// The way to all workers.
#[derive(Clone, Debug)]
pub(crate) struct Legs {
    http: Client<HttpConnector, Full<Bytes>>,
    answer_bytes_max: usize,
}

impl Legs {
    pub(crate) fn new(limits: &Limits) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(limits.connect_timeout));
        let http = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(limits.idle_connection_timeout)
            .pool_max_idle_per_host(limits.idle_connections_max)
            .http1_max_buf_size(limits.head_bytes_max.max(HEAD_BYTES_MIN))
            .http1_max_headers(limits.headers_max)
            .build(connector);
        Self { http, answer_bytes_max: limits.answer_bytes_max }
    }

    /// Posts JSON; gives the head of a success.
    pub(crate) async fn post(
        &self,
        worker: &Worker,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, LegError> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.headers_mut() = headers;
        let response = self.send(worker, path, request).await?;
        judge(worker, response).await
    }

    /// Gets a small document, whatever its status.
    pub(crate) async fn get(&self, worker: &Worker, path: &str) -> Result<(StatusCode, Bytes), LegError> {
        let response = self.send(worker, path, Request::new(Full::default())).await?;
        let status = response.status();
        Ok((status, self.whole(worker, response.into_body()).await?))
    }

    async fn send(
        &self,
        worker: &Worker,
        path: &str,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, LegError> {
        let role = worker.role;
        *request.uri_mut() = worker.url.at(path).map_err(|_| LegError::Unreachable(role))?;
        self.http.request(request).await.map_err(|error| match error.is_connect() {
            true => LegError::Unreachable(role),
            false => LegError::Broken(role),
        })
    }

    /// An answer's whole body, within bounds.
    pub(crate) async fn whole(&self, worker: &Worker, body: Incoming) -> Result<Bytes, LegError> {
        match Limited::new(body, self.answer_bytes_max).collect().await {
            Ok(collected) => Ok(collected.to_bytes()),
            Err(error) if error.is::<http_body_util::LengthLimitError>() => {
                Err(LegError::Garbage(worker.role, "it is too long"))
            }
            Err(_) => Err(LegError::Broken(worker.role)),
        }
    }
}

/// Sorts answers by status: a success passes, everything else is an error.
async fn judge(worker: &Worker, response: Response<Incoming>) -> Result<Response<Incoming>, LegError> {
    let status = response.status();
    if status == StatusCode::OK {
        Ok(response)
    } else if status.is_client_error() {
        Err(LegError::Rejected(Box::new(rejection(worker, response).await)))
    } else if status.is_server_error() {
        Err(failure(worker, response).await)
    } else {
        Err(LegError::Garbage(worker.role, "its status is neither success nor error"))
    }
}

/// A 5xx. Of its body only one word counts: whether the KV is what was missing.
async fn failure(worker: &Worker, response: Response<Incoming>) -> LegError {
    let (head, body) = response.into_parts();
    match serde_json::from_slice::<ErrorBody>(&short(body).await) {
        Ok(body) if body.error.code.as_deref() == Some(KV_TRANSFER_FAILED) => LegError::KvTransfer,
        _ => LegError::Failed(worker.role, head.status),
    }
}

/// An error's body; empty when it is too long or breaks off.
async fn short(body: Incoming) -> Bytes {
    let body = Limited::new(body, REJECTION_BYTES_MAX).collect().await;
    body.map(|whole| whole.to_bytes()).unwrap_or_default()
}

async fn rejection(worker: &Worker, response: Response<Incoming>) -> Rejection {
    let (head, body) = response.into_parts();
    let body = short(body).await;
    let fit = is_openai_error(&body) && !contains(&body, worker.url.authority().as_bytes());
    Rejection {
        status: head.status,
        retry_after: head.headers.get(RETRY_AFTER).cloned(),
        body: if fit { body } else { substitute(head.status) },
    }
}

/// What a client is told when a worker's own words can't be passed on.
fn substitute(status: StatusCode) -> Bytes {
    let message = format!("the worker refused the request with status {}", status.as_u16());
    error::json(&ErrorBody::new(error::kind(status), "worker_rejected_request", message))
}

fn is_openai_error(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Shape {
        error: Detail,
    }
    #[derive(Deserialize)]
    struct Detail {
        #[serde(rename = "message")]
        _message: String,
    }
    serde_json::from_slice::<Shape>(body).is_ok_and(|Shape { error: Detail { .. } }| true)
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len().max(1)).any(|window| window == part)
}

/// Whether an answer says it is of this media type, parameters aside.
pub(crate) fn is_of_type(headers: &HeaderMap, media: &str) -> bool {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().is_some_and(|found| found.trim().eq_ignore_ascii_case(media))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn openai_errors_are_told_from_other_bodies() {
        assert!(is_openai_error(br#"{"error":{"message":"too long","type":"x","code":400}}"#));
        for body in [&b""[..], b"Bad Request", b"{}", br#"{"error":"x"}"#, br#"{"detail":"x"}"#] {
            assert!(!is_openai_error(body), "{body:?}");
        }
        assert!(is_openai_error(&substitute(StatusCode::BAD_REQUEST)));
    }

    #[test]
    fn media_types_are_compared_without_parameters() {
        let mut headers = HeaderMap::new();
        assert!(!is_of_type(&headers, "application/json"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("Text/Event-Stream; charset=utf-8"));
        assert!(is_of_type(&headers, "text/event-stream"));
    }

    #[test]
    fn addresses_are_found_anywhere() {
        assert!(contains(b"at 10.0.0.1:80!", b"10.0.0.1:80"));
        assert!(!contains(b"", b"10.0.0.1:80"));
    }
}
