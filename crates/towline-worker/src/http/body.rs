//! A request's body, whole: of the right kind, within its bounds, in time.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::Bytes;

use super::error::{ApiError, cut};
use super::front::HttpLimits;

/// Reads all of it.
pub(super) async fn read(limits: &HttpLimits, headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    check_content_type(headers)?;
    let (limit, timeout) = (limits.body_bytes, limits.body_timeout);
    let declared =
        headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| bytes > limit as u64) {
        return Err(ApiError::BodyTooLarge { limit });
    }
    match tokio::time::timeout(timeout, axum::body::to_bytes(body, limit)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if is_too_long(&error) => Err(ApiError::BodyTooLarge { limit }),
        Ok(Err(error)) => Err(ApiError::Body { detail: error.to_string() }),
        Err(_) => Err(ApiError::Body { detail: format!("nothing more within {}", seconds(timeout)) }),
    }
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}

fn is_too_long(error: &axum::Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<http_body_util::LengthLimitError>())
}

/// A browser's form can't declare JSON, so pages of others can't make a visitor's browser use a local worker.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let found = value.to_str().unwrap_or("unreadable");
    let essence = found.split(';').next().unwrap_or_default().trim();
    let is_json = essence.eq_ignore_ascii_case("application/json") || essence.ends_with("+json");
    if is_json { Ok(()) } else { Err(ApiError::ContentType { found: cut(found, 80).into() }) }
}
