//! Workers that are down, fail, lie or talk nonsense.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::json;
use towline_router::{Config, Limits};

use crate::deployment::{Answer, CHAT, Deployment, pairs, unprobed, urls};
use crate::mock::{Mock, json_answer, nobody, prefill_answer, raw};

const BODY: &str = r#"{"model":"m","messages":[]}"#;
const STREAM: &str = r#"{"model":"m","messages":[],"stream":true}"#;

/// The answer of a deployment with these workers; whatever it is, it names none of them.
async fn answer(prefill: &[SocketAddr], decode: &[SocketAddr], body: &'static str) -> Answer {
    let router = Deployment::start(unprobed(pairs(prefill, decode))).await;
    let answer = router.post(CHAT, body).await;
    for address in prefill.iter().chain(decode) {
        let port = format!(":{}", address.port());
        assert!(!answer.text.contains(&port), "{answer:?}");
        assert!(!format!("{:?}", answer.headers).contains(&port), "{answer:?}");
    }
    for word in ["10.0.0.7", "worker 10"] {
        assert!(!answer.text.contains(word) && !format!("{:?}", answer.headers).contains(word), "{answer:?}");
    }
    answer
}

fn fault(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test]
async fn prefill_worker_that_is_down_is_replaced_by_another() {
    let (mut prefill, decode) = (Mock::prefill().await, Mock::decode().await);
    let router =
        Deployment::start(unprobed(pairs(&[nobody().await, prefill.address], &[decode.address]))).await;
    for _ in 0..4 {
        assert_eq!(router.post(CHAT, BODY).await.status, 200);
        prefill.next().await;
    }
    router.metric(r#"towline_router_leg_retries_total{leg="prefill"} 2"#).await;
}

#[tokio::test]
async fn failing_or_broken_prefill_worker_is_replaced_by_another() {
    let decode = Mock::decode().await;
    let broken =
        [Mock::status(500, "{}").await.address, raw(b"").await, raw(b"\x00\x01nonsense\r\n\r\n").await];
    for bad in broken {
        let prefill = Mock::prefill().await;
        let router = Deployment::start(unprobed(pairs(&[bad, prefill.address], &[decode.address]))).await;
        for _ in 0..2 {
            assert_eq!(router.post(CHAT, BODY).await.status, 200);
        }
        router.metric(r#"towline_router_leg_retries_total{leg="prefill"} 1"#).await;
    }
}

#[tokio::test]
async fn decode_worker_that_is_down_is_replaced_with_the_same_parameters() {
    let (mut prefill, mut decode) = (Mock::prefill().await, Mock::decode().await);
    let router =
        Deployment::start(unprobed(pairs(&[prefill.address], &[nobody().await, decode.address]))).await;
    for _ in 0..2 {
        assert_eq!(router.post(CHAT, STREAM).await.status, 200);
        prefill.next().await;
        assert_eq!(decode.next().await.json()["kv_transfer_params"]["remote_port"], 5600);
    }
    assert_eq!(prefill.waiting(), 0, "the prompt was computed once a request");
    router.metric(r#"towline_router_leg_retries_total{leg="decode"} 1"#).await;
}

#[tokio::test]
async fn decode_worker_that_was_sent_the_parameters_is_not_replaced() {
    let prefill = Mock::prefill().await;
    for bad in [raw(b"").await, Mock::status(500, "{}").await.address] {
        let decode = Mock::decode().await;
        let router = Deployment::start(unprobed(pairs(&[prefill.address], &[bad, decode.address]))).await;
        let statuses = [router.post(CHAT, BODY).await.status, router.post(CHAT, BODY).await.status];
        assert_eq!(statuses.map(|status| status.as_u16()), [502, 200]);
        assert_eq!(decode.waiting(), 1);
    }
}

#[tokio::test]
async fn deployment_that_is_all_down_says_so_and_when_to_retry() {
    let answer = answer(&[nobody().await, nobody().await], &[nobody().await], BODY).await;
    assert_eq!(answer.fault(), fault(503, "worker_unreachable"));
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(answer.json()["error"]["type"], "overloaded_error");
}

#[tokio::test]
async fn worker_that_keeps_failing_is_left_alone_for_a_while() {
    let decode = Mock::decode().await;
    let limits = Limits { failures_max: 2, cool_down: Duration::from_secs(3600), ..Limits::default() };
    let router = Deployment::start(Config { limits, ..pairs(&[nobody().await], &[decode.address]) }).await;
    let mut codes = Vec::new();
    for _ in 0..3 {
        codes.push(router.post(CHAT, BODY).await.fault());
    }
    assert_eq!(codes[2], fault(503, "no_usable_worker"), "{codes:?}");
    assert_eq!(router.get("/ready").await.status, 503);
}

#[tokio::test]
async fn cooled_down_worker_is_tried_again() {
    let prefill =
        Mock::start({
            let failing = std::sync::atomic::AtomicU32::new(2);
            move |_, _| {
                let fails = failing.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
                async move {
                    if fails { json_answer(503.try_into().unwrap(), "{}") } else { prefill_answer("{}") }
                }
            }
        })
        .await;
    let decode = Mock::decode().await;
    let limits = unprobed(Config::default()).limits;
    let limits = Limits { failures_max: 2, cool_down: Duration::from_millis(50), ..limits };
    let router = Deployment::start(Config { limits, ..pairs(&[prefill.address], &[decode.address]) }).await;
    for _ in 0..2 {
        assert_eq!(router.post(CHAT, BODY).await.fault(), fault(503, "worker_overloaded"));
    }
    crate::within(async { while router.post(CHAT, BODY).await.status != 200 {} }).await;
}

#[tokio::test]
async fn prefill_answers_that_are_no_handoff_are_bad_gateways() {
    let decode = Mock::decode().await;
    let without = [
        (r#"{"id":"x","choices":[]}"#, "prefill_returned_no_kv"),
        (r#"{"kv_transfer_params":null}"#, "prefill_returned_no_kv"),
        (r#"{"kv_transfer_params":"10.0.0.7"}"#, "prefill_returned_no_kv"),
        ("<html>10.0.0.7</html>", "worker_answer_invalid"),
        (r#"{"kv_transfer_params":{"#, "worker_answer_invalid"),
    ];
    for (body, code) in without {
        let prefill = Mock::status(200, body).await;
        let answer = answer(&[prefill.address], &[decode.address], BODY).await;
        assert_eq!(answer.fault(), fault(502, code), "{body}");
    }
    assert_eq!(decode.waiting(), 0);
}

#[tokio::test]
async fn redirects_and_garbage_from_a_worker_are_bad_gateways() {
    let decode = Mock::decode().await;
    let redirect =
        raw(b"HTTP/1.1 302 Found\r\nlocation: http://10.0.0.7:1/\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(
        answer(&[redirect], &[decode.address], BODY).await.fault(),
        fault(502, "worker_answer_invalid")
    );
    let noise = raw(b"SSH-2.0-OpenSSH_9.9\r\n").await;
    assert_eq!(
        answer(&[noise], &[decode.address], BODY).await.fault(),
        fault(502, "worker_connection_broken")
    );
}

#[tokio::test]
async fn head_without_end_from_a_worker_is_a_bad_gateway() {
    let decode = Mock::decode().await;
    let head = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(1 << 20));
    let prefill = raw(Box::leak(head.into_boxed_str()).as_bytes()).await;
    assert_eq!(
        answer(&[prefill], &[decode.address], BODY).await.fault(),
        fault(502, "worker_connection_broken")
    );
    let lines = format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(200));
    let prefill = raw(Box::leak(lines.into_boxed_str()).as_bytes()).await;
    assert_eq!(
        answer(&[prefill], &[decode.address], BODY).await.fault(),
        fault(502, "worker_connection_broken")
    );
}

#[tokio::test]
async fn decode_answers_of_the_wrong_kind_are_bad_gateways() {
    let prefill = Mock::prefill().await;
    let not_json = Mock::status(200, "10.0.0.7 is not JSON").await;
    let cut =
        raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{\"id\":").await;
    for (decode, body, code) in [
        (not_json.address, BODY, "worker_answer_invalid"),
        (not_json.address, STREAM, "worker_answer_invalid"),
        (cut, BODY, "worker_connection_broken"),
    ] {
        assert_eq!(answer(&[prefill.address], &[decode], body).await.fault(), fault(502, code));
    }
}

#[tokio::test]
async fn workers_refusal_is_relayed_when_it_is_in_openais_shape() {
    let decode = Mock::decode().await;
    let words = r#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#;
    let prefill = Mock::status(400, words).await;
    let relayed = answer(&[prefill.address], &[decode.address], BODY).await;
    assert_eq!((relayed.status.as_u16(), relayed.text.as_str()), (400, words));
    assert_eq!(decode.waiting(), 0);

    let prefill = Mock::status(422, r#"{"detail":"at 10.0.0.7"}"#).await;
    let told = answer(&[prefill.address], &[decode.address], BODY).await;
    assert_eq!(told.fault(), fault(422, "worker_rejected_request"));
}

#[tokio::test]
async fn refusal_that_names_the_worker_is_rewritten() {
    let decode = Mock::decode().await;
    let prefill = Mock::start(|seen, _| async move {
        let host = seen.headers["host"].to_str().unwrap();
        let body = json!({"error": {"message": format!("ask {host}"), "type": "x"}});
        json_answer(400.try_into().unwrap(), body.to_string())
    })
    .await;
    let told = answer(&[prefill.address], &[decode.address], BODY).await;
    assert_eq!(told.fault(), fault(400, "worker_rejected_request"));
}

#[tokio::test]
async fn hanging_workers_time_out() {
    let (prefill, decode) = (Mock::hanging().await, Mock::decode().await);
    let limits = unprobed(Config::default()).limits;
    let limits = Limits { prefill_timeout: Duration::from_millis(50), ..limits };
    let router = Deployment::start(Config { limits, ..pairs(&[prefill.address], &[decode.address]) }).await;
    assert_eq!(router.post(CHAT, BODY).await.fault(), fault(504, "worker_timeout"));

    let limits = unprobed(Config::default()).limits;
    let limits = Limits { decode_head_timeout: Duration::from_millis(50), ..limits };
    let config = Config { limits, aggregated: urls(&[prefill.address]), ..Config::default() };
    let router = Deployment::start(config).await;
    assert_eq!(router.post(CHAT, STREAM).await.fault(), fault(504, "worker_timeout"));
}

#[tokio::test]
async fn worker_that_fails_its_probes_is_out_before_any_request_asks_for_it() {
    let decode = Mock::decode().await;
    let limits = Limits { failures_max: 2, probe_interval: Duration::from_millis(20), ..Limits::default() };
    let router = Deployment::start(Config { limits, ..pairs(&[nobody().await], &[decode.address]) }).await;
    router.metric(r#"towline_router_workers{role="prefill",state="unusable"} 1"#).await;
    router.metric(r#"towline_router_workers{role="decode",state="usable"} 1"#).await;
    assert_eq!(router.post(CHAT, BODY).await.fault(), fault(503, "no_usable_worker"));
}

#[tokio::test]
async fn kv_that_does_not_come_is_told_as_such_and_not_held_against_decode() {
    let said = r#"{"error":{"message":"prefill at 10.0.0.7:1 is gone","type":"server_error","param":null,"code":"kv_transfer_failed"}}"#;
    let (prefill, decode) = (Mock::prefill().await, Mock::status(502, said).await);
    let router = Deployment::start(unprobed(pairs(&[prefill.address], &[decode.address]))).await;
    for _ in 0..10 {
        let answer = router.post(CHAT, BODY).await;
        assert_eq!(answer.fault(), fault(502, "kv_transfer_failed"), "{answer:?}");
        assert!(!answer.text.contains("10.0.0.7"), "{answer:?}");
    }
}
