//! Prefill and decode legs, with a wire that can fail in every way.

use std::sync::Arc;

use serde_json::{Value, json};
use towline_wire::handoff::HandoffError;
use towline_wire::ticket::TicketError;
use towline_worker::engine::{FinishReason, Start};
use towline_worker::handoff::PullError;
use towline_worker::http::{FrontParts, OnKvFailure, Role};

use super::client::{Served, request, serve_front, until};
use super::fakes::{
    MODEL, ScriptedEngine, ScriptedHandoff, Wire, finished, kept, parts, parts_with, receipt, remote_kv,
    token,
};

struct Fixture {
    served: Served,
    engine: Arc<ScriptedEngine>,
    handoff: Arc<ScriptedHandoff>,
}

async fn fixture(role: Role, on_kv_failure: OnKvFailure, handoff: ScriptedHandoff) -> Fixture {
    let (engine, handoff) = (Arc::<ScriptedEngine>::default(), Arc::new(handoff));
    let parts = FrontParts { on_kv_failure, ..parts_with(&engine, role, &handoff) };
    Fixture { served: serve_front(parts).await, engine, handoff }
}

async fn decode(on_kv_failure: OnKvFailure) -> Fixture {
    fixture(Role::Decode, on_kv_failure, ScriptedHandoff::new()).await
}

async fn prefill() -> Fixture {
    fixture(Role::Prefill, OnKvFailure::Fail, ScriptedHandoff::new()).await
}

fn with(params: &Value, extra: Value) -> Value {
    let mut body = json!({"model": MODEL, "prompt": "hello", "kv_transfer_params": params});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn ask() -> Value {
    // As vLLM's routers write it.
    json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null})
}

fn offer() -> Value {
    serde_json::to_value(remote_kv()).unwrap()
}

#[tokio::test]
async fn a_prefill_leg_gives_one_token_and_the_parameters() {
    let Fixture { served, engine, handoff } = prefill().await;
    let keeps = || {
        Ok(Box::pin(futures_util::stream::iter([
            token(65, "H"),
            finished(FinishReason::Length, 1, Some(kept(&handoff.pool))),
        ])) as towline_worker::http::Events)
    };
    engine.script(keeps());
    let reply = served.post("/v1/completions", &with(&ask(), json!({"max_tokens": 50}))).await;
    let answer = reply.json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]),
        (&json!("H"), &json!("length"))
    );
    engine.job(|job| assert_eq!((job.keep_kv, job.max_tokens), (true, 1)));
    let job = engine.job(|job| job.id.clone());
    assert_eq!(*handoff.grants.lock().unwrap(), [(job.clone(), b"hello".map(u32::from).to_vec(), 2)]);
    let params = &answer["kv_transfer_params"];
    assert_eq!((&params["do_remote_prefill"], &params["remote_request_id"]), (&json!(true), &json!(job)));
    assert!(params["towline"]["seal"].is_string());
    assert!(answer.get("prompt_token_ids").is_none(), "kept for the grant, not asked for in the answer");

    engine.script(keeps());
    let chat = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "kv_transfer_params": ask(),
        "max_completion_tokens": 1, "stream": false});
    let answer = served.post("/v1/chat/completions", &chat).await.json();
    assert_eq!(answer["kv_transfer_params"]["do_remote_prefill"], true);
    assert_eq!(handoff.pool.stats().used, 0, "the scripted grant keeps nothing");
}

#[tokio::test]
async fn a_prefill_leg_is_not_streamed_and_needs_a_free_lease() {
    let Fixture { served, .. } = prefill().await;
    let reply = served.post("/v1/completions", &with(&ask(), json!({"stream": true}))).await;
    assert_eq!(
        (reply.status.as_u16(), reply.fault()),
        (400, ("invalid_value".into(), Some("stream".into())))
    );

    let handoff = ScriptedHandoff { refuse_grants: true, ..ScriptedHandoff::new() };
    let Fixture { served, engine, handoff } = fixture(Role::Prefill, OnKvFailure::Fail, handoff).await;
    let events = [token(65, "H"), finished(FinishReason::Length, 1, Some(kept(&handoff.pool)))];
    engine.script(Ok(Box::pin(futures_util::stream::iter(events))));
    let reply = served.post("/v1/completions", &with(&ask(), json!({}))).await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (503, "overloaded"));
    assert_eq!(handoff.pool.stats().used, 0, "the KV went back");
}

