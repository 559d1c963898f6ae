//! Every wrong field, what the client is told about it, and what a right one becomes.

use std::sync::Arc;

use serde_json::{Value, json};

use super::client::{Served, request, serve_front};
use super::fakes::{CONTEXT, MODEL, ScriptedEngine, parts};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

async fn front() -> (Served, Arc<ScriptedEngine>) {
    let engine = Arc::<ScriptedEngine>::default();
    (serve_front(parts(&engine)).await, engine)
}

fn chat(extra: Value) -> Value {
    merged(json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}), extra)
}

fn completion(extra: Value) -> Value {
    merged(json!({"model": MODEL, "prompt": "hello"}), extra)
}

fn merged(mut base: Value, extra: Value) -> Value {
    base.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    base
}

/// Field, value, the param blamed, code, a part of the message.
type Row = (Value, &'static str, &'static str, &'static str);

async fn assert_refused(served: &Served, path: &str, body: &Value, (_, param, code, words): &Row) {
    let reply = served.post(path, body).await;
    assert_eq!(reply.status, 400, "{body} was answered with {}", reply.body);
    assert_eq!(reply.fault(), ((*code).to_owned(), Some((*param).to_owned())), "{body}");
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(words), "{body}: {message:?} lacks {words:?}");
}

#[tokio::test]
async fn every_wrong_field_of_both_endpoints_is_refused_by_name() {
    let (served, engine) = front().await;
    let rows: Vec<Row> = vec![
        (json!({"model": 3}), "model", "invalid_type", "a string, not a whole number"),
        (json!({"model": null}), "model", "missing_required_parameter", "missing"),
        (json!({"max_tokens": 0}), "max_tokens", "invalid_value", "1 or more"),
        (json!({"max_tokens": -4}), "max_tokens", "invalid_value", "-4"),
        (json!({"max_tokens": 2.5}), "max_tokens", "invalid_type", "a whole number, not a fraction"),
        (json!({"max_tokens": "9"}), "max_tokens", "invalid_type", "not a string"),
        (json!({"temperature": -0.1}), "temperature", "invalid_value", "from 0 to 2"),
        (json!({"temperature": 2.1}), "temperature", "invalid_value", "from 0 to 2"),
        (json!({"temperature": "hot"}), "temperature", "invalid_type", "a number"),
        (json!({"top_p": 0}), "top_p", "invalid_value", "above 0"),
        (json!({"top_p": 1.01}), "top_p", "invalid_value", "at most 1"),
        (json!({"n": 2}), "n", "unsupported_parameter", "one choice"),
        (json!({"n": 0}), "n", "unsupported_parameter", "one choice"),
        (json!({"seed": "x"}), "seed", "invalid_type", "a whole number"),
        (json!({"stop": ""}), "stop", "invalid_value", "empty string"),
        (json!({"stop": ["a", ""]}), "stop", "invalid_value", "empty string"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop", "invalid_value", "at most 4"),
        (json!({"stop": 7}), "stop", "invalid_type", "a string or a list of strings"),
        (json!({"stop": ["a", 7]}), "stop", "invalid_type", "a string or a list of strings"),
        (json!({"stop": "x".repeat(257)}), "stop", "invalid_value", "256 bytes"),
        (json!({"stream": "yes"}), "stream", "invalid_type", "true or false"),
        (json!({"stream_options": {}}), "stream_options", "invalid_value", "needs stream"),
        (json!({"stream": true, "stream_options": 1}), "stream_options", "invalid_type", "an object"),
        (
            json!({"stream": true, "stream_options": {"include_usage": 1}}),
            "stream_options.include_usage",
            "invalid_type",
            "true or false",
        ),
        (
            json!({"stream": true, "stream_options": {"colour": true}}),
            "stream_options.colour",
            "unsupported_parameter",
            "include_usage",
        ),
        (json!({"return_token_ids": 1}), "return_token_ids", "invalid_type", "true or false"),
        (json!({"ignore_eos": "no"}), "ignore_eos", "invalid_type", "true or false"),
        (json!({"cache_salt": 1}), "cache_salt", "invalid_type", "a string"),
        (json!({"cache_salt": "s".repeat(257)}), "cache_salt", "invalid_value", "256 bytes"),
        (json!({"logit_bias": {"5": 1}}), "logit_bias", "unsupported_parameter", "biases no tokens"),
        (json!({"frequency_penalty": 0.5}), "frequency_penalty", "unsupported_parameter", "no penalties"),
        (json!({"presence_penalty": -1}), "presence_penalty", "unsupported_parameter", "no penalties"),
        (json!({"top_k": 40}), "top_k", "unsupported_parameter", "temperature and top_p"),
        (json!({"tools": [{"type": "function"}]}), "tools", "unsupported_parameter", "no tools"),
        (
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
            "unsupported_parameter",
            "text only",
        ),
        (json!({"colour": "red"}), "colour", "unknown_parameter", "colour"),
    ];
    for row in &rows {
        assert_refused(&served, CHAT, &chat(row.0.clone()), row).await;
        assert_refused(&served, COMPLETIONS, &completion(row.0.clone()), row).await;
    }
    assert!(engine.jobs.lock().unwrap().is_empty(), "nothing of it reached the engine");
}

#[tokio::test]
async fn every_wrong_message_is_refused_by_its_path() {
    let (served, _engine) = front().await;
    let rows: Vec<Row> = vec![
        (json!(null), "messages", "missing_required_parameter", "missing"),
        (json!("hi"), "messages", "invalid_type", "a list of messages"),
        (json!([]), "messages", "invalid_value", "at least one"),
        (json!(["hi"]), "messages[0]", "invalid_type", "an object"),
        (json!([{"content": "x"}]), "messages[0].role", "invalid_value", "missing"),
        (json!([{"role": 1, "content": "x"}]), "messages[0].role", "invalid_type", "a string"),
        (json!([{"role": "king", "content": "x"}]), "messages[0].role", "invalid_value", "king"),
        (json!([{"role": "tool", "content": "x"}]), "messages[0].role", "invalid_value", "tool"),
        (json!([{"role": "user"}]), "messages[0].content", "invalid_value", "missing"),
        (
            json!([{"role": "user", "content": 1}]),
            "messages[0].content",
            "invalid_type",
            "a string or a list",
        ),
        (
            json!([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[1].content[0].type",
            "unsupported_parameter",
            "text only",
        ),
        (
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            "messages[0].content[0].text",
            "invalid_value",
            "a string",
        ),
        (
            json!([{"role": "user", "content": "a", "tool_calls": [{}]}]),
            "messages[0].tool_calls",
            "unsupported_parameter",
            "text only",
        ),
        (json!([{"role": "assistant", "content": "x"}]), "messages", "invalid_value", "begin with the user"),
        (json!([{"role": "user", "content": ""}]), "messages", "invalid_value", "no tokens"),
    ];
    for row in &rows {
        assert_refused(&served, CHAT, &json!({"model": MODEL, "messages": row.0}), row).await;
    }
    for extra in [json!({"logprobs": 1}), json!({"logprobs": "yes"})] {
        assert_refused(
            &served,
            CHAT,
            &chat(extra.clone()),
            &(extra, "logprobs", "invalid_type", "true or false"),
        )
        .await;
    }
    let extra = json!({"logprobs": true, "top_logprobs": 2});
    let row = (extra.clone(), "top_logprobs", "unsupported_parameter", "chosen token");
    assert_refused(&served, CHAT, &chat(extra), &row).await;
    let extra = json!({"max_completion_tokens": 0});
    assert_refused(
        &served,
        CHAT,
        &chat(extra.clone()),
        &(extra, "max_completion_tokens", "invalid_value", "1 or more"),
    )
    .await;
}

#[tokio::test]
async fn every_wrong_prompt_is_refused() {
    let (served, _engine) = front().await;
    let rows: Vec<Row> = vec![
        (json!(null), "prompt", "missing_required_parameter", "missing"),
        (json!(""), "prompt", "invalid_value", "no tokens"),
        (json!([]), "prompt", "invalid_value", "empty list"),
        (json!([[]]), "prompt", "invalid_value", "empty list"),
        (json!([[[1]]]), "prompt", "invalid_type", "a string or a list of tokens"),
        (json!({"text": 1}), "prompt", "invalid_type", "not an object"),
        (json!([true]), "prompt", "invalid_type", "not a boolean"),
        (json!([1, -1]), "prompt[1]", "invalid_value", "no token"),
        (json!([1, 2, "x"]), "prompt[2]", "invalid_value", "no token"),
        (json!([1.5]), "prompt[0]", "invalid_value", "no token"),
        (json!([1, 256]), "prompt[1]", "invalid_value", "256 tokens"),
        (json!([1, 4_294_967_296_u64]), "prompt[1]", "invalid_value", "no token"),
        (json!(["a", "b"]), "prompt", "unsupported_parameter", "2 entries"),
        (json!([[1], [2]]), "prompt", "unsupported_parameter", "2 entries"),
    ];
    for row in &rows {
        assert_refused(&served, COMPLETIONS, &json!({"model": MODEL, "prompt": row.0}), row).await;
    }
    let extra = json!({"echo": true});
    assert_refused(
        &served,
        COMPLETIONS,
        &completion(extra.clone()),
        &(extra, "echo", "unsupported_parameter", "repeat"),
    )
    .await;
    let extra = json!({"logprobs": 3});
    let row = (extra.clone(), "logprobs", "unsupported_parameter", "chosen token");
    assert_refused(&served, COMPLETIONS, &completion(extra), &row).await;
}

#[tokio::test]
async fn bodies_that_are_no_json_object_are_refused() {
    let (served, _engine) = front().await;
    for body in ["", "{", "[1]", "\"x\"", "nul", "{\"model\": \"tiny\",}", "\u{feff}{}"] {
        let reply = served.send(request("POST", CHAT, &[], body)).await;
        assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (400, "invalid_json"), "{body:?}");
    }
    let reply = served.send(request("POST", CHAT, &[], vec![b'{', b'"', 0xff, b'"', b':', b'1', b'}'])).await;
    assert_eq!(reply.fault().0, "invalid_json");
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let reply = served.send(request("POST", CHAT, &form, chat(json!({})).to_string())).await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (415, "unsupported_content_type"));
    let charset = [("content-type", "Application/JSON; charset=utf-8")];
    let reply = served.send(request("POST", CHAT, &charset, chat(json!({})).to_string())).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
}

#[tokio::test]
async fn an_unknown_model_is_not_found() {
    let (served, _engine) = front().await;
    for path in [CHAT, COMPLETIONS] {
        let body = if path == CHAT {
            chat(json!({"model": "gpt-9"}))
        } else {
            completion(json!({"model": "gpt-9"}))
        };
        let reply = served.post(path, &body).await;
        assert_eq!(reply.status, 404);
        assert_eq!(reply.fault(), ("model_not_found".into(), Some("model".into())));
        assert!(reply.body.contains("gpt-9") && reply.body.contains(MODEL), "{}", reply.body);
    }
}

#[tokio::test]
async fn a_request_that_does_not_fit_the_context_is_told_the_numbers() {
    let (served, engine) = front().await;
    let tokens = |count: usize| json!(vec![1; count]);
    for (prompt, max_tokens, needed) in
        [(CONTEXT, 1, "65"), (60, 5, "65"), (200, 16, "216"), (10, usize::MAX >> 1, "64")]
    {
        let body = completion(json!({"prompt": tokens(prompt), "max_tokens": max_tokens}));
        let reply = served.post(COMPLETIONS, &body).await;
        assert_eq!(
            (reply.status.as_u16(), reply.fault().0.as_str()),
            (400, "context_length_exceeded"),
            "{}",
            reply.body
        );
        assert!(reply.body.contains("64 tokens") && reply.body.contains(needed), "{}", reply.body);
    }
    assert!(engine.jobs.lock().unwrap().is_empty());
    let reply =
        served.post(COMPLETIONS, &completion(json!({"prompt": tokens(CONTEXT - 1), "max_tokens": 1}))).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    let long = chat(json!({"messages": [{"role": "user", "content": "x".repeat(20_000)}]}));
    assert_eq!(
        served.post(CHAT, &long).await.fault(),
        ("context_length_exceeded".into(), Some("messages".into()))
    );
}

#[tokio::test]
async fn a_right_request_becomes_the_job_it_asks_for() {
    let (served, engine) = front().await;
    let body = json!({
        "model": MODEL,
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}], "name": "x"},
        ],
        "max_completion_tokens": 7, "max_tokens": 9, "temperature": 0.25, "top_p": 0.5, "seed": -1,
        "stop": ["\n", "END"], "ignore_eos": true, "cache_salt": "tenant", "logprobs": true,
        // Habits of client libraries, all harmless.
        "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"}, "store": false, "top_logprobs": 0,
        "stream_options": null, "audio": null, "colour": null,
    });
    let reply = served.post(CHAT, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    engine.job(|job| {
        assert_eq!(job.prompt, b"be brief\nhey".map(u32::from));
        assert_eq!((job.max_tokens, job.sampling.temperature, job.sampling.top_p), (7, 0.25, 0.5));
        assert_eq!(
            (job.sampling.seed, job.stop.as_slice()),
            (u64::MAX, ["\n".to_owned(), "END".to_owned()].as_slice())
        );
        assert_eq!(
            (job.ignore_eos, job.salt.as_str(), job.keep_kv, job.logprobs),
            (true, "tenant", false, true)
        );
    });
}

