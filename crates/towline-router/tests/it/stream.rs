//! Streams pass as they arrive, and end honestly.

use std::sync::Mutex;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use towline_router::{Config, Limits};

use crate::deployment::{CHAT, Deployment, pairs};
use crate::mock::{Frame, Mock, event_stream, scripted_stream};
use crate::within;

const STREAM: &str = r#"{"model":"m","stream":true}"#;

/// A decode worker whose stream the test writes.
async fn written() -> (Mock, UnboundedSender<Frame>) {
    let (frames, script) = unbounded_channel();
    let script = Mutex::new(Some(script));
    let mock = Mock::start(move |_, gone| {
        let frames = script.lock().unwrap().take().unwrap();
        async move { scripted_stream(frames, gone) }
    })
    .await;
    (mock, frames)
}

fn send(frames: &UnboundedSender<Frame>, text: &'static str) {
    frames.send(Ok(Bytes::from_static(text.as_bytes()))).unwrap();
}

async fn next(body: &mut Incoming) -> Option<Bytes> {
    within(body.frame()).await.map(|frame| frame.unwrap().into_data().unwrap())
}

#[tokio::test]
async fn each_event_reaches_the_client_before_the_next_is_written() {
    let (prefill, (decode, frames)) = (Mock::prefill().await, written().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let mut body = router.send(router.to("POST", CHAT), STREAM).await.into_body();
    for text in ["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"] {
        send(&frames, text);
        assert_eq!(next(&mut body).await.unwrap(), text);
    }
    drop(frames);
    assert_eq!(next(&mut body).await, None);
    router.metric(r#"towline_router_requests_total{endpoint="chat_completions",outcome="ok"} 1"#).await;
}

#[tokio::test]
async fn head_reaches_the_client_before_the_first_event() {
    let (prefill, (decode, _frames)) = (Mock::prefill().await, written().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let response = router.send(router.to("POST", CHAT), STREAM).await;
    assert_eq!(response.status(), 200);
    for name in ["server", "x-served-by", "location"] {
        assert!(!response.headers().contains_key(name), "{name}");
    }
}

#[tokio::test]
async fn worker_dying_mid_stream_ends_it_with_an_error_event_and_no_done() {
    let (prefill, (decode, frames)) = (Mock::prefill().await, written().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let mut body = router.send(router.to("POST", CHAT), STREAM).await.into_body();
    send(&frames, "data: 1\n\n");
    assert_eq!(next(&mut body).await.unwrap(), "data: 1\n\n");
    send(&frames, "data: {\"hal");
    frames.send(Err("the worker dies")).unwrap();

    let last = next(&mut body).await.unwrap();
    let event = std::str::from_utf8(&last).unwrap().strip_prefix("data: ").unwrap().strip_suffix("\n\n");
    let error: Value = serde_json::from_str(event.unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "worker_connection_broken");
    assert_eq!(error["error"]["type"], "server_error");
    assert!(!error.to_string().contains("127.0.0.1"));
    assert_eq!(next(&mut body).await, None);
    router
        .metric(r#"towline_router_requests_total{endpoint="chat_completions",outcome="stream_broken"} 1"#)
        .await;
    router.metric(r#"towline_router_leg_failures_total{leg="decode",reason="broken"} 1"#).await;
}

#[tokio::test]
async fn silent_stream_is_ended_after_the_idle_timeout() {
    let (prefill, (mut decode, frames)) = (Mock::prefill().await, written().await);
    let limits = Limits { body_idle_timeout: std::time::Duration::from_millis(100), ..Limits::default() };
    let config = Config { limits, ..pairs(&[prefill.address], &[decode.address]) };
    let router = Deployment::start(config).await;
    let mut body = router.send(router.to("POST", CHAT), STREAM).await.into_body();
    send(&frames, ": hello\n\n");
    assert_eq!(next(&mut body).await.unwrap(), ": hello\n\n");
    assert!(String::from_utf8_lossy(&next(&mut body).await.unwrap()).contains("worker_timeout"));
    assert_eq!(next(&mut body).await, None);
    decode.gone().await;
}

#[tokio::test]
async fn stream_that_ends_without_done_is_reported_unless_the_worker_did() {
    let cases = [
        ("data: 1\n\n", r#""code":"worker_connection_broken""#),
        ("data: {\"error\":{\"message\":\"mine\"}}\n\n", r#"{"message":"mine"}"#),
    ];
    for (text, last) in cases {
        let (prefill, (decode, frames)) = (Mock::prefill().await, written().await);
        let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
        send(&frames, text);
        drop(frames);
        let answer = router.post(CHAT, STREAM).await;
        assert!(answer.text.starts_with(text) && answer.text.contains(last), "{answer:?}");
        assert_eq!(answer.text.matches("\"error\"").count(), 1, "{answer:?}");
        let broken =
            r#"towline_router_requests_total{endpoint="chat_completions",outcome="stream_broken"} 1"#;
        router.metric(broken).await;
    }
}

#[tokio::test]
async fn client_that_stops_reading_is_let_go() {
    let prefill = Mock::prefill().await;
    let mut decode = Mock::start(|_, gone| async move {
        let frame = Bytes::from(format!("data: {}\n\n", "x".repeat(64 << 10)));
        let frames = futures_util::stream::repeat_with(move || {
            let _held = &gone;
            Ok::<_, std::io::Error>(frame.clone())
        });
        event_stream(axum::body::Body::from_stream(frames))
    })
    .await;
    let limits = Limits { client_stall_timeout: std::time::Duration::from_millis(200), ..Limits::default() };
    let config = Config { limits, ..pairs(&[prefill.address], &[decode.address]) };
    let router = Deployment::start(config).await;
    let _client = router.leaver(CHAT, STREAM).await;
    decode.gone().await;
    router
        .metric(r#"towline_router_requests_total{endpoint="chat_completions",outcome="client_gone"} 1"#)
        .await;
}
