//! What the router adds to the time to first token: two legs by hand against the same two legs through it.
//!
//! Mock workers answer at once on loopback, so nearly all that is measured is the road. The direct way posts two
//! bodies made beforehand and doesn't even look into the prefill answer: no client can do with less, so whatever
//! the router does (reading, checking, parsing, writing, one more hop) counts against it. Each request is done
//! both ways, in turn, so that a noisy machine is noisy to both.
//! Seen on 2 cores shared with three compilers: p50 +27 us (100 bytes of prompt), +32 us (8 KiB), +263 us (128 KiB).
//! Prints one JSON line a case: machine, sizes, p50 and p99 of each way and of the difference of the pair.

#![allow(clippy::print_stdout, reason = "a benchmark's output is its result")]
#![allow(clippy::unwrap_used, reason = "a benchmark that can't run must say where it stopped")]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::extract::Request as Arrived;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use towline_router::{Config, Router};

const ROUNDS: usize = 3000;
const WARM_UP: usize = 300;
const PATH: &str = "/v1/chat/completions";

type Http = Client<HttpConnector, Full<Bytes>>;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let (prefill, decode) = (worker(prefill).await, worker(decode).await);
    let router = router(prefill, decode).await;
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let http: Http = Client::builder(TokioExecutor::new()).build(connector);
    for prompt_bytes in [100, 8 << 10, 128 << 10] {
        let body = request(prompt_bytes);
        let text = Bytes::from(body.to_string());
        let legs = legs(&body);
        let (mut direct, mut routed) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS + WARM_UP {
            let by_hand = direct_ttft(&http, [prefill, decode], legs.clone()).await;
            let through = first_byte(&http, router, text.clone()).await;
            if round >= WARM_UP {
                direct.push(by_hand);
                routed.push(through);
            }
        }
        report(prompt_bytes, &direct, &routed);
    }
}

fn report(prompt_bytes: usize, direct: &[Duration], routed: &[Duration]) {
    let micros = |times: &[Duration]| -> Vec<f64> { times.iter().map(|t| t.as_secs_f64() * 1e6).collect() };
    let (direct, routed) = (micros(direct), micros(routed));
    let added: Vec<f64> = routed.iter().zip(&direct).map(|(routed, direct)| routed - direct).collect();
    let line = json!({
        "bench": "router-overhead", "what": "ttft of a streamed chat completion, prefill and decode legs",
        "cores": std::thread::available_parallelism().map_or(0, usize::from), "transport": "loopback tcp",
        "rounds": ROUNDS, "prompt_bytes": prompt_bytes,
        "direct_us": quantiles(direct), "routed_us": quantiles(routed), "added_us": quantiles(added),
    });
    println!("{line}");
}

fn quantiles(mut values: Vec<f64>) -> Value {
    values.sort_by(f64::total_cmp);
    let at = |percent: usize| (values[(values.len() - 1) * percent / 100] * 10.0).round() / 10.0;
    json!({"p50": at(50), "p99": at(99)})
}

fn request(prompt_bytes: usize) -> Value {
    let prompt = "word ".repeat(prompt_bytes / 5);
    json!({"model": "m", "stream": true, "max_tokens": 8, "messages": [{"role": "user", "content": prompt}]})
}

/// The bodies of both legs, made without a clock running.
fn legs(body: &Value) -> (Bytes, Bytes) {
    let (mut first, mut second) = (body.clone(), body.clone());
    first["stream"] = json!(false);
    first["max_tokens"] = json!(1);
    first["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    second["kv_transfer_params"] = parameters();
    (first.to_string().into(), second.to_string().into())
}

async fn direct_ttft(http: &Http, to: [SocketAddr; 2], (first, second): (Bytes, Bytes)) -> Duration {
    let started = Instant::now();
    http.request(post(to[0], first)).await.unwrap().into_body().collect().await.unwrap();
    started.elapsed() + first_byte(http, to[1], second).await
}

/// From sending to the first frame of the body; the rest is read outside the measurement.
async fn first_byte(http: &Http, to: SocketAddr, body: Bytes) -> Duration {
    let started = Instant::now();
    let mut answer = http.request(post(to, body)).await.unwrap().into_body();
    answer.frame().await.unwrap().unwrap();
    let took = started.elapsed();
    answer.collect().await.unwrap();
    took
}

fn post(to: SocketAddr, body: Bytes) -> Request<Full<Bytes>> {
    let request = Request::post(format!("http://{to}{PATH}")).header("content-type", "application/json");
    request.body(Full::new(body)).unwrap()
}

async fn router(prefill: SocketAddr, decode: SocketAddr) -> SocketAddr {
    let url = |address: SocketAddr| format!("http://{address}").parse().unwrap();
    let config = Config { prefill: vec![url(prefill)], decode: vec![url(decode)], ..Config::default() };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { Router::new(config).serve(listener, CancellationToken::new()).await });
    address
}

async fn worker(answer: fn() -> Response) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = axum::Router::new().fallback(move |request: Arrived| async move {
        to_bytes(request.into_body(), usize::MAX).await.unwrap();
        answer()
    });
    let listener = axum::serve::ListenerExt::tap_io(listener, |stream| {
        let _ = stream.set_nodelay(true);
    });
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

fn prefill() -> Response {
    axum::Json(json!({"id": "x", "choices": [], "kv_transfer_params": parameters()})).into_response()
}

/// As vLLM gives them for 512 blocks of prompt.
fn parameters() -> Value {
    let blocks: Vec<u32> = (0..512).collect();
    json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [blocks],
        "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "transfer_mode": "pull"})
}

fn decode() -> Response {
    let events = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n".repeat(8);
    ([("content-type", "text/event-stream")], Body::from(format!("{events}data: [DONE]\n\n"))).into_response()
}
