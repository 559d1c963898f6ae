//! The options of OpenAI's and vLLM's APIs that this engine does not have, and the values at which that does no harm.
//!
//! **Why it exists.** Client libraries send `n: 1`, `frequency_penalty: 0` and `tools: []` out of habit; those ask for
//! nothing. Any other value would change the answer, so it is refused by name. A table, so that a new option is a line.

use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;

/// An option, when it asks for nothing, and what to do instead.
struct Unsupported {
    name: &'static str,
    harmless: fn(&Value) -> bool,
    hint: &'static str,
}

const fn unless(name: &'static str, harmless: fn(&Value) -> bool, hint: &'static str) -> Unsupported {
    Unsupported { name, harmless, hint }
}

const TOOLS: &str = "this engine calls no tools: describe them in the messages and read the answer";
const PENALTY: &str = "this engine has no penalties: leave it at 0";
const ONE_CHOICE: &str = "this engine gives one choice: send the request again for another";
const FILTERS: &str = "this engine samples by temperature and top_p: leave it out";
const TEXT_ONLY: &str = "this engine answers in text only";
const STORE: &str = "this engine keeps no conversations: leave it out";

/// Refused unless harmless, on both endpoints.
static OPTIONS: &[Unsupported] = &[
    unless("n", is_one, ONE_CHOICE),
    unless("best_of", is_one, ONE_CHOICE),
    unless("use_beam_search", is_false, ONE_CHOICE),
    unless("frequency_penalty", is_zero, PENALTY),
    unless("presence_penalty", is_zero, PENALTY),
    unless("repetition_penalty", is_one, "this engine has no penalties: leave it at 1"),
    unless("logit_bias", is_empty, "this engine biases no tokens: leave it out"),
    unless("top_k", |value| is_zero(value) || value.as_i64() == Some(-1), FILTERS),
    unless("min_p", is_zero, FILTERS),
    unless("min_tokens", is_zero, "this engine has no least length: use ignore_eos"),
    unless("stop_token_ids", is_empty, "this engine stops at strings: use stop"),
    unless("tools", is_empty, TOOLS),
    unless("tool_choice", |value| value == "none" || value == "auto", TOOLS),
    unless("functions", is_empty, TOOLS),
    unless("function_call", |value| value == "none" || value == "auto", TOOLS),
    unless("parallel_tool_calls", Value::is_boolean, TOOLS),
    unless(
        "response_format",
        is_text_format,
        "this engine answers in text only: ask for JSON in the messages",
    ),
    unless("modalities", |value| *value == serde_json::json!(["text"]), TEXT_ONLY),
    unless("audio", |_| false, TEXT_ONLY),
    unless("prediction", |_| false, "this engine takes no predicted output: leave it out"),
    unless("web_search_options", |_| false, "this engine searches nothing: leave it out"),
    unless("store", is_false, STORE),
    unless("echo", is_false, "this engine does not repeat the prompt: prepend it yourself"),
    unless("suffix", |value| value == "", "this engine completes at the end only: leave it out"),
    unless(
        "skip_special_tokens",
        is_true,
        "this engine leaves special tokens out of the text: use return_token_ids",
    ),
    unless("add_generation_prompt", is_true, "this engine always begins the assistant's turn"),
    // What names or bills the caller, or tunes a service, and can't change the answer.
    unless("user", |_| true, ""),
    unless("safety_identifier", |_| true, ""),
    unless("metadata", |_| true, ""),
    unless("service_tier", |_| true, ""),
    unless("prompt_cache_key", |_| true, ""),
    unless("prompt_cache_retention", |_| true, ""),
    unless("priority", is_zero, "this engine serves in order of arrival: leave it out"),
];

/// Takes the options of the table out of `fields`.
pub(super) fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    for option in OPTIONS {
        let Some(value) = fields.take(option.name) else { continue };
        if !(option.harmless)(&value) {
            return Err(ApiError::unsupported(option.name, format!("{}: {}", option.name, option.hint)));
        }
    }
    Ok(())
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

fn is_false(value: &Value) -> bool {
    value.as_bool() == Some(false)
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(serde_json::Map::is_empty)
}

fn is_text_format(value: &Value) -> bool {
    value.get("type").is_some_and(|kind| kind == "text")
}
