//! The client's body: parsed, its few shared fields checked, and what no client may say taken out.
//!
//! Deep validation is the workers'; here lies what the router itself depends on, and what costs a worker's time
//! to refuse. Dropped are the fields by which routers and engines talk about KV: a client that sends them can
//! make a decode worker connect anywhere, or kill it (measured on vLLM 0.32).

use std::num::NonZeroU64;

use crate::choose::Shape;
use crate::error::AnswerError;
use crate::fields::{Fields, element_count};

/// Fields by which a client could pose as a router, at the top of a body or inside `vllm_xargs` (which vLLM
/// merges into the same place).
pub(crate) const FORBIDDEN: [&str; 6] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
];

/// Which endpoint a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
}

impl Endpoint {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// The word for the `endpoint` label.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
        }
    }
}

/// How the client wants its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// One JSON object.
    Whole,
    /// Server-sent events.
    Stream,
}

/// A request fit to be sent on.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: String,
    pub(crate) delivery: Delivery,
    pub(crate) shape: Shape,
    /// The client's body, less [`FORBIDDEN`].
    pub(crate) fields: Fields,
    /// Which forbidden fields were found.
    pub(crate) dropped: Vec<&'static str>,
}

impl Request {
    /// Parses and checks a body.
    pub(crate) fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Self, AnswerError> {
        let mut fields = object(body)?;
        let dropped = drop_forbidden(&mut fields);
        let model = model(&fields)?;
        let delivery = delivery(&fields)?;
        check_numbers(endpoint, &fields)?;
        let shape = match endpoint {
            Endpoint::Completions if prompt_count(fields.text("prompt")) > 1 => Shape::OneWorker,
            _ => Shape::Any,
        };
        Ok(Self { endpoint, model, delivery, shape, fields, dropped })
    }
}

fn object(body: &[u8]) -> Result<Fields, AnswerError> {
    serde_json::from_slice(body).map_err(|error| AnswerError::Invalid {
        message: format!("the request body must be a JSON object: {error}"),
        param: None,
        code: "invalid_json",
    })
}

fn drop_forbidden(fields: &mut Fields) -> Vec<&'static str> {
    let mut dropped: Vec<_> = FORBIDDEN.into_iter().filter(|name| fields.remove(name)).collect();
    if let Some(Ok(mut extra)) = fields.text("vllm_xargs").map(serde_json::from_str::<Fields>) {
        let nested: Vec<_> = FORBIDDEN.into_iter().filter(|name| extra.remove(name)).collect();
        if !nested.is_empty() {
            // What can't be written again, which doesn't happen, must not pass either.
            match serde_json::value::to_raw_value(&extra) {
                Ok(rest) => fields.set("vllm_xargs", rest),
                Err(_) => _ = fields.remove("vllm_xargs"),
            }
            dropped.extend(nested.into_iter().filter(|name| !dropped.contains(name)).collect::<Vec<_>>());
        }
    }
    dropped
}

fn model(fields: &Fields) -> Result<String, AnswerError> {
    match fields.text("model").map(serde_json::from_str::<String>) {
        Some(Ok(model)) if !model.is_empty() => Ok(model),
        _ => Err(AnswerError::invalid("model", "you must provide a model parameter, a non-empty string")),
    }
}

fn delivery(fields: &Fields) -> Result<Delivery, AnswerError> {
    match fields.text("stream") {
        None | Some("false") => Ok(Delivery::Whole),
        Some("true") => Ok(Delivery::Stream),
        Some(_) => Err(AnswerError::invalid("stream", "stream must be true or false")),
    }
}

fn check_numbers(endpoint: Endpoint, fields: &Fields) -> Result<(), AnswerError> {
    positive(fields, "max_tokens")?;
    positive(fields, "n")?;
    if endpoint == Endpoint::Chat {
        positive(fields, "max_completion_tokens")?;
    }
    number(fields, "temperature")?;
    number(fields, "top_p")
}

fn positive(fields: &Fields, name: &'static str) -> Result<(), AnswerError> {
    match fields.text(name).map(serde_json::from_str::<NonZeroU64>) {
        None | Some(Ok(_)) => Ok(()),
        Some(Err(_)) => Err(AnswerError::invalid(name, format!("{name} must be an integer of at least 1"))),
    }
}

