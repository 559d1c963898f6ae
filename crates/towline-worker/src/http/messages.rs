//! `messages` of a chat request: what the template will join into a prompt.
//!
//! Text only. Pictures, sounds and tool calls are refused where they stand, by their path in the request.

use serde_json::Value;

use super::error::{ApiError, cut};
use super::fields::wrong_type;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// What was said.
    pub content: String,
}

/// Most messages: a longer conversation does not fit any context, and each costs a step of the template.
const MESSAGES_MAX: usize = 4096;

/// OpenAI's roles, and what the templates of open models call them.
static ROLES: &[(&str, &str)] =
    &[("system", "system"), ("developer", "system"), ("user", "user"), ("assistant", "assistant")];

/// Reads the list.
pub(super) fn parse(value: &Value) -> Result<Vec<Message>, ApiError> {
    let list = value.as_array().ok_or_else(|| wrong_type("messages", "a list of messages", value))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty: give at least one"));
    }
    if list.len() > MESSAGES_MAX {
        let message = format!("messages has {} entries, at most {MESSAGES_MAX} are read", list.len());
        return Err(ApiError::invalid("messages", message));
    }
    list.iter().enumerate().map(|(index, message)| one(&format!("messages[{index}]"), message)).collect()
}

fn one(path: &str, message: &Value) -> Result<Message, ApiError> {
    let object = message.as_object().ok_or_else(|| wrong_type(path, "an object", message))?;
    let present = |name: &str| object.get(name).filter(|value| !value.is_null());
    for name in ["tool_calls", "function_call", "tool_call_id", "audio"] {
        if present(name).is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty())) {
            let param = format!("{path}.{name}");
            return Err(ApiError::unsupported(&param, format!("{param}: this engine reads text only")));
        }
    }
    Ok(Message {
        role: role(&format!("{path}.role"), present("role"))?,
        content: content(&format!("{path}.content"), present("content"))?,
    })
}

fn role(param: &str, value: Option<&Value>) -> Result<&'static str, ApiError> {
    let Some(value) = value else {
        return Err(ApiError::invalid(param, format!("{param} is missing: give system, user or assistant")));
    };
    let name = value.as_str().ok_or_else(|| wrong_type(param, "a string", value))?;
    let known = ROLES.iter().find(|(theirs, _)| *theirs == name);
    known.map(|(_, ours)| *ours).ok_or_else(|| {
        let message = format!("{param} is {:?}: give system, user or assistant", cut(name, 40));
        ApiError::invalid(param, message)
    })
}

fn content(param: &str, value: Option<&Value>) -> Result<String, ApiError> {
    match value {
        None => Err(ApiError::invalid(param, format!("{param} is missing: give a string"))),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => parts
            .iter()
            .enumerate()
            .map(|(index, part)| text_part(&format!("{param}[{index}]"), part))
            .collect(),
        Some(other) => Err(wrong_type(param, "a string or a list of text parts", other)),
    }
}

fn text_part<'a>(path: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("nothing");
    match (kind, part.get("text").and_then(Value::as_str)) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => {
            Err(ApiError::invalid(format!("{path}.text"), format!("{path}.text must be a string")))
        }
        _ => {
            let param = format!("{path}.type");
            let message = format!("{param} is {:?}: this model reads text only", cut(kind, 40));
            Err(ApiError::unsupported(param, message))
        }
    }
}
