//! Which headers pass, in each direction. Lists of what passes, not of what doesn't: a header nobody thought of
//! can't tell a client where a worker lives, or a worker who the client is.

use http::header::{
    ACCEPT, AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER,
};

/// The request's id: the client's or ours, on both legs and on the answer.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Asks the decode worker for the transfer's receipt, which comes in `usage.towline_receipt`.
pub(crate) const RECEIPT: HeaderName = HeaderName::from_static("x-towline-receipt");
/// Longest request id taken from a client, bytes; engines copy it into logs and ids.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// From the client to every leg, besides the request id: distributed traces.
const TO_WORKER: [HeaderName; 2] =
    [HeaderName::from_static("traceparent"), HeaderName::from_static("tracestate")];
/// From the worker to the client.
const TO_CLIENT: [HeaderName; 3] = [CONTENT_TYPE, CACHE_CONTROL, RETRY_AFTER];

/// The client's id if it is sane (1 to 128 visible ASCII characters), else a new one.
pub(crate) fn request_id(from_client: &HeaderMap) -> HeaderValue {
    match from_client.get(REQUEST_ID) {
        Some(id) if is_sane(id.as_bytes()) => id.clone(),
        _ => fresh_id(),
    }
}

fn is_sane(id: &[u8]) -> bool {
    (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

fn fresh_id() -> HeaderValue {
    let id = uuid::Uuid::new_v4().to_string();
    HeaderValue::from_str(&id).expect("a UUID is hex digits and dashes")
}

/// Whether a client's credentials go on to workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Credentials {
    Keep,
    Forward,
}

/// The headers of a leg, ours and those of the client's that pass.
pub(crate) fn for_leg(from_client: &HeaderMap, id: &HeaderValue, credentials: Credentials) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
    headers.insert(REQUEST_ID, id.clone());
    copy(from_client, &mut headers, &TO_WORKER);
    if credentials == Credentials::Forward {
        copy(from_client, &mut headers, &[AUTHORIZATION]);
    }
    headers
}

/// The same headers for the leg that writes the tokens: with the wish for a receipt, if the client has it.
pub(crate) fn with_receipt(mut leg: HeaderMap, from_client: &HeaderMap) -> HeaderMap {
    if from_client.get(RECEIPT).is_some_and(|wish| wish == "1") {
        leg.insert(RECEIPT, HeaderValue::from_static("1"));
    }
    leg
}

/// The headers of a worker's answer that pass to the client.
pub(crate) fn for_client(from_worker: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(4);
    copy(from_worker, &mut headers, &TO_CLIENT);
    headers
}

fn copy(from: &HeaderMap, to: &mut HeaderMap, names: &[HeaderName]) {
    for name in names {
        if let Some(value) = from.get(name) {
            to.insert(name, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect()
    }

    #[test]
    fn sane_request_id_is_kept_and_others_are_replaced() {
        let long = "x".repeat(129);
        assert_eq!(request_id(&headers(&[("x-request-id", "abc-1")])), "abc-1");
        for bad in ["", "two words", long.as_str()] {
            let id = request_id(&headers(&[("x-request-id", bad)]));
            assert_eq!(id.len(), 36, "{bad:?} became {id:?}");
        }
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }

    #[test]
    fn only_listed_headers_reach_a_worker() {
        let client = headers(&[("authorization", "Bearer k"), ("cookie", "a"), ("traceparent", "00-1-2-01")]);
        let id = HeaderValue::from_static("i");
        let leg = for_leg(&client, &id, Credentials::Keep);
        assert_eq!(leg.len(), 4);
        assert_eq!(leg["traceparent"], "00-1-2-01");
        assert_eq!(for_leg(&client, &id, Credentials::Forward)["authorization"], "Bearer k");
    }

    #[test]
    fn only_listed_headers_reach_a_client() {
        let worker = headers(&[
            ("content-type", "text/event-stream"),
            ("server", "10.0.0.7"),
            ("location", "http://10.0.0.7/"),
            ("connection", "close"),
            ("x-worker", "10.0.0.7:8000"),
        ]);
        let out = for_client(&worker);
        assert_eq!((out.len(), &out[CONTENT_TYPE]), (1, &HeaderValue::from_static("text/event-stream")));
    }
}
