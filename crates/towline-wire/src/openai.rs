//! The shape of an error on OpenAI-compatible endpoints: one body for router and workers alike.

use serde::{Deserialize, Serialize};

/// The code of an error that says: this worker is well, but the KV it was sent for did not come. A router must not hold
/// it against the worker that says so.
pub const KV_TRANSFER_FAILED: &str = "kv_transfer_failed";

/// `{"error": {...}}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The one field.
    pub error: ErrorDetail,
}

/// What went wrong, for a person and for a client library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// What, where, and what to do.
    pub message: String,
    /// `invalid_request_error`, `not_found_error`, `server_error`, `overloaded_error`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// The request's field at fault, if one is.
    pub param: Option<String>,
    /// A stable word for programs, for example `context_length_exceeded`.
    pub code: Option<String>,
}

impl ErrorBody {
    /// An error of kind `kind` with a message and a code.
    pub fn new(kind: &str, code: &str, message: impl Into<String>) -> Self {
        Self {
            error: ErrorDetail {
                message: message.into(),
                kind: kind.into(),
                param: None,
                code: (!code.is_empty()).then(|| code.into()),
            },
        }
    }

    /// The same error, naming the request's field.
    #[must_use]
    pub fn with_param(mut self, param: &str) -> Self {
        self.error.param = Some(param.into());
        self
    }
}
