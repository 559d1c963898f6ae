//! Every way a request can fail, and what the client is told: the one place where errors become a status and OpenAI's body.
//!
//! **Why it exists.** Client libraries choose their exception by status and programs choose their reaction by `code`;
//! both stay right only while a single table makes them. Each variant says whose fault it is through its kind and
//! whether to retry through its status (`503` carries `Retry-After`).

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use thiserror::Error;
use towline_wire::openai::{ErrorBody, KV_TRANSFER_FAILED};

use crate::engine::{EngineError, SubmitError};
use crate::handoff::{GrantError, PullError};

/// When an overloaded worker is worth asking again, in seconds: a queue of short requests turns over in about that.
const RETRY_AFTER_S: u32 = 1;

/// Why a request was not answered.
#[derive(Debug, Error)]
pub enum ApiError {
    /// Send a JSON object.
    #[error("the body is not a JSON object: {detail}")]
    Json {
        /// The parser's words.
        detail: String,
    },
    /// Send `Content-Type: application/json`.
    #[error("the body has the content type {found:?}: send application/json")]
    ContentType {
        /// What was declared, cut short.
        found: String,
    },
    /// Send less.
    #[error("the body is longer than {limit} bytes")]
    BodyTooLarge {
        /// The bound in bytes.
        limit: usize,
    },
    /// The client stopped sending.
    #[error("the body did not arrive: {detail}")]
    Body {
        /// What happened.
        detail: String,
    },
    /// Change the field.
    #[error("{message}")]
    Field {
        /// Its name, with the path inside the request: `messages[1].content`.
        param: String,
        /// A stable word: `invalid_value`, `unsupported_parameter`, …
        code: &'static str,
        /// What is wrong and what would be right.
        message: String,
    },
    /// Name the model that `/v1/models` lists.
    #[error("the model {name:?} is not served here; this worker serves {served:?}")]
    UnknownModel {
        /// What was asked for, cut short.
        name: String,
        /// What there is.
        served: String,
    },
    /// Shorten the prompt or ask for fewer tokens.
    #[error(
        "this model's context is {context} tokens, and the request needs {}: {prompt} in the prompt and {completion} to generate",
        prompt.saturating_add(*completion)
    )]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for, at least one.
        completion: usize,
        /// Tokens that fit.
        context: usize,
        /// Where the prompt stands: `prompt` or `messages`.
        param: &'static str,
    },
    /// There is no such path.
    #[error("no such endpoint: {method} {path}")]
    NoEndpoint {
        /// The method.
        method: String,
        /// The path, cut short.
        path: String,
    },
    /// The path takes another method.
    #[error("{path} does not take {method}")]
    Method {
        /// The method.
        method: String,
        /// The path, cut short.
        path: String,
    },
    /// Ask again a little later, or another worker.
    #[error("this worker is full: {detail}")]
    Overloaded {
        /// Which bound was met.
        detail: String,
    },
    /// Ask another worker.
    #[error("this worker is shutting down")]
    Draining,
    /// Ask another worker, and restart this one: its engine died of a bug, which stands in its log.
    #[error("this worker's engine has stopped, and its log says why: restart the worker")]
    EngineStopped,
    /// The KV of the prefill worker could not be used.
    #[error("the KV could not be transferred from prefill ({}): {cause}", cause.code())]
    KvTransfer {
        /// Why.
        cause: PullError,
    },
    /// A bug or a limit of this worker.
    #[error("{detail}")]
    Internal {
        /// What failed.
        detail: String,
    },
}

