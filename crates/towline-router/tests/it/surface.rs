//! The endpoints beside generation.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use towline_router::{Config, Limits, Router, ServeError};

use crate::deployment::{CHAT, Deployment, pairs, unprobed, urls};
use crate::mock::{Mock, decode_answer, nobody, prefill_answer};
use crate::{loopback, within};

#[tokio::test]
async fn models_are_merged_and_unknown_ones_are_refused() {
    let prefill = Mock::listing(&["m", "a"], |_, _| async { prefill_answer("{}") }).await;
    let decode = Mock::listing(&["m", "b"], |seen, _| async move { decode_answer(&seen) }).await;
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let listing = router.get("/v1/models").await.json();
    let ids: Vec<_> =
        listing["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!((&listing["object"], ids), (&json!("list"), vec!["m", "a", "b"]));
    assert!(!listing.to_string().contains("secret"), "{listing}");

    let answer = router.post(CHAT, r#"{"model":"nope"}"#).await;
    assert_eq!(answer.fault(), (404, "model_not_found".to_owned()));
    assert_eq!(answer.json()["error"]["param"], "model");
    assert_eq!(router.post(CHAT, r#"{"model":"m"}"#).await.status, 200);
    // Each half of a pair must have it.
    assert_eq!(router.post(CHAT, r#"{"model":"a"}"#).await.fault(), (503, "no_usable_worker".to_owned()));
}

#[tokio::test]
async fn listing_without_workers_is_unavailable() {
    let router = Deployment::start(unprobed(pairs(&[nobody().await], &[]))).await;
    assert_eq!(router.get("/v1/models").await.fault(), (503, "no_usable_worker".to_owned()));
}

#[tokio::test]
async fn health_is_the_process_and_ready_is_the_deployment() {
    let (prefill, decode) = (Mock::prefill().await, Mock::decode().await);
    for (config, ready) in [
        (Config::default(), 503),
        (pairs(&[prefill.address], &[]), 503),
        (pairs(&[prefill.address], &[decode.address]), 200),
        (Config { aggregated: urls(&[decode.address]), ..Config::default() }, 200),
    ] {
        let router = Deployment::start(config).await;
        assert_eq!(router.get("/health").await.status, 200);
        assert_eq!(router.get("/ready").await.status, ready);
    }
}

#[tokio::test]
async fn unknown_paths_and_wrong_methods_have_openais_shape() {
    let router = Deployment::start(Config::default()).await;
    let answer = router.get("/v1/nothing").await;
    assert_eq!(answer.fault(), (404, "unknown_url".to_owned()));
    assert!(answer.headers.contains_key("x-request-id"));
    let answer = router.get(CHAT).await;
    assert_eq!(answer.fault(), (405, "method_not_supported".to_owned()));
    assert_eq!(answer.headers["allow"], "POST");
}

#[tokio::test]
async fn metrics_count_requests_and_time_them() {
    let (prefill, decode) = (Mock::prefill().await, Mock::decode().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    assert_eq!(router.post(CHAT, r#"{"model":"m","stream":true}"#).await.status, 200);
    assert_eq!(router.post(CHAT, r#"{"model":"m"}"#).await.status, 200);
    assert_eq!(router.post(CHAT, "{").await.status, 400);
    for line in [
        r#"towline_router_requests_total{endpoint="chat_completions",outcome="ok"} 2"#,
        r#"towline_router_requests_total{endpoint="chat_completions",outcome="client_error"} 1"#,
        "towline_router_ttft_seconds_count 2",
        "towline_router_prefill_seconds_count 2",
        r#"towline_router_workers{role="prefill",state="usable"} 1"#,
    ] {
        router.metric(line).await;
    }
    let text = router.get("/metrics").await.text;
    assert!(!text.contains("127.0.0.1"), "{text}");
}

/// A router with one request hanging in its prefill leg, told to stop: what the client read, and how it ended.
async fn stopped_with_a_request_open(limits: Limits) -> (String, Result<(), ServeError>) {
    let (mut prefill, decode) = (Mock::hanging().await, Mock::decode().await);
    let listener = loopback();
    let address = listener.local_addr().unwrap();
    let config = Config { limits, ..pairs(&[prefill.address], &[decode.address]) };
    let (router, stop) = (Router::new(config), CancellationToken::new());
    let token = stop.clone();
    let serving = tokio::spawn(async move { router.serve(listener, token).await });
    let mut client = TcpStream::connect(address).await.unwrap();
    let body = r#"{"model":"m"}"#;
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: r\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    client.write_all(head.as_bytes()).await.unwrap();
    prefill.next().await;
    stop.cancel();
    let mut text = Vec::new();
    let _ = within(client.read_to_end(&mut text)).await;
    prefill.gone().await;
    (String::from_utf8(text).unwrap(), within(serving).await.unwrap())
}

#[tokio::test]
async fn shutdown_lets_an_open_request_end() {
    let limits = Limits { prefill_timeout: Duration::from_millis(300), ..Limits::default() };
    let (text, ended) = stopped_with_a_request_open(limits).await;
    assert!(text.starts_with("HTTP/1.1 504"), "{text}");
    ended.unwrap();
}

#[tokio::test]
async fn shutdown_cuts_what_outlives_the_drain_timeout() {
    let limits = Limits { drain_timeout: Duration::from_millis(50), ..Limits::default() };
    let (text, ended) = stopped_with_a_request_open(limits).await;
    assert_eq!(text, "");
    assert!(matches!(ended, Err(ServeError::Drain { connections: 1 })), "{ended:?}");
}
