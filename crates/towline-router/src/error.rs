//! Everything that can go wrong with a request, as clients see it: a status and OpenAI's error object.
//!
//! Messages name the leg at fault and whether to retry. They never carry a worker's address or a worker's own
//! words for a 5xx; a worker's 4xx is about the client's request, and is relayed when it is in OpenAI's shape.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, StatusCode};
use thiserror::Error;
use towline_wire::openai::{ErrorBody, KV_TRANSFER_FAILED};

use crate::pool::Role;

/// Why a leg gave no answer to pass on.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum LegError {
    /// No connection; nothing was sent, so anyone else may be asked.
    #[error("the {} worker can't be reached", .0.word())]
    Unreachable(Role),
    /// The connection broke, or spoke no HTTP, after the request had been sent.
    #[error("the connection to the {} worker broke before its answer was whole", .0.word())]
    Broken(Role),
    /// No answer in time.
    #[error("the {} worker gave no answer in time", .0.word())]
    Timeout(Role),
    /// A 5xx.
    #[error("the {} worker failed with status {}", .0.word(), .1.as_u16())]
    Failed(Role, StatusCode),
    /// The decode worker is well, but the KV did not reach it: the pair failed, not the worker.
    #[error("the KV did not reach the decode worker: its log says why")]
    KvTransfer,
    /// A success that isn't what was asked for.
    #[error("the {} worker's answer can't be used: {}", .0.word(), .1)]
    Garbage(Role, &'static str),
    /// A prefill answer that names no KV: decode would have nothing to fetch.
    #[error("the prefill worker's answer holds no kv_transfer_params object: is its KV connector on?")]
    NoKv,
    /// A 4xx: the client's request is at fault.
    #[error("the worker refused the request with status {}", .0.status.as_u16())]
    Rejected(Box<Rejection>),
}

/// A worker's 4xx, fit to be relayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) status: StatusCode,
    pub(crate) retry_after: Option<HeaderValue>,
    /// In OpenAI's shape, and free of addresses.
    pub(crate) body: Bytes,
}

impl LegError {
    /// The word for the `reason` label.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::Broken(_) => "broken",
            Self::Timeout(_) => "timeout",
            Self::Failed(..) => "status_5xx",
            Self::KvTransfer => "kv_transfer",
            Self::Garbage(..) => "garbage",
            Self::NoKv => "no_kv",
            Self::Rejected(_) => "rejected",
        }
    }

    /// Whether it speaks against the worker. A plain 500 doesn't: engines give it for single bad requests, and
    /// one client's must not close a worker for everyone.
    pub(crate) fn is_workers_fault(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Broken(_) | Self::Timeout(_) | Self::Garbage(..) | Self::NoKv => {
                true
            }
            Self::Failed(_, status) => *status != StatusCode::INTERNAL_SERVER_ERROR,
            Self::KvTransfer | Self::Rejected(_) => false,
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::Unreachable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed(_, StatusCode::SERVICE_UNAVAILABLE) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Timeout(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Rejected(rejection) => rejection.status,
            Self::Broken(_) | Self::Failed(..) | Self::KvTransfer | Self::Garbage(..) | Self::NoKv => {
                StatusCode::BAD_GATEWAY
            }
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "worker_unreachable",
            Self::Broken(_) => "worker_connection_broken",
            Self::Timeout(_) => "worker_timeout",
            Self::Failed(_, StatusCode::SERVICE_UNAVAILABLE) => "worker_overloaded",
            Self::Failed(..) => "worker_failed",
            Self::KvTransfer => KV_TRANSFER_FAILED,
            Self::Garbage(..) => "worker_answer_invalid",
            Self::NoKv => "prefill_returned_no_kv",
            Self::Rejected(_) => "worker_rejected_request",
        }
    }
}