#[tokio::test]
async fn a_decode_leg_pulls_and_goes_on_from_there() {
    let Fixture { served, engine, handoff } = decode(OnKvFailure::Fail).await;
    let body = with(&offer(), json!({"cache_salt": "t", "max_tokens": 9}));
    let reply = served
        .send(request("POST", "/v1/completions", &[("x-towline-receipt", "1")], body.to_string()))
        .await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(*handoff.pulls.lock().unwrap(), [(b"hello".map(u32::from).to_vec(), "t".to_owned())]);
    engine.job(|job| {
        assert!(
            matches!(&job.start, Start::Loaded { blocks, tokens: 4 } if blocks.len() == 1),
            "{:?}",
            job.start
        );
        assert_eq!((job.max_tokens, job.keep_kv), (9, false));
    });
    let answer = reply.json();
    assert!(answer.get("kv_transfer_params").is_none());
    assert_eq!(answer["usage"]["towline_receipt"], serde_json::to_value(receipt()).unwrap());
    assert_eq!(
        served.metric("towline_kv_transfer_bytes_total{transport=\"shm\",direction=\"in\"}").await,
        Some(4096.0)
    );
    assert_eq!(
        served.metric("towline_kv_transfers_total{transport=\"shm\",outcome=\"ok\"}").await,
        Some(1.0)
    );
    assert_eq!(served.metric("towline_leases_ended_total{cause=\"expired\"}").await, Some(4.0));

    let reply = served.post("/v1/completions", &with(&offer(), json!({"stream": true}))).await;
    assert!(reply.events().len() == 4 && !reply.body.contains("towline_receipt"), "{}", reply.body);
}

#[tokio::test]
async fn a_failed_pull_fails_the_request_and_says_why() {
    let Fixture { served, engine, handoff } = decode(OnKvFailure::Fail).await;
    let failures = [
        (HandoffError::PeerRestarted, "peer_restarted"),
        (HandoffError::LeaseOver, "expired"),
        (HandoffError::Unreachable { detail: "connection refused".into() }, "unreachable"),
        (HandoffError::Incompatible { field: "weights", detail: "a, b".into() }, "incompatible"),
    ];
    for (error, word) in failures {
        handoff.next(Wire::Fails(error.clone().into()));
        for stream in [false, true] {
            if stream {
                handoff.next(Wire::Fails(error.clone().into()));
            }
            let reply = served.post("/v1/completions", &with(&offer(), json!({"stream": stream}))).await;
            assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (502, "kv_transfer_failed"));
            let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.contains(word) && message.contains(&error.to_string()), "{message}");
        }
    }
    assert!(engine.jobs.lock().unwrap().is_empty());
    let line = "towline_kv_transfers_total{transport=\"none\",outcome=\"peer_restarted\"}";
    assert_eq!(served.metric(line).await, Some(2.0));
    assert_eq!(served.get("/health").await.status, 200);
}

#[tokio::test]
async fn recompute_answers_without_the_kv() {
    let Fixture { served, engine, handoff } = decode(OnKvFailure::Recompute).await;
    handoff.next(Wire::Fails(HandoffError::PeerRestarted.into()));
    let body = with(&offer(), json!({})).to_string();
    let reply = served.send(request("POST", "/v1/completions", &[("x-towline-receipt", "1")], body)).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    engine.job(|job| assert!(matches!(job.start, Start::Fresh)));
    let usage = &reply.json()["usage"];
    assert!(usage.as_object().unwrap().contains_key("towline_receipt") && usage["towline_receipt"].is_null());
    let line = "towline_kv_transfers_total{transport=\"none\",outcome=\"peer_restarted\"}";
    assert_eq!(served.metric(line).await, Some(1.0));
}

