//! What clients may send, and how much.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use towline_router::{Config, Limits};

use crate::deployment::{CHAT, COMPLETIONS, Deployment, pairs, unprobed};
use crate::mock::Mock;
use crate::within;

async fn limited(limits: Limits) -> (Deployment, Mock, Mock) {
    let (prefill, decode) = (Mock::prefill().await, Mock::decode().await);
    let config = Config { limits, ..pairs(&[prefill.address], &[decode.address]) };
    (Deployment::start(unprobed(config)).await, prefill, decode)
}

#[tokio::test]
async fn oversized_body_is_refused_with_and_without_a_length() {
    let (router, prefill, _decode) = limited(Limits { body_bytes_max: 1000, ..Limits::default() }).await;
    let answer = router.post(CHAT, vec![b' '; 1001]).await;
    assert_eq!(answer.fault(), (413, "request_too_large".to_owned()));

    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let chunk = format!("3E9\r\n{}\r\n0\r\n\r\n", " ".repeat(1001));
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut first = [0; 12];
    within(stream.read_exact(&mut first)).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 413");
    assert_eq!(prefill.waiting(), 0);
}

#[tokio::test]
async fn malformed_bodies_are_the_clients_fault() {
    let (router, prefill, _decode) = limited(Limits::default()).await;
    for body in [&b""[..], b"{", b"[]", b"\xff\xfe", b"{\"model\":\"\xff\"}", b"nul"] {
        let answer = router.post(CHAT, body).await;
        assert_eq!(answer.fault(), (400, "invalid_json".to_owned()), "{body:?}");
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    }
    for (body, param) in [
        (r#"{"messages":[]}"#, "model"),
        (r#"{"model":"m","max_tokens":0}"#, "max_tokens"),
        (r#"{"model":"m","max_tokens":-5}"#, "max_tokens"),
        (r#"{"model":"m","n":"two"}"#, "n"),
        (r#"{"model":"m","temperature":"hot"}"#, "temperature"),
        (r#"{"model":"m","top_p":{}}"#, "top_p"),
    ] {
        let answer = router.post(COMPLETIONS, body).await;
        assert_eq!(answer.fault(), (400, "invalid_value".to_owned()), "{body}");
        assert_eq!(answer.json()["error"]["param"], param);
    }
    assert_eq!(prefill.waiting(), 0);
}

#[tokio::test]
async fn several_prompts_are_refused_where_only_pairs_serve() {
    let (router, prefill, _decode) = limited(Limits::default()).await;
    let answer = router.post(COMPLETIONS, r#"{"model":"m","prompt":["a","b"]}"#).await;
    assert_eq!(answer.fault().0, 400);
    assert_eq!(answer.json()["error"]["param"], "prompt");
    assert_eq!(prefill.waiting(), 0);
}

#[tokio::test]
async fn too_many_requests_in_flight_are_told_to_come_back() {
    let (mut prefill, decode) = (Mock::hanging().await, Mock::decode().await);
    let limits = Limits { requests_in_flight_max: 1, ..Limits::default() };
    let config = Config { limits, ..pairs(&[prefill.address], &[decode.address]) };
    let router = Deployment::start(unprobed(config)).await;
    let first = router.leaver(CHAT, r#"{"model":"m"}"#).await;
    prefill.next().await;
    let answer = router.post(CHAT, r#"{"model":"m"}"#).await;
    assert_eq!(answer.fault(), (503, "too_many_in_flight".to_owned()));
    assert_eq!(answer.headers["retry-after"], "1");
    drop(first);
    prefill.gone().await;
    router.metric("towline_router_requests_in_flight 0").await;
    let _second = router.leaver(CHAT, r#"{"model":"m"}"#).await;
    prefill.next().await;
}

#[tokio::test]
async fn trickling_body_times_out() {
    let limits = Limits { body_timeout: Duration::from_millis(50), ..Limits::default() };
    let (router, _prefill, _decode) = limited(limits).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n{{");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut first = [0; 12];
    within(stream.read_exact(&mut first)).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 408");
}

#[tokio::test]
async fn head_without_end_from_a_client_is_refused() {
    let (router, _prefill, _decode) = limited(Limits { head_bytes_max: 8192, ..Limits::default() }).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let head = format!("GET /health HTTP/1.1\r\nx: {}", "y".repeat(100_000));
    let _ = stream.write_all(head.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = within(stream.read_to_end(&mut answer)).await;
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"), "{answer:?}");
}