/// Why a request gets an error for an answer.
#[derive(Clone, Debug, Error)]
pub(crate) enum AnswerError {
    /// The request is malformed.
    #[error("{message}")]
    Invalid { message: String, param: Option<&'static str>, code: &'static str },
    #[error("the request body is larger than this server takes")]
    TooLarge,
    #[error("the request body did not arrive in time")]
    BodyTimeout,
    #[error("the model {0:?} does not exist here: GET /v1/models lists those that do")]
    ModelNotFound(String),
    #[error("no such endpoint: {0}")]
    NotFound(String),
    #[error("this endpoint does not take the method {0}")]
    MethodNotAllowed(String),
    #[error("too many requests in flight: retry shortly")]
    Overloaded,
    #[error("no usable worker for this request: retry shortly")]
    NoWorker,
    #[error("{0}")]
    Leg(#[from] LegError),
}

impl AnswerError {
    /// A malformed request; `param` names the field.
    pub(crate) fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid { message: message.into(), param: Some(param), code: "invalid_value" }
    }

    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } => StatusCode::BAD_REQUEST,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::ModelNotFound(_) | Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Overloaded | Self::NoWorker => StatusCode::SERVICE_UNAVAILABLE,
            Self::Leg(leg) => leg.status(),
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Invalid { code, .. } => code,
            Self::TooLarge => "request_too_large",
            Self::BodyTimeout => "request_timeout",
            Self::ModelNotFound(_) => "model_not_found",
            Self::NotFound(_) => "unknown_url",
            Self::MethodNotAllowed(_) => "method_not_supported",
            Self::Overloaded => "too_many_in_flight",
            Self::NoWorker => "no_usable_worker",
            Self::Leg(leg) => leg.code(),
        }
    }

    fn param(&self) -> Option<&'static str> {
        match self {
            Self::Invalid { param, .. } => *param,
            Self::ModelNotFound(_) => Some("model"),
            _ => None,
        }
    }

    /// The error as a body.
    pub(crate) fn body(&self) -> ErrorBody {
        let body = ErrorBody::new(kind(self.status()), self.code(), self.to_string());
        match self.param() {
            Some(param) => body.with_param(param),
            None => body,
        }
    }
}

/// OpenAI's `type` for a status.
pub(crate) fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    }
}

/// An error body as JSON text.
pub(crate) fn json(body: &ErrorBody) -> Bytes {
    // Strings and options can't fail to serialise; an empty object is still JSON.
    serde_json::to_vec(body).unwrap_or_else(|_| b"{}".to_vec()).into()
}

impl IntoResponse for AnswerError {
    fn into_response(self) -> Response {
        let status = self.status();
        let (body, retry_after) = match self {
            Self::Leg(LegError::Rejected(rejection)) => (rejection.body, rejection.retry_after),
            other => (json(&other.body()), None),
        };
        let retry_after = retry_after
            .or_else(|| (status == StatusCode::SERVICE_UNAVAILABLE).then(|| HeaderValue::from_static("1")));
        let mut response = (status, body).into_response();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(RETRY_AFTER, seconds);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_a_code_a_type_and_a_status() {
        let invalid = AnswerError::invalid("n", "n must be positive");
        assert_eq!(
            serde_json::to_value(invalid.body()).unwrap(),
            serde_json::json!({"error": {"message": "n must be positive", "type": "invalid_request_error",
                "param": "n", "code": "invalid_value"}})
        );
        let unreachable = AnswerError::from(LegError::Unreachable(Role::Decode));
        assert_eq!(unreachable.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(unreachable.body().error.kind, "overloaded_error");
        let response = unreachable.into_response();
        assert_eq!(response.headers()[RETRY_AFTER], "1");
        assert_eq!(AnswerError::from(LegError::NoKv).status(), StatusCode::BAD_GATEWAY);
    }

    #[test]
    fn lone_internal_error_does_not_speak_against_a_worker() {
        assert!(!LegError::Failed(Role::Decode, StatusCode::INTERNAL_SERVER_ERROR).is_workers_fault());
        assert!(LegError::Failed(Role::Decode, StatusCode::BAD_GATEWAY).is_workers_fault());
    }
}
