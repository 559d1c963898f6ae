//! From a body to an [`Ask`]: everything that can be wrong with a request is found here, before any work is done.
//!
//! **Why it exists.** What follows (pool, engine, handoff) may trust an `Ask`: tokens are in the vocabulary, the request
//! fits the context, limits are positive. Both endpoints share all but where the prompt comes from and how
//! log-probabilities are asked for.

use serde_json::Value;

use super::error::{ApiError, cut};
use super::fields::{Fields, wrong_type};
use super::kv::{self, KvAsk};
use super::messages::Message;
use super::options::refuse_unsupported;
use super::prompt;
use super::shape::Endpoint;

/// Most stop strings, as in OpenAI's API.
const STOPS_MAX: usize = 4;
/// Longest stop string in bytes: text is held back while it may be the beginning of one.
const STOP_BYTES_MAX: usize = 256;
/// Tokens of a completion when the request does not say, as in OpenAI's API.
const COMPLETION_TOKENS_DEFAULT: usize = 16;
/// Longest salt in bytes: it is hashed into every prefix key.
const SALT_BYTES_MAX: usize = 256;

/// Text to tokens and back, as far as the front needs it.
pub trait Text: Send + Sync {
    /// Tokens of a text, special tokens in it read as such.
    ///
    /// # Errors
    /// What is wrong with the text, for the client.
    fn encode(&self, text: &str) -> Result<Vec<u32>, String>;
    /// Tokens of a conversation, with the beginning of the assistant's turn.
    ///
    /// # Errors
    /// Why the model's template refuses it, for the client.
    fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, String>;
    /// One token's text, for log-probabilities; replacement characters where it is part of one.
    fn token(&self, id: u32) -> String;
    /// Tokens in the vocabulary.
    fn vocab(&self) -> usize;
}

/// The model that is served.
#[derive(Clone, Debug, PartialEq)]
pub struct Served {
    /// The name in requests.
    pub name: String,
    /// Most tokens of prompt and answer together.
    pub context: usize,
    /// Temperature of requests that give none.
    pub temperature: f32,
    /// `top_p` of requests that give none.
    pub top_p: f32,
}

/// A request that can be carried out.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ask {
    pub(super) prompt: Vec<u32>,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    pub(super) seed: Option<u64>,
    pub(super) max_tokens: u32,
    pub(super) stop: Vec<String>,
    pub(super) ignore_eos: bool,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) logprobs: bool,
    pub(super) return_token_ids: bool,
    pub(super) salt: String,
    pub(super) kv: KvAsk,
}

/// Reads a request. Takes time in proportion to the body, up to about a second: not for an async thread when long.
pub(super) fn parse(
    endpoint: Endpoint,
    body: &[u8],
    served: &Served,
    text: &dyn Text,
) -> Result<Ask, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&mut fields, served)?;
    refuse_unsupported(&mut fields)?;
    let kv = kv::parse(fields.take(towline_wire::kv_params::KV_TRANSFER_PARAMS))?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = stream_options(&mut fields, stream)?;
    if stream && kv == KvAsk::Keep {
        return Err(ApiError::invalid(
            "stream",
            "a prefill request is not streamed: its answer carries kv_transfer_params",
        ));
    }
    let mut ask = Ask {
        prompt: Vec::new(),
        temperature: ranged(&mut fields, "temperature", served.temperature, "from 0 to 2", |t| {
            (0.0..=2.0).contains(&t)
        })?,
        top_p: ranged(&mut fields, "top_p", served.top_p, "above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?,
        seed: fields.integer("seed")?.map(i64::cast_unsigned),
        max_tokens: 0,
        stop: stop(fields.take("stop"))?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        stream,
        include_usage,
        logprobs: logprobs(endpoint, &mut fields)?,
        return_token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
        salt: salt(&mut fields)?,
        kv,
    };
    let wanted = max_tokens(endpoint, &mut fields)?;
    let source = prompt::take(endpoint, &mut fields)?;
    fields.finish()?;
    ask.prompt = source.tokens(text)?;
    ask.max_tokens = fit(endpoint, &ask, wanted, served.context)?;
    Ok(ask)
}

