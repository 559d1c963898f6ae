//! Bounds: too much of anything is refused with the right status, and the worker goes on.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use towline_worker::engine::FinishReason;
use towline_worker::http::{FrontParts, HttpLimits};

use super::client::{SOON, Served, request, serve_front, until};
use super::fakes::{MODEL, ScriptedEngine, finished, hanging, parts, token};

async fn front(limits: HttpLimits) -> (Served, Arc<ScriptedEngine>) {
    let engine = Arc::<ScriptedEngine>::default();
    (serve_front(FrontParts { limits, ..parts(&engine) }).await, engine)
}

fn body() -> String {
    json!({"model": MODEL, "prompt": "hello"}).to_string()
}

/// Sends bytes as they are and returns the first bytes of the answer, or all until the server closes.
async fn raw(served: &Served, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    // The server may close before it has read everything.
    _ = stream.write_all(bytes).await;
    let mut answer = vec![0; 4096];
    let read = tokio::time::timeout(SOON, stream.read(&mut answer)).await.expect("an answer or the end");
    answer.truncate(read.unwrap_or(0));
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_body_past_the_limit_is_refused_declared_or_not() {
    let (served, _engine) = front(HttpLimits { body_bytes: 1000, ..HttpLimits::default() }).await;
    let reply = served.send(request("POST", "/v1/completions", &[], "x".repeat(1001))).await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (413, "request_too_large"));
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunked = format!("{head}{:x}\r\n{}\r\n0\r\n\r\n", 2000, "x".repeat(2000));
    let answer = raw(&served, chunked.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("request_too_large"), "{answer}");
    let exact = format!("{}{}", body(), " ".repeat(1000 - body().len()));
    assert_eq!(served.send(request("POST", "/v1/completions", &[], exact)).await.status, 200);
}

#[tokio::test]
async fn a_body_that_never_comes_is_given_up() {
    let (served, engine) =
        front(HttpLimits { body_timeout: Duration::from_millis(30), requests: 1, ..HttpLimits::default() })
            .await;
    let answer =
        raw(&served, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{").await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("body_incomplete"), "{answer}");
    until("its place is free", async || {
        served.send(request("POST", "/v1/completions", &[], body())).await.status == 200
    })
    .await;
    assert_eq!(engine.alive(), 0);
}

#[tokio::test]
async fn heads_that_are_too_long_too_many_or_broken_end_the_connection_only() {
    let (served, _engine) =
        front(HttpLimits { headers: 20, head_bytes: 8192, ..HttpLimits::default() }).await;
    let many: String = (0..40).map(|index| format!("x-{index}: 1\r\n")).collect();
    let long = format!("x: {}\r\n", "y".repeat(20_000));
    for fields in [many, long] {
        let answer =
            raw(&served, format!("GET /health HTTP/1.1\r\nhost: x\r\n{fields}\r\n").as_bytes()).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
    for nonsense in [b"\x16\x03\x01\x02\x00".as_slice(), b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    {
        let answer = raw(&served, nonsense).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    assert_eq!(served.get("/health").await.status, 200);
}

#[tokio::test]
async fn one_request_too_many_is_told_to_come_back() {
    let (served, engine) = front(HttpLimits { requests: 2, ..HttpLimits::default() }).await;
    let streaming = json!({"model": MODEL, "prompt": "hello", "stream": true}).to_string();
    let mut open = Vec::new();
    for _ in 0..2 {
        engine.script(Ok(hanging(vec![token(65, "a")])));
        open.push(served.open(request("POST", "/v1/completions", &[], streaming.clone())).await);
    }
    let reply = served.send(request("POST", "/v1/completions", &[], body())).await;
    assert_eq!((reply.status.as_u16(), reply.fault().0.as_str()), (503, "overloaded"));
    assert_eq!(reply.headers["retry-after"], "1");
    assert_eq!(served.get("/health").await.status, 200, "health is no request");
    drop(open.pop());
    until("a place is free", async || {
        served.send(request("POST", "/v1/completions", &[], body())).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn connections_past_the_limit_wait_and_are_not_lost() {
    let (served, _engine) = front(HttpLimits { connections: 2, ..HttpLimits::default() }).await;
    let replies = join_all((0..12).map(|_| served.get("/health"))).await;
    assert!(replies.iter().all(|reply| reply.status == 200));
}

#[tokio::test]
async fn a_stop_lets_streams_finish_and_takes_no_more() {
    let (mut served, engine) = front(HttpLimits::default()).await;
    let (tell, events) = tokio::sync::mpsc::unbounded_channel();
    engine.script(Ok(Box::pin(futures_util::stream::unfold(events, |mut events| async move {
        events.recv().await.map(|event| (event, events))
    }))));
    tell.send(token(65, "a")).unwrap();
    let streaming = json!({"model": MODEL, "prompt": "hello", "stream": true}).to_string();
    let response = served.open(request("POST", "/v1/completions", &[], streaming)).await;
    served.stop.cancel();
    until("the listener is closed", async || TcpStream::connect(served.address).await.is_err()).await;
    tell.send(finished(FinishReason::Stop, 1, None)).unwrap();
    let rest = response.into_body().collect().await.unwrap().to_bytes();
    assert!(rest.ends_with(b"[DONE]\n\n"));
    assert_eq!(tokio::time::timeout(SOON, &mut served.serving).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_stop_does_not_wait_for_ever() {
    let limits = HttpLimits { drain: Duration::from_millis(50), ..HttpLimits::default() };
    let (mut served, engine) = front(limits).await;
    engine.script(Ok(hanging(vec![token(65, "a")])));
    let streaming = json!({"model": MODEL, "prompt": "hello", "stream": true}).to_string();
    let response = served.open(request("POST", "/v1/completions", &[], streaming)).await;
    served.stop.cancel();
    assert_eq!(tokio::time::timeout(SOON, &mut served.serving).await.unwrap().unwrap(), 1);
    assert_eq!(engine.alive(), 0);
    assert!(response.into_body().collect().await.is_err(), "the client sees that the stream was cut");
}
