//! The front over the real engine and a tiny model.

use std::sync::Arc;

use http_body_util::BodyExt;
use serde_json::{Value, json};
use towline_worker::engine::{Engine, EngineConfig, Forward};
use towline_worker::http::{EngineWithPool, FrontParts, ModelText, Served as Model};
use towline_worker::kernel::Level;
use towline_worker::model::Model as LoadedModel;
use towline_worker::pool::{KvPool, PoolConfig};
use towline_worker::testing::TinyModel;

use super::client::{Served, request, serve_front, until};
use super::fakes::parts;
use crate::handoff::gate::{Gate, Gated};
use crate::support;

async fn front() -> Served {
    front_of(|model| model).await
}

/// With something around the model.
async fn front_of<F: Forward>(around: impl FnOnce(LoadedModel) -> F) -> Served {
    let model = support::load(&TinyModel::default(), 1, Level::best());
    let pool = KvPool::new(support::cache(&model, 16, 80, 0), PoolConfig::default());
    let text = Arc::new(ModelText::new(&model));
    let served = Model { name: "tiny".into(), context: model.config().context, temperature: 0.0, top_p: 1.0 };
    let engine = Engine::start(around(model), pool.clone(), EngineConfig::default()).unwrap();
    let engine = Arc::new(EngineWithPool { engine, pool });
    serve_front(FrontParts { served, text, engine, ..parts(&Arc::default()) }).await
}

fn body(stream: bool, max_tokens: usize) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "The world, and all that is in it: 世界 🌍"}],
        "max_tokens": max_tokens, "stream": stream, "return_token_ids": true, "ignore_eos": true,
        "logprobs": true})
}

#[tokio::test]
async fn streamed_and_whole_answers_are_the_same_tokens_and_text() {
    let served = front().await;
    let whole = served.post("/v1/chat/completions", &body(false, 24)).await.json();
    let ids = whole["choices"][0]["token_ids"].as_array().unwrap();
    assert_eq!((ids.len(), &whole["choices"][0]["finish_reason"]), (24, &json!("length")));
    assert_eq!(whole["choices"][0]["logprobs"]["content"].as_array().unwrap().len(), 24);
    let reply = served.post("/v1/chat/completions", &body(true, 24)).await;
    let chunks: Vec<Value> =
        reply.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], json!(text));
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed, ids);
    let usage = &whole["usage"];
    assert_eq!(json!(whole["prompt_token_ids"].as_array().unwrap().len()), usage["prompt_tokens"]);
    assert!(served.metric("towline_prompt_tokens_computed_total").await.unwrap() > 0.0);
    assert_eq!(served.metric("towline_generated_tokens_total").await, Some(48.0));
}

#[tokio::test]
async fn one_token_is_a_whole_answer() {
    let served = front().await;
    for stream in [false, true] {
        let reply = served.post("/v1/chat/completions", &body(stream, 1)).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert!(reply.body.contains("\"finish_reason\":\"length\""), "{}", reply.body);
    }
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_blocks() {
    let served = front().await;
    let long =
        json!({"model": "tiny", "prompt": "endless", "max_tokens": 1000, "stream": true, "ignore_eos": true});
    let mut response = served.open(request("POST", "/v1/completions", &[], long.to_string())).await;
    response.body_mut().frame().await.unwrap().unwrap();
    drop(response);
    until("the blocks are free", async || {
        served.metric("towline_kv_blocks{state=\"used\"}").await == Some(0.0)
            && served.metric("towline_requests_running").await == Some(0.0)
    })
    .await;
    assert!(served.metric("towline_generated_tokens_total").await.unwrap() < 1000.0, "it was cut short");
}

#[tokio::test]
async fn a_worker_whose_engine_died_is_not_ready_and_says_why() {
    let gate = Arc::<Gate>::default();
    let behind = Arc::clone(&gate);
    let served = front_of(|model| Gated { model, gate: behind }).await;
    assert_eq!(served.get("/ready").await.status, 200);
    gate.break_down();
    // The one that it died of, and one that comes too late.
    for _ in 0..2 {
        let reply = served.post("/v1/chat/completions", &body(false, 4)).await;
        assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (503, "engine_stopped"));
    }
    let reply = served.get("/ready").await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (503, "engine_stopped"));
    assert!(reply.body.contains("its log says why"), "{}", reply.body);
    assert_eq!(served.get("/health").await.status, 200, "the process still answers");
}

#[tokio::test]
async fn a_prompt_that_fits_the_context_but_not_the_pool_is_refused() {
    let model = support::load(&TinyModel::default(), 1, Level::best());
    let pool = KvPool::new(support::cache(&model, 16, 4, 0), PoolConfig::default());
    let text = Arc::new(ModelText::new(&model));
    let served = Model { name: "tiny".into(), context: 1024, temperature: 0.0, top_p: 1.0 };
    let engine = Engine::start(model, pool.clone(), EngineConfig::default()).unwrap();
    let engine = Arc::new(EngineWithPool { engine, pool });
    let served = serve_front(FrontParts { served, text, engine, ..parts(&Arc::default()) }).await;
    let reply = served.post("/v1/completions", &json!({"model": "tiny", "prompt": vec![5; 100]})).await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (400, "kv_memory_exceeded"));
}
