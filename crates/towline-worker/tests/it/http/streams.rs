//! Streams, byte by byte, and token by token as they come.

use std::sync::Arc;

use futures_util::StreamExt;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use towline_worker::engine::{EngineError, Event, FinishReason};

use super::client::{Reply, SOON, Served, request, serve_front, until};
use super::fakes::{MODEL, ScriptedEngine, finished, hanging, parts, said, token};

async fn front() -> (Served, Arc<ScriptedEngine>) {
    let engine = Arc::<ScriptedEngine>::default();
    (serve_front(parts(&engine)).await, engine)
}

fn body(chat: bool, extra: Value) -> Value {
    let mut body = if chat {
        json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": true})
    } else {
        json!({"model": MODEL, "prompt": "hello", "stream": true})
    };
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn streamed(served: &Served, chat: bool, extra: Value, headers: &[(&str, &str)]) -> Reply {
    let path = if chat { "/v1/chat/completions" } else { "/v1/completions" };
    let headers = [headers, &[("x-request-id", "r1")]].concat();
    let reply = served.send(request("POST", path, &headers, body(chat, extra).to_string())).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    reply
}

/// The events with the time of day taken out.
fn settled(reply: &Reply) -> Vec<String> {
    let created = |event: &str| {
        let value: Value = serde_json::from_str(event).unwrap_or_default();
        value["created"].as_u64().map(|seconds| format!("\"created\":{seconds},")).unwrap_or_default()
    };
    reply.events().into_iter().map(|event| event.replacen(&created(event), "", 1)).collect()
}

#[tokio::test]
async fn a_chat_stream_is_openais_to_the_byte() {
    let (served, engine) = front().await;
    engine.script(Ok(said(["Hel", "", "lo \"x\""], FinishReason::Stop)));
    let reply = streamed(&served, true, json!({}), &[]).await;
    let chunk = |choice: &str| {
        format!(
            r#"{{"id":"chatcmpl-r1","object":"chat.completion.chunk","model":"tiny","choices":[{{"index":0,{choice}}}]}}"#
        )
    };
    assert_eq!(
        settled(&reply),
        [
            chunk(r#""delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null"#),
            chunk(r#""delta":{"content":"Hel"},"logprobs":null,"finish_reason":null"#),
            chunk(r#""delta":{"content":"lo \"x\""},"logprobs":null,"finish_reason":null"#),
            chunk(r#""delta":{},"logprobs":null,"finish_reason":"stop""#),
            "[DONE]".into(),
        ]
    );
}

#[tokio::test]
async fn a_completion_stream_with_usage_is_openais_to_the_byte() {
    let (served, engine) = front().await;
    engine.script(Ok(said(["Hel", "lo"], FinishReason::Length)));
    let reply = streamed(&served, false, json!({"stream_options": {"include_usage": true}}), &[]).await;
    let chunk = |choices: &str, usage: &str| {
        format!(
            r#"{{"id":"cmpl-r1","object":"text_completion","model":"tiny","choices":[{choices}],"usage":{usage}}}"#
        )
    };
    let choice = |text: &str, reason: &str| {
        format!(r#"{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{reason}}}"#)
    };
    let usage = r#"{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":2}}"#;
    assert_eq!(
        settled(&reply),
        [
            chunk(&choice("Hel", "null"), "null"),
            chunk(&choice("lo", "null"), "null"),
            chunk(&choice("", "\"length\""), "null"),
            chunk("", usage),
            "[DONE]".into(),
        ]
    );
}

#[tokio::test]
async fn token_ids_stream_with_every_token_and_the_prompts_once() {
    for chat in [true, false] {
        let (served, engine) = front().await;
        engine.script(Ok(said(["Hel", "", "lo"], FinishReason::Stop)));
        let reply = streamed(&served, chat, json!({"return_token_ids": true}), &[]).await;
        let events: Vec<Value> =
            reply.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
        let prompts: Vec<&Value> = events.iter().filter_map(|event| event.get("prompt_token_ids")).collect();
        assert_eq!(
            (prompts, events[0].get("prompt_token_ids")),
            (vec![&json!(b"hello")], Some(&json!(b"hello")))
        );
        let ids = events.iter().filter_map(|event| event["choices"][0]["token_ids"].as_array()).flatten();
        assert_eq!(ids.cloned().collect::<Vec<_>>(), [65, 66, 67], "one for a token without text too");
    }
}

#[tokio::test]
async fn logprobs_stream_with_their_tokens() {
    let (served, _engine) = front().await;
    let reply = streamed(&served, false, json!({"logprobs": 0}), &[]).await;
    let offsets: Vec<Value> = reply.events()[..2]
        .iter()
        .map(|event| {
            serde_json::from_str::<Value>(event).unwrap()["choices"][0]["logprobs"]["text_offset"].clone()
        })
        .collect();
    assert_eq!(offsets, [json!([0]), json!([1])]);
    let reply = streamed(&served, true, json!({"logprobs": true}), &[]).await;
    let chunk: Value = serde_json::from_str(reply.events()[1]).unwrap();
    assert_eq!(chunk["choices"][0]["logprobs"]["content"][0]["token"], "A");
}

#[tokio::test]
async fn a_receipt_asked_for_brings_the_usage_chunk() {
    let (served, _engine) = front().await;
    let reply = streamed(&served, true, json!({}), &[("x-towline-receipt", "1")]).await;
    let events = reply.events();
    let usage: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(
        (&usage["usage"]["towline_receipt"], &usage["usage"]["total_tokens"]),
        (&Value::Null, &json!(7))
    );
    assert_eq!(usage["usage"]["towline_prompt_tokens_computed"], 3);
}

#[tokio::test]
async fn an_answer_without_text_is_still_a_whole_stream() {
    let (served, engine) = front().await;
    engine.script(Ok(said([""], FinishReason::Stop)));
    let reply = streamed(&served, true, json!({}), &[]).await;
    let events = reply.events();
    assert_eq!(events.len(), 3, "{events:?}");
    assert!(events[0].contains("assistant") && events[1].contains("\"finish_reason\":\"stop\""));
}

#[tokio::test]
async fn each_token_is_sent_before_the_next_one_exists() {
    let (served, engine) = front().await;
    let (tell, events) = mpsc::unbounded_channel::<Event>();
    engine.script(Ok(futures_util::stream::unfold(events, |mut events| async move {
        events.recv().await.map(|event| (event, events))
    })
    .boxed()));
    tell.send(token(65, "a")).unwrap();
    let body = body(false, json!({})).to_string();
    let mut response = served.open(request("POST", "/v1/completions", &[], body)).await.into_body();
    for next in ["b", "c"] {
        let frame =
            tokio::time::timeout(SOON, response.frame()).await.expect("the token at once").unwrap().unwrap();
        assert!(frame.data_ref().unwrap().starts_with(b"data: {"));
        tell.send(token(66, next)).unwrap();
    }
    tell.send(finished(FinishReason::Stop, 3, None)).unwrap();
    let rest = tokio::time::timeout(SOON, response.collect()).await.unwrap().unwrap().to_bytes();
    assert!(rest.ends_with(b"data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_failure_after_the_first_token_ends_the_stream_with_the_error() {
    let (served, engine) = front().await;
    engine.script(Ok(hanging(vec![token(65, "a"), Event::Failed(EngineError::Stopped)])));
    let reply = streamed(&served, false, json!({}), &[]).await;
    let events = reply.events();
    let error: Value = serde_json::from_str(events[1]).unwrap();
    assert_eq!((&error["error"]["code"], events[2]), (&json!("engine_stopped"), "[DONE]"));
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_job() {
    let (served, engine) = front().await;
    engine.script(Ok(hanging(vec![token(65, "a")])));
    let mut response =
        served.open(request("POST", "/v1/completions", &[], body(false, json!({})).to_string())).await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(engine.alive(), 1);
    drop(response);
    until("the streamed job is dropped", async || engine.alive() == 0).await;

    // The same before there is any answer, and not streamed.
    engine.script(Ok(hanging(vec![])));
    let whole = request("POST", "/v1/completions", &[], json!({"model": MODEL, "prompt": "x"}).to_string());
    {
        let mut sending = std::pin::pin!(served.open(whole));
        let mut polled = std::pin::pin!(until("the job runs", async || engine.alive() == 1));
        tokio::select! { biased; _ = &mut sending => panic!("no answer was told"), () = &mut polled => {} }
    }
    until("the whole job is dropped", async || engine.alive() == 0).await;
    until("both are counted", async || {
        let line = "towline_requests_total{endpoint=\"completions\",outcome=\"cancelled\"}";
        served.metric(line).await == Some(2.0)
    })
    .await;
}
