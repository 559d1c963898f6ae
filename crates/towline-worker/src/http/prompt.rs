//! Where a request's prompt comes from: a conversation, a text, or tokens.

use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, wrong_type};
use super::messages::{self, Message};
use super::request::Text;
use super::shape::Endpoint;

/// A prompt as the request gives it.
pub(super) enum Source {
    Text(String),
    Tokens(Vec<u32>),
    Chat(Vec<Message>),
}

/// Takes the prompt out of `fields`.
pub(super) fn take(endpoint: Endpoint, fields: &mut Fields) -> Result<Source, ApiError> {
    match endpoint {
        Endpoint::Chat => {
            let value = fields.require("messages", "a list of messages")?;
            messages::parse(&value).map(Source::Chat)
        }
        Endpoint::Completions => prompt(fields.require("prompt", "a string or a list of tokens")?),
    }
}

/// A string, a list of tokens, or a list with exactly one of these.
fn prompt(value: Value) -> Result<Source, ApiError> {
    const WANTED: &str = "a string or a list of tokens";
    match value {
        Value::String(text) => Ok(Source::Text(text)),
        Value::Array(mut list) => match list.first() {
            None => Err(ApiError::invalid("prompt", "prompt is an empty list: give a string or tokens")),
            Some(Value::Number(_)) => tokens(&list).map(Source::Tokens),
            Some(Value::String(_) | Value::Array(_)) if list.len() > 1 => {
                let message = format!("prompt has {} entries: send a request for each", list.len());
                Err(ApiError::unsupported("prompt", message))
            }
            Some(Value::String(_)) => prompt(list.remove(0)),
            Some(Value::Array(inner)) if inner.first().is_none_or(Value::is_number) => prompt(list.remove(0)),
            Some(other) => Err(wrong_type("prompt", WANTED, other)),
        },
        other => Err(wrong_type("prompt", WANTED, &other)),
    }
}

fn tokens(list: &[Value]) -> Result<Vec<u32>, ApiError> {
    let token = |(index, value): (usize, &Value)| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            let param = format!("prompt[{index}]");
            ApiError::invalid(&param, format!("{param} is no token: give whole numbers from 0"))
        })
    };
    list.iter().enumerate().map(token).collect()
}

impl Source {
    /// Its tokens, at least one, all in the vocabulary.
    pub(super) fn tokens(self, text: &dyn Text) -> Result<Vec<u32>, ApiError> {
        let (param, tokens) = match self {
            Self::Text(prompt) => ("prompt", text.encode(&prompt)),
            Self::Chat(messages) => ("messages", text.encode_chat(&messages)),
            Self::Tokens(tokens) => {
                if let Some(index) = tokens.iter().position(|token| *token as usize >= text.vocab()) {
                    let message = format!(
                        "prompt[{index}] is {}: the vocabulary has {} tokens",
                        tokens[index],
                        text.vocab()
                    );
                    return Err(ApiError::invalid(format!("prompt[{index}]"), message));
                }
                ("prompt", Ok(tokens))
            }
        };
        match tokens {
            Ok(tokens) if tokens.is_empty() => {
                Err(ApiError::invalid(param, format!("{param} gives no tokens")))
            }
            Ok(tokens) => Ok(tokens),
            Err(message) => Err(ApiError::invalid(param, format!("{param}: {message}"))),
        }
    }
}