fn check_model(fields: &mut Fields, served: &Served) -> Result<(), ApiError> {
    let value = fields.require("model", "the name that /v1/models lists")?;
    let name = value.as_str().ok_or_else(|| wrong_type("model", "a string", &value))?;
    if name == served.name {
        return Ok(());
    }
    Err(ApiError::UnknownModel { name: cut(name, 200).into(), served: served.name.clone() })
}

fn stream_options(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(value) = fields.take("stream_options") else { return Ok(false) };
    if !stream {
        return Err(ApiError::invalid("stream_options", "stream_options needs stream: true"));
    }
    let options = value.as_object().ok_or_else(|| wrong_type("stream_options", "an object", &value))?;
    for (name, value) in options {
        let param = format!("stream_options.{}", cut(name, 40));
        match (name.as_str(), value) {
            (_, Value::Null) | ("include_usage" | "include_obfuscation", Value::Bool(_)) => {}
            ("include_usage", other) => return Err(wrong_type(&param, "true or false", other)),
            _ => return Err(ApiError::unsupported(&param, format!("{param}: only include_usage is known"))),
        }
    }
    Ok(options.get("include_usage").and_then(Value::as_bool).unwrap_or(false))
}

/// A number in a range that `f32` holds well enough for sampling.
#[expect(clippy::cast_possible_truncation, reason = "the range was checked; sampling is in f32")]
fn ranged(
    fields: &mut Fields,
    name: &str,
    default: f32,
    range: &str,
    fits: fn(f64) -> bool,
) -> Result<f32, ApiError> {
    match fields.number(name)? {
        None => Ok(default),
        Some(value) if fits(value) && fits(f64::from(value as f32)) => Ok(value as f32),
        Some(value) => Err(ApiError::invalid(name, format!("{name} is {value}: give a number {range}"))),
    }
}

fn stop(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let strings = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(list)) => list
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(text),
                other => Err(wrong_type("stop", "a string or a list of strings", &other)),
            })
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong_type("stop", "a string or a list of strings", &other)),
    };
    let problem = if strings.len() > STOPS_MAX {
        format!("stop has {} strings: give at most {STOPS_MAX}", strings.len())
    } else if strings.iter().any(String::is_empty) {
        "stop has an empty string, which stands everywhere: leave it out".into()
    } else if strings.iter().any(|text| text.len() > STOP_BYTES_MAX) {
        format!("a stop string is longer than {STOP_BYTES_MAX} bytes")
    } else {
        return Ok(strings);
    };
    Err(ApiError::invalid("stop", problem))
}

fn salt(fields: &mut Fields) -> Result<String, ApiError> {
    let salt = fields.string("cache_salt")?.unwrap_or_default();
    if salt.len() <= SALT_BYTES_MAX {
        return Ok(salt);
    }
    Err(ApiError::invalid("cache_salt", format!("cache_salt is longer than {SALT_BYTES_MAX} bytes")))
}

/// Chat asks with a truth value, completions with the number of alternatives; both get the chosen token's.
fn logprobs(endpoint: Endpoint, fields: &mut Fields) -> Result<bool, ApiError> {
    const HINT: &str = "this engine gives the chosen token's log-probability only: ask for 0 alternatives";
    let alternatives = |fields: &mut Fields, name: &str| match fields.integer(name)? {
        Some(count) if count != 0 => Err(ApiError::unsupported(name, format!("{name} is {count}: {HINT}"))),
        given => Ok(given.is_some()),
    };
    match endpoint {
        Endpoint::Completions => alternatives(fields, "logprobs"),
        Endpoint::Chat => {
            alternatives(fields, "top_logprobs")?;
            Ok(fields.boolean("logprobs")?.unwrap_or(false))
        }
    }
}