fn number(fields: &Fields, name: &'static str) -> Result<(), AnswerError> {
    match fields.text(name).map(serde_json::from_str::<f64>) {
        None | Some(Ok(_)) => Ok(()),
        Some(Err(_)) => Err(AnswerError::invalid(name, format!("{name} must be a number"))),
    }
}

/// Prompts in a `/v1/completions` body: a string or a list of token ids is one, a list of those several. A
/// prefill answer names the KV of one prompt only, so several can't share two legs.
fn prompt_count(prompt: Option<&str>) -> usize {
    let first = prompt.and_then(|text| text.strip_prefix('[')).map(str::trim_start);
    match (prompt, first) {
        (Some(list), Some(first)) if first.starts_with(['"', '[']) => element_count(list).unwrap_or(1),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(endpoint: Endpoint, body: &Value) -> Result<Request, AnswerError> {
        Request::parse(endpoint, body.to_string().as_bytes())
    }

    fn fault(endpoint: Endpoint, body: &Value) -> (u16, Option<String>, Option<String>) {
        let error = parse(endpoint, body).unwrap_err();
        let detail = error.body().error;
        (error.status().as_u16(), detail.param, detail.code)
    }

    #[test]
    fn forbidden_fields_are_dropped_and_named_and_the_rest_keeps_its_order() {
        let body = r#"{"z":1,"model":"m","kv_transfer_params":{"do_remote_prefill":true},"bootstrap_\u0072oom":1,
            "vllm_xargs":{"kv_transfer_params":"x","keep":1.0,"bootstrap_host":2},"a":0.10}"#;
        let request = Request::parse(Endpoint::Chat, body.as_bytes()).unwrap();
        assert_eq!(request.dropped, ["kv_transfer_params", "bootstrap_room", "bootstrap_host"]);
        assert_eq!(
            serde_json::to_string(&request.fields).unwrap(),
            r#"{"z":1,"model":"m","vllm_xargs":{"keep":1.0},"a":0.10}"#
        );
    }

    #[test]
    fn body_must_be_a_json_object() {
        for body in [&b"[]"[..], b"1", b"", b"{", b"{\"model\":\"\xff\"}", b"null"] {
            let error = Request::parse(Endpoint::Chat, body).unwrap_err();
            assert_eq!(error.status().as_u16(), 400, "{body:?}");
        }
        let deep = "[".repeat(100_000);
        assert!(Request::parse(Endpoint::Chat, deep.as_bytes()).is_err());
    }

    #[test]
    fn faults_name_their_field() {
        let chat = |extra: (&str, Value)| {
            let mut body = json!({"model": "m"});
            body[extra.0] = extra.1;
            fault(Endpoint::Chat, &body)
        };
        for (name, value) in [
            ("max_tokens", json!(0)),
            ("max_tokens", json!(-1)),
            ("max_tokens", json!(1.5)),
            ("max_completion_tokens", json!("7")),
            ("n", json!(0)),
            ("temperature", json!("hot")),
            ("top_p", json!([])),
            ("stream", json!("yes")),
            ("model", json!("")),
            ("model", json!(3)),
        ] {
            let expected = (400, Some(name.to_owned()), Some("invalid_value".to_owned()));
            assert_eq!(chat((name, value.clone())), expected, "{name}={value}");
        }
        assert_eq!(fault(Endpoint::Completions, &json!({"prompt": "x"})).1.as_deref(), Some("model"));
    }

    #[test]
    fn nulls_are_absent() {
        let body = json!({"model": "m", "max_tokens": null, "n": null, "temperature": null, "stream": null});
        assert_eq!(parse(Endpoint::Chat, &body).unwrap().delivery, Delivery::Whole);
    }

    #[test]
    fn several_prompts_need_one_worker() {
        let shape = |prompt: Value| {
            parse(Endpoint::Completions, &json!({"model": "m", "prompt": prompt})).unwrap().shape
        };
        assert_eq!(shape(json!("one")), Shape::Any);
        assert_eq!(shape(json!(["one"])), Shape::Any);
        assert_eq!(shape(json!([1, 2, 3])), Shape::Any);
        assert_eq!(shape(json!([[1, 2, 3]])), Shape::Any);
        assert_eq!(shape(json!(["one", "two"])), Shape::OneWorker);
        assert_eq!(shape(json!([[1], [2]])), Shape::OneWorker);
    }
}
