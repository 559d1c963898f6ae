//! Whole answers, field by field as OpenAI's clients read them, and the other endpoints.

use std::sync::Arc;

use serde_json::{Value, json};
use towline_worker::engine::{EngineError, FinishReason, SubmitError};

use super::client::{Served, request, serve_front};
use super::fakes::{CONTEXT, MODEL, ScriptedEngine, hanging, parts, said, token};

async fn front() -> (Served, Arc<ScriptedEngine>) {
    let engine = Arc::<ScriptedEngine>::default();
    (serve_front(parts(&engine)).await, engine)
}

fn chat() -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
}

fn completion() -> Value {
    json!({"model": MODEL, "prompt": "hello"})
}

/// The answer without what differs each time, which is checked instead.
fn settled(mut answer: Value, prefix: &str) -> Value {
    let fields = answer.as_object_mut().unwrap();
    let id = fields.remove("id").unwrap();
    assert!(id.as_str().unwrap().starts_with(prefix), "{id}");
    assert!(fields.remove("created").unwrap().as_u64().unwrap() > 1_700_000_000);
    answer
}

#[tokio::test]
async fn a_chat_answer_has_openais_fields_and_no_others() {
    let (served, engine) = front().await;
    engine.script(Ok(said(["Hel", "", "lo"], FinishReason::Length)));
    let reply = served.post("/v1/chat/completions", &chat()).await;
    assert_eq!(reply.headers["content-type"], "application/json");
    let expected = json!({
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": null},
            "logprobs": null,
            "finish_reason": "length",
        }],
        "usage": {
            "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    });
    assert_eq!(settled(reply.json(), "chatcmpl-"), expected);
    assert_eq!(engine.alive(), 0);
}

#[tokio::test]
async fn a_completion_has_openais_fields_and_no_others() {
    let (served, _engine) = front().await;
    let reply = served.post("/v1/completions", &completion()).await;
    let expected = json!({
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "Hello", "logprobs": null, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    });
    assert_eq!(settled(reply.json(), "cmpl-"), expected);
}

#[tokio::test]
async fn token_ids_and_logprobs_come_when_asked_for() {
    let (served, _engine) = front().await;
    let mut body = chat();
    body["return_token_ids"] = json!(true);
    body["logprobs"] = json!(true);
    let answer = served.post("/v1/chat/completions", &body).await.json();
    assert_eq!(answer["prompt_token_ids"], json!(b"hello"));
    assert_eq!(answer["choices"][0]["token_ids"], json!([65, 66]));
    let entry =
        |token: &str| json!({"token": token, "logprob": -0.5, "bytes": token.as_bytes(), "top_logprobs": []});
    assert_eq!(answer["choices"][0]["logprobs"], json!({"content": [entry("A"), entry("B")]}));

    let mut body = completion();
    body["return_token_ids"] = json!(true);
    body["logprobs"] = json!(0);
    let answer = served.post("/v1/completions", &body).await.json();
    assert_eq!(
        (&answer["prompt_token_ids"], &answer["choices"][0]["token_ids"]),
        (&json!(b"hello"), &json!([65, 66]))
    );
    let expected = json!({"text_offset": [0, 1], "token_logprobs": [-0.5, -0.5], "tokens": ["A", "B"], "top_logprobs": null});
    assert_eq!(answer["choices"][0]["logprobs"], expected);
}

#[tokio::test]
async fn the_clients_id_names_the_answer() {
    let (served, engine) = front().await;
    let headers = [("x-request-id", "mine-1")];
    let reply = served.send(request("POST", "/v1/completions", &headers, completion().to_string())).await;
    assert_eq!(
        (reply.headers["x-request-id"].to_str().unwrap(), &reply.json()["id"]),
        ("mine-1", &json!("cmpl-mine-1"))
    );
    engine.job(|job| assert!(job.id.starts_with("cmpl-mine-1-"), "{}", job.id));
    let first = engine.job(|job| job.id.clone());
    served.send(request("POST", "/v1/completions", &headers, completion().to_string())).await;
    engine.job(|job| assert_ne!(job.id, first, "a repeated id makes no second lease of one name"));
    let reply = served.send(request("POST", "/v1/completions", &[("x-request-id", "a b")], "{")).await;
    let id = reply.headers["x-request-id"].to_str().unwrap();
    assert!(id.len() == 32 && reply.status == 400, "errors have ids too, and unsafe ones are replaced: {id}");
}

#[tokio::test]
async fn usage_of_a_plain_request_has_a_null_receipt_when_asked() {
    let (served, _engine) = front().await;
    let headers = [("x-towline-receipt", "1")];
    let reply = served.send(request("POST", "/v1/completions", &headers, completion().to_string())).await;
    let usage = &reply.json()["usage"];
    assert_eq!(usage["towline_receipt"], Value::Null);
    assert!(usage.as_object().unwrap().contains_key("towline_receipt"));
    assert_eq!(usage["towline_prompt_tokens_computed"], 3);
}

#[tokio::test]
async fn what_the_engine_refuses_or_loses_has_its_status() {
    let (served, engine) = front().await;
    let refusals = [
        (SubmitError::Busy { waiting: 9 }, 503, "overloaded"),
        (SubmitError::Stopped, 503, "engine_stopped"),
        (SubmitError::PoolTooSmall { needed: 9, total: 3 }, 400, "kv_memory_exceeded"),
        (SubmitError::Loaded { what: "x" }, 500, "internal_error"),
    ];
    for (refusal, status, code) in refusals {
        engine.script(Err(refusal));
        let reply = served.post("/v1/completions", &completion()).await;
        assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (status, code));
        assert_eq!(reply.headers.contains_key("retry-after"), status == 503);
    }
    let failed = || towline_worker::engine::Event::Failed(EngineError::Stopped);
    for (events, stream) in
        [(vec![failed()], true), (vec![failed()], false), (vec![token(65, "a"), failed()], false)]
    {
        engine.script(Ok(hanging(events)));
        let mut body = completion();
        body["stream"] = json!(stream);
        let reply = served.post("/v1/completions", &body).await;
        assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (503, "engine_stopped"));
    }
    engine.script(Ok(Box::pin(futures_util::stream::empty())));
    let reply = served.post("/v1/completions", &completion()).await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (500, "internal_error"));
    assert_eq!(engine.alive(), 0);
}