/// Tokens wanted, if the request says.
fn max_tokens(endpoint: Endpoint, fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let names: &[&'static str] = match endpoint {
        Endpoint::Chat => &["max_completion_tokens", "max_tokens"],
        Endpoint::Completions => &["max_tokens"],
    };
    let mut wanted = None;
    for name in names {
        let Some(count) = fields.integer(name)? else { continue };
        let tokens = usize::try_from(count).ok().filter(|tokens| *tokens > 0);
        let tokens =
            tokens.ok_or_else(|| ApiError::invalid(*name, format!("{name} is {count}: give 1 or more")))?;
        wanted = wanted.or(Some(tokens));
    }
    Ok(wanted)
}

/// Tokens to generate, if prompt and answer fit the context.
fn fit(endpoint: Endpoint, ask: &Ask, wanted: Option<usize>, context: usize) -> Result<u32, ApiError> {
    let prompt = ask.prompt.len();
    let room = context.saturating_sub(prompt);
    let tokens = match (wanted, endpoint) {
        _ if ask.kv == KvAsk::Keep => 1,
        (Some(tokens), _) => tokens,
        (None, Endpoint::Completions) => COMPLETION_TOKENS_DEFAULT.min(room.max(1)),
        (None, Endpoint::Chat) => room.max(1),
    };
    if tokens > room {
        let param = endpoint.prompt_param();
        return Err(ApiError::ContextLength { prompt, completion: tokens, context, param });
    }
    Ok(u32::try_from(tokens).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    struct Bytewise;

    impl Text for Bytewise {
        fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
            Ok(text.bytes().map(u32::from).collect())
        }

        fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, String> {
            self.encode(&messages.iter().map(|message| message.content.as_str()).collect::<String>())
        }

        fn token(&self, id: u32) -> String {
            id.to_string()
        }

        fn vocab(&self) -> usize {
            256
        }
    }

    fn read(endpoint: Endpoint, body: &[u8]) -> Result<Ask, ApiError> {
        let served = Served { name: "m".into(), context: 64, temperature: 1.0, top_p: 1.0 };
        parse(endpoint, body, &served, &Bytewise)
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(|number| json!(number)),
            (0..4i64).prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
            "text|user|type|system|m".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            let name = "role|content|type|text|include_usage|towline|do_remote_prefill|do_remote_decode";
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map(name, inner, 0..4).prop_map(|map| json!(map)),
            ]
        })
    }

    fn body() -> impl Strategy<Value = Value> {
        let name = "prompt|messages|max_tokens|temperature|top_p|stop|stream|stream_options|logprobs|seed|n|tools|\
                    kv_transfer_params|cache_salt|response_format|top_k|colour";
        (prop::collection::hash_map(name, value(), 0..5), any::<bool>()).prop_map(|(fields, right)| {
            let mut body = json!(fields);
            body["model"] = "m".into();
            if right {
                body["prompt"] = "hello".into();
                body["messages"] = json!([{"role": "user", "content": "hello"}]);
            }
            body
        })
    }

    proptest! {
        /// Whatever comes, it is an error of the client's, or a request that can be carried out.
        #[test]
        fn any_object_is_refused_or_can_be_carried_out(body in body(), chat in any::<bool>()) {
            let endpoint = if chat { Endpoint::Chat } else { Endpoint::Completions };
            match read(endpoint, body.to_string().as_bytes()) {
                Err(error) => prop_assert!(error.status().is_client_error(), "{error}"),
                Ok(ask) => {
                    prop_assert!(!ask.prompt.is_empty() && ask.prompt.iter().all(|token| *token < 256));
                    prop_assert!(ask.max_tokens >= 1 && ask.prompt.len() + ask.max_tokens as usize <= 64);
                    prop_assert!((0.0..=2.0).contains(&ask.temperature) && ask.top_p > 0.0 && ask.top_p <= 1.0);
                    prop_assert!(ask.stop.len() <= STOPS_MAX && ask.stop.iter().all(|stop| !stop.is_empty()));
                    prop_assert!(!(ask.stream && ask.kv == KvAsk::Keep));
                }
            }
        }

        /// Bytes that are no JSON are an error, not a crash.
        #[test]
        fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert!(read(Endpoint::Chat, &bytes).is_err());
        }
    }
}
