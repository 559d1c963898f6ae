//! A request's place among those under way, from its first header to its last byte.
//!
//! The value is the account: while it lives the request counts against the bound, and however it ends, by an answer, an
//! error or a client that left, its drop counts it exactly once.

use std::sync::Arc;
use std::time::Instant;

use axum::http::HeaderMap;
use tokio::sync::OwnedSemaphorePermit;

use super::error::ApiError;
use super::front::Front;
use super::shape::Endpoint;
use crate::metrics::{Metrics, Outcome};

/// A request under way.
pub(super) struct Admission {
    endpoint: Endpoint,
    outcome: Outcome,
    started: Instant,
    metrics: Arc<Metrics>,
    _permit: OwnedSemaphorePermit,
}

impl Admission {
    /// Takes a place.
    pub(super) fn take(front: &Front, endpoint: Endpoint) -> Result<Self, ApiError> {
        let started = Instant::now();
        let refusal = if front.is_draining() {
            ApiError::Draining
        } else if let Ok(permit) = Arc::clone(front.permits()).try_acquire_owned() {
            let metrics = Arc::clone(front.metrics());
            return Ok(Self { endpoint, outcome: Outcome::Cancelled, started, metrics, _permit: permit });
        } else {
            ApiError::Overloaded { detail: format!("{} requests are under way", front.limits().requests) }
        };
        front.metrics().request(endpoint.as_str(), Outcome::of(refusal.status()));
        Err(refusal)
    }

    /// The first token is there.
    pub(super) fn first_token(&self) {
        self.metrics.first_token(self.started.elapsed());
    }

    /// The whole answer is on its way.
    pub(super) fn succeed(&mut self) {
        self.outcome = Outcome::Ok;
    }

    /// The client is told of an error.
    pub(super) fn fail(&mut self, error: &ApiError) {
        self.outcome = Outcome::of(error.status());
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.metrics.request(self.endpoint.as_str(), self.outcome);
    }
}

/// The header that names a request.
pub(super) const REQUEST_ID: &str = "x-request-id";
/// Longest id taken from a client: it stands in every log line.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// The client's id for the request if it may stand in logs and headers, else a random one.
pub(super) fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let sane = |id: &&str| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
    };
    given.filter(sane).map_or_else(|| format!("{:016x}{:016x}", random(), random()), str::to_owned)
}

/// A number nobody else has: random, or on a system without randomness the clock's finest digits.
pub(super) fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        now.as_secs().rotate_left(32) ^ u64::from(now.subsec_nanos())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_could_break_a_log_line_are_replaced() {
        let id = |value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, value.try_into().unwrap());
            request_id(&headers)
        };
        assert_eq!(id(b"abc-1.2:3_D"), "abc-1.2:3_D");
        for bad in [b"".as_slice(), b"a b", b"a\"b", b"caf\xc3\xa9", &[b'x'; 129]] {
            let fresh = id(bad);
            assert!(fresh.len() == 32 && fresh.bytes().all(|byte| byte.is_ascii_hexdigit()), "{fresh}");
        }
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }
}