#[tokio::test]
async fn models_health_and_ready_answer() {
    let (served, _engine) = front().await;
    let models = served.get("/v1/models").await.json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!(MODEL)));
    assert_eq!(models["data"][0]["max_model_len"], CONTEXT);
    assert_eq!(served.get("/v1/models/tiny").await.json()["object"], "model");
    assert_eq!(
        served.get("/v1/models/org/other").await.fault(),
        ("model_not_found".into(), Some("model".into()))
    );
    assert_eq!(served.get("/health").await.status, 200);
    assert_eq!(served.get("/ready").await.json()["role"], "aggregated");
    served.front.drain();
    assert_eq!(
        (served.get("/health").await.status.as_u16(), served.get("/ready").await.status.as_u16()),
        (200, 503)
    );
    let reply = served.post("/v1/completions", &completion()).await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (503, "shutting_down"));
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused_in_openais_shape() {
    let (served, _engine) = front().await;
    let reply = served.get("/v1/embeddings").await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (404, "unknown_endpoint"));
    for (method, path) in [("GET", "/v1/chat/completions"), ("POST", "/health"), ("DELETE", "/v1/models")] {
        let reply = served.send(request(method, path, &[], "")).await;
        assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (405, "method_not_allowed"));
        assert!(reply.headers.contains_key("allow"), "{method} {path}");
    }
}

#[tokio::test]
async fn requests_are_counted_by_how_they_ended() {
    let (served, engine) = front().await;
    served.post("/v1/completions", &completion()).await;
    served.post("/v1/chat/completions", &json!({})).await;
    engine.script(Err(SubmitError::Busy { waiting: 1 }));
    served.post("/v1/completions", &completion()).await;
    let text = served.get("/metrics").await;
    assert!(text.headers["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    for (endpoint, outcome) in
        [("completions", "ok"), ("chat_completions", "client_error"), ("completions", "overloaded")]
    {
        let line = format!("towline_requests_total{{endpoint=\"{endpoint}\",outcome=\"{outcome}\"}}");
        assert_eq!(served.metric(&line).await, Some(1.0), "{}", text.body);
    }
    assert_eq!(served.metric("towline_ttft_seconds_count").await, Some(1.0));
}