#[tokio::test]
async fn limits_left_out_are_openais_defaults() {
    let (served, engine) = front().await;
    served.post(CHAT, &chat(json!({}))).await;
    engine.job(|job| assert_eq!(job.max_tokens as usize, CONTEXT - 5, "a chat may fill the context"));
    served.post(COMPLETIONS, &completion(json!({}))).await;
    engine.job(|job| {
        assert_eq!((job.max_tokens, job.sampling.temperature, job.sampling.top_p), (16, 1.0, 1.0))
    });
    served.post(COMPLETIONS, &completion(json!({"prompt": vec![1; CONTEXT - 3]}))).await;
    engine.job(|job| assert_eq!(job.max_tokens, 3, "the default shrinks to what fits"));
    let seeds: Vec<u64> = engine.jobs.lock().unwrap().iter().map(|job| job.sampling.seed).collect();
    assert_ne!(seeds[0], seeds[1], "without a seed, chance decides");
}

#[tokio::test]
async fn prompts_come_as_text_tokens_or_a_list_of_one() {
    let (served, engine) = front().await;
    for prompt in [json!("hey"), json!(["hey"]), json!([104, 101, 121]), json!([[104, 101, 121]])] {
        let reply = served.post(COMPLETIONS, &completion(json!({"prompt": prompt}))).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        engine.job(|job| assert_eq!(job.prompt, [104, 101, 121]));
    }
}
