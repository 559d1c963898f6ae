//! Many at once.

use std::sync::Arc;

use tokio::task::JoinSet;

use crate::deployment::{CHAT, Deployment, pairs};
use crate::mock::Mock;

const STREAMS: usize = 1000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_streams_at_once_all_end_whole() {
    let prefill = [Mock::prefill().await, Mock::prefill().await];
    let decode = [Mock::decode().await, Mock::decode().await];
    let config = pairs(&prefill.each_ref().map(|p| p.address), &decode.each_ref().map(|d| d.address));
    let router = Arc::new(Deployment::start(config).await);
    let mut clients = JoinSet::new();
    for _ in 0..STREAMS {
        let router = Arc::clone(&router);
        clients.spawn(async move { router.post(CHAT, r#"{"model":"m","stream":true}"#).await });
    }
    while let Some(answer) = clients.join_next().await {
        let answer = answer.unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.text.ends_with("data: [DONE]\n\n"), "{answer:?}");
    }
    for pair in [&prefill, &decode] {
        let counts = pair.each_ref().map(Mock::waiting);
        assert_eq!(counts.iter().sum::<usize>(), STREAMS);
        assert!(counts.iter().all(|count| *count > STREAMS / 4), "lopsided: {counts:?}");
    }
    router.metric("towline_router_requests_in_flight 0").await;
}
