//! A client that leaves takes its legs with it.

use tokio::io::AsyncReadExt;
use tokio::sync::mpsc::unbounded_channel;

use crate::deployment::{CHAT, Deployment, pairs};
use crate::mock::{Mock, scripted_stream};
use crate::within;

const GONE: &str = r#"towline_router_requests_total{endpoint="chat_completions",outcome="client_gone"} 1"#;
const NONE_IN_FLIGHT: &str = "towline_router_requests_in_flight 0";

#[tokio::test]
async fn leaving_during_prefill_ends_the_prefill_leg() {
    let (mut prefill, decode) = (Mock::hanging().await, Mock::decode().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let client = router.leaver(CHAT, r#"{"model":"m"}"#).await;
    prefill.next().await;
    drop(client);
    prefill.gone().await;
    router.metric(GONE).await;
    router.metric(NONE_IN_FLIGHT).await;
    assert_eq!(decode.waiting(), 0);
}

#[tokio::test]
async fn leaving_before_decode_has_answered_ends_the_decode_leg() {
    let (prefill, mut decode) = (Mock::prefill().await, Mock::hanging().await);
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let client = router.leaver(CHAT, r#"{"model":"m","stream":true}"#).await;
    decode.next().await;
    drop(client);
    decode.gone().await;
    router.metric(GONE).await;
    router.metric(NONE_IN_FLIGHT).await;
}

#[tokio::test]
async fn leaving_mid_stream_ends_the_decode_leg_though_it_is_silent() {
    let prefill = Mock::prefill().await;
    let (frames, script) = unbounded_channel();
    let script = std::sync::Mutex::new(Some(script));
    let mut decode = Mock::start(move |_, gone| {
        let frames = script.lock().unwrap().take().unwrap();
        async move { scripted_stream(frames, gone) }
    })
    .await;
    let router = Deployment::start(pairs(&[prefill.address], &[decode.address])).await;
    let mut client = router.leaver(CHAT, r#"{"model":"m","stream":true}"#).await;
    frames.send(Ok("data: 1\n\n".into())).unwrap();
    let mut text = String::new();
    while !text.contains("data: 1") {
        let mut bytes = [0; 1024];
        let count = within(client.read(&mut bytes)).await.unwrap();
        text.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
    }
    drop(client);
    decode.gone().await;
    router.metric(GONE).await;
    router.metric(NONE_IN_FLIGHT).await;
}