impl ApiError {
    /// A field with a wrong value.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Field { param: param.into(), code: "invalid_value", message: message.into() }
    }

    /// A field that asks for what this engine does not do.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Field { param: param.into(), code: "unsupported_parameter", message: message.into() }
    }

    /// Status, kind and code: the table.
    fn row(&self) -> (StatusCode, &'static str, &'static str) {
        const INVALID: &str = "invalid_request_error";
        match self {
            Self::Json { .. } => (StatusCode::BAD_REQUEST, INVALID, "invalid_json"),
            Self::ContentType { .. } => {
                (StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, "unsupported_content_type")
            }
            Self::BodyTooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large"),
            Self::Body { .. } => (StatusCode::REQUEST_TIMEOUT, INVALID, "body_incomplete"),
            Self::Field { code, .. } => (StatusCode::BAD_REQUEST, INVALID, code),
            Self::UnknownModel { .. } => (StatusCode::NOT_FOUND, "not_found_error", "model_not_found"),
            Self::ContextLength { .. } => (StatusCode::BAD_REQUEST, INVALID, "context_length_exceeded"),
            Self::NoEndpoint { .. } => (StatusCode::NOT_FOUND, "not_found_error", "unknown_endpoint"),
            Self::Method { .. } => (StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed"),
            Self::Overloaded { .. } => (StatusCode::SERVICE_UNAVAILABLE, "overloaded_error", "overloaded"),
            Self::Draining => (StatusCode::SERVICE_UNAVAILABLE, "overloaded_error", "shutting_down"),
            Self::EngineStopped => (StatusCode::SERVICE_UNAVAILABLE, "server_error", "engine_stopped"),
            Self::KvTransfer { .. } => (StatusCode::BAD_GATEWAY, "server_error", KV_TRANSFER_FAILED),
            Self::Internal { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error"),
        }
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.row().0
    }

    /// The stable word for programs.
    pub fn code(&self) -> &'static str {
        self.row().2
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::Field { param, .. } => Some(param),
            Self::UnknownModel { .. } => Some("model"),
            Self::ContextLength { param, .. } => Some(param),
            _ => None,
        }
    }

    /// OpenAI's body.
    pub fn body(&self) -> ErrorBody {
        let (_, kind, code) = self.row();
        let body = ErrorBody::new(kind, code, self.to_string());
        match self.param() {
            Some(param) => body.with_param(param),
            None => body,
        }
    }
}

impl From<SubmitError> for ApiError {
    /// Prompt, limits and tokens were checked when the request was read; what is left is a matter of room.
    fn from(error: SubmitError) -> Self {
        let detail = error.to_string();
        match error {
            SubmitError::Busy { .. } => Self::Overloaded { detail },
            // A worker that shuts down stops its engine after the last request.
            SubmitError::Stopped => Self::EngineStopped,
            SubmitError::PoolTooSmall { .. } => {
                Self::Field { param: "max_tokens".into(), code: "kv_memory_exceeded", message: detail }
            }
            SubmitError::Loaded { .. } => Self::Internal { detail },
            _ => Self::invalid("prompt", detail),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Stopped => Self::EngineStopped,
            _ => Self::Internal { detail: error.to_string() },
        }
    }
}

impl From<GrantError> for ApiError {
    fn from(error: GrantError) -> Self {
        let detail = error.to_string();
        match error {
            GrantError::Lease(_) => Self::Overloaded { detail },
            _ => Self::Internal { detail },
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if self.status() == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_S));
        }
        response
    }
}

/// `text` up to `bytes` bytes, on a character boundary: what a stranger sent is quoted, not repeated.
pub(super) fn cut(text: &str, bytes: usize) -> &str {
    text.get(..text.floor_char_boundary(bytes)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_503_says_when_to_come_back() {
        let response = ApiError::Overloaded { detail: "x".into() }.into_response();
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        let response = ApiError::Json { detail: "x".into() }.into_response();
        assert!(!response.headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn a_context_error_gives_the_numbers() {
        let error = ApiError::ContextLength { prompt: 90, completion: 20, context: 100, param: "prompt" };
        assert_eq!(error.code(), "context_length_exceeded");
        let message = error.body().error.message;
        for number in ["100", "110", "90", "20"] {
            assert!(message.contains(number), "{message}");
        }
    }

    #[test]
    fn quotes_are_cut_between_characters() {
        assert_eq!((cut("aé", 2), cut("aé", 9), cut("", 3)), ("a", "aé", ""));
    }
}
