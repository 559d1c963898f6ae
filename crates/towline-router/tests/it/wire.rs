//! What each leg carries, field by field, as vLLM's connector wants it.

use http::HeaderName;
use serde_json::json;

use crate::deployment::{Answer, CHAT, COMPLETIONS, Deployment, pairs, unprobed, urls};
use crate::mock::{KV, Mock};
use towline_router::Config;

#[tokio::test]
async fn chat_goes_through_two_legs() {
    let (mut prefill, mut decode) = (Mock::prefill().await, Mock::decode().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let body = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":16,"max_completion_tokens":16,"temperature":0.7,"n":1,"logprobs":true,"top_logprobs":2,"min_tokens":2,"stream":true,"stream_options":{"include_usage":true},"seed":7}"#;
    let answer = router.post(CHAT, body).await;

    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(answer.text, "data: {\"n\":1}\n\ndata: {\"n\":2}\n\ndata: [DONE]\n\n");
    let first = prefill.next().await;
    assert_eq!(first.path, CHAT);
    assert_eq!(
        first.json(),
        json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1,
            "max_completion_tokens": 1, "temperature": 0.7, "stream": false, "seed": 7,
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}})
    );
    let second = decode.next().await;
    assert_eq!(second.path, CHAT);
    let expected = format!("{},\"kv_transfer_params\":{KV}}}", body.strip_suffix('}').unwrap());
    assert_eq!(second.body, expected, "the client's bytes and the parameters', untouched");
}

#[tokio::test]
async fn completions_go_through_two_legs() {
    let (mut prefill, mut decode) = (Mock::prefill().await, Mock::decode().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let body = r#"{"model":"m","prompt":"hello","max_tokens":8,"echo":true,"best_of":2,"logprobs":1,"prompt_logprobs":1}"#;
    let answer = router.post(COMPLETIONS, body).await;

    assert_eq!((answer.status.as_u16(), &answer.json()["id"]), (200, &json!("y")));
    let first = prefill.next().await;
    assert_eq!(first.path, COMPLETIONS);
    assert_eq!(
        first.json(),
        json!({"model": "m", "prompt": "hello", "max_tokens": 1, "stream": false,
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}})
    );
    let expected = format!("{},\"kv_transfer_params\":{KV}}}", body.strip_suffix('}').unwrap());
    assert_eq!(decode.next().await.body, expected);
}

#[tokio::test]
async fn clients_transfer_parameters_never_reach_a_worker() {
    let (mut prefill, mut decode) = (Mock::prefill().await, Mock::decode().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let evil = json!({"model": "m", "messages": [], "ec_transfer_params": {"a": 1}, "bootstrap_host": "evil",
        "bootstrap_port": 1, "bootstrap_room": 2, "disaggregated_params": {},
        "vllm_xargs": {"kv_transfer_params": {"remote_host": "evil"}},
        "kv_transfer_params": {"do_remote_prefill": true, "remote_host": "evil", "remote_block_ids": [[1]]}});
    assert_eq!(router.post(CHAT, evil.to_string()).await.status, 200);
    for seen in [prefill.next().await, decode.next().await] {
        let text = String::from_utf8(seen.body.to_vec()).unwrap();
        for word in ["evil", "ec_transfer", "bootstrap", "disaggregated"] {
            assert!(!text.contains(word), "{word} in {text}");
        }
    }
    router.metric(r#"towline_router_client_fields_dropped_total{field="kv_transfer_params"} 1"#).await;
    router.metric(r#"towline_router_client_fields_dropped_total{field="bootstrap_room"} 1"#).await;
}

#[tokio::test]
async fn aggregated_workers_get_no_transfer_parameters_either() {
    let mut worker = Mock::decode().await;
    let config = Config { aggregated: urls(&[worker.address]), ..Config::default() };
    let router = Deployment::start(config).await;
    let evil = r#"{"model":"m","kv_transfer_params":{"do_remote_prefill":true},"prompt":["a","b"]}"#;
    assert_eq!(router.post(COMPLETIONS, evil).await.status, 200);
    assert_eq!(worker.next().await.body, r#"{"model":"m","prompt":["a","b"]}"#);
    assert_eq!(worker.waiting(), 0, "one leg");
}

#[tokio::test]
async fn aggregated_worker_stands_in_when_no_pair_is_whole() {
    let (mut worker, prefill) = (Mock::decode().await, Mock::prefill().await);
    let config = Config {
        prefill: urls(&[prefill.address]),
        aggregated: urls(&[worker.address]),
        ..Config::default()
    };
    let router = Deployment::start(config).await;
    assert_eq!(router.post(CHAT, r#"{"model":"m"}"#).await.status, 200);
    worker.next().await;
    assert_eq!(prefill.waiting(), 0);
}

#[tokio::test]
async fn request_id_is_the_clients_or_ours_on_both_legs_and_the_answer() {
    let (mut prefill, mut decode) = (Mock::prefill().await, Mock::decode().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let body = r#"{"model":"m"}"#;

    let request = router.to("POST", CHAT).header("x-request-id", "mine-1");
    let answer = Answer::of(router.send(request, body).await).await;
    for headers in [&answer.headers, &prefill.next().await.headers, &decode.next().await.headers] {
        assert_eq!(headers["x-request-id"], "mine-1");
    }
    for bad in ["a b".to_owned(), "x".repeat(129)] {
        let request = router.to("POST", CHAT).header("x-request-id", &bad);
        let answer = Answer::of(router.send(request, body).await).await;
        let id = &answer.headers["x-request-id"];
        assert_ne!(id.to_str().unwrap(), bad);
        assert_eq!(prefill.next().await.headers["x-request-id"], id);
        assert_eq!(decode.next().await.headers["x-request-id"], id);
    }
}

#[tokio::test]
async fn only_the_decode_leg_is_asked_for_a_receipt_and_no_leg_gets_credentials() {
    let (mut prefill, mut decode) = (Mock::prefill().await, Mock::decode().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let request = router
        .to("POST", CHAT)
        .header("x-towline-receipt", "1")
        .header("authorization", "Bearer secret")
        .header("cookie", "a=b")
        .header("x-forwarded-for", "1.2.3.4");
    assert_eq!(router.send(request, r#"{"model":"m"}"#).await.status(), 200);
    let (first, second) = (prefill.next().await, decode.next().await);
    assert!(!first.headers.contains_key("x-towline-receipt"));
    assert_eq!(second.headers["x-towline-receipt"], "1");
    for headers in [&first.headers, &second.headers] {
        for name in ["authorization", "cookie", "x-forwarded-for"] {
            assert!(!headers.contains_key(HeaderName::from_static(name)), "{name}");
        }
        assert_eq!(headers["content-type"], "application/json");
    }
}

#[tokio::test]
async fn credentials_are_forwarded_when_the_deployment_says_so() {
    let (mut prefill, mut decode) = (Mock::prefill().await, Mock::decode().await);
    let config = Config { forward_authorization: true, ..pairs(&[prefill.address], &[decode.address]) };
    let router = Deployment::start(unprobed(config)).await;
    let request = router.to("POST", CHAT).header("authorization", "Bearer k");
    assert_eq!(router.send(request, r#"{"model":"m"}"#).await.status(), 200);
    assert_eq!(prefill.next().await.headers["authorization"], "Bearer k");
    assert_eq!(decode.next().await.headers["authorization"], "Bearer k");
}