#[tokio::test]
async fn parameters_that_no_prefill_worker_sealed_are_refused_under_either_policy() {
    for policy in [OnKvFailure::Fail, OnKvFailure::Recompute] {
        let Fixture { served, engine, handoff } = decode(policy).await;
        for (field, value) in [("towline", Value::Null), ("remote_host", json!("evil.example"))] {
            let mut params = offer();
            params[field] = value;
            if field == "remote_host" {
                params.as_object_mut().unwrap().remove("towline");
            }
            let reply = served.post("/v1/completions", &with(&params, json!({}))).await;
            assert_eq!(reply.status, 400);
            let blamed = Some("kv_transfer_params.towline".into());
            assert_eq!(reply.fault(), ("unsigned_kv_transfer_params".into(), blamed));
            assert!(reply.body.contains("seals"), "{}", reply.body);
        }
        // What vLLM died of.
        let bare = json!({"do_remote_prefill": true, "remote_block_ids": [[1]]});
        let reply = served.post("/v1/completions", &with(&bare, json!({}))).await;
        assert_eq!(reply.fault().0, "unsigned_kv_transfer_params");
        handoff.next(Wire::Fails(PullError::Ticket(TicketError::Seal)));
        assert!(handoff.pulls.lock().unwrap().is_empty());
        let reply = served.post("/v1/completions", &with(&offer(), json!({}))).await;
        assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (400, "invalid_kv_transfer_params"));
        assert!(engine.jobs.lock().unwrap().is_empty());
    }
}

#[tokio::test]
async fn malformed_parameters_are_refused_where_they_are_wrong() {
    let Fixture { served, .. } = decode(OnKvFailure::Fail).await;
    let mut push = offer();
    push["transfer_mode"] = json!("push");
    let mut cut = offer();
    cut["towline"].as_object_mut().unwrap().remove("ranks");
    let rows = [
        (json!(7), "invalid_type"),
        (json!([]), "invalid_type"),
        (json!({"do_remote_prefill": "yes"}), "invalid_type"),
        (json!({"do_remote_prefill": true, "do_remote_decode": true}), "invalid_kv_transfer_params"),
        (json!({"do_remote_prefill": true, "towline": {}}), "invalid_kv_transfer_params"),
        (json!({"do_remote_prefill": true, "towline": 3}), "invalid_kv_transfer_params"),
        (push, "invalid_kv_transfer_params"),
        (cut, "invalid_kv_transfer_params"),
    ];
    for (params, code) in rows {
        let reply = served.post("/v1/completions", &with(&params, json!({}))).await;
        assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (400, code), "{params}");
        assert!(reply.fault().1.unwrap().starts_with("kv_transfer_params"));
    }
}

#[tokio::test]
async fn a_leg_for_another_role_is_refused_and_plain_requests_are_not() {
    let plain = json!({"do_remote_decode": false, "do_remote_prefill": false});
    let roles = [(Role::Prefill, offer(), "prefill"), (Role::Decode, ask(), "decode")];
    for (role, wrong, name) in roles {
        let Fixture { served, handoff, .. } =
            fixture(role, OnKvFailure::Recompute, ScriptedHandoff::new()).await;
        let reply = served.post("/v1/completions", &with(&wrong, json!({}))).await;
        assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (400, "wrong_worker_role"));
        assert!(reply.body.contains(&format!("role is {name}")), "{}", reply.body);
        assert!(handoff.pulls.lock().unwrap().is_empty());
        for params in [&plain, &Value::Null] {
            assert_eq!(served.post("/v1/completions", &with(params, json!({}))).await.status, 200);
        }
    }
    let served = serve_front(parts(&Arc::default())).await;
    for params in [ask(), offer()] {
        let reply = served.post("/v1/completions", &with(&params, json!({}))).await;
        assert_eq!(reply.fault().0, "wrong_worker_role");
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_the_pull() {
    let Fixture { served, engine, handoff } = decode(OnKvFailure::Fail).await;
    handoff.next(Wire::Hangs);
    let pulling = || handoff.pulling.load(std::sync::atomic::Ordering::SeqCst);
    {
        let body = with(&offer(), json!({"stream": true})).to_string();
        let mut sending = std::pin::pin!(served.open(request("POST", "/v1/completions", &[], body)));
        let mut begun = std::pin::pin!(until("the pull begins", async || pulling() == 1));
        tokio::select! { biased; _ = &mut sending => panic!("the pull hangs"), () = &mut begun => {} }
    }
    until("the pull is dropped", async || pulling() == 0).await;
    assert!(engine.jobs.lock().unwrap().is_empty());
}
