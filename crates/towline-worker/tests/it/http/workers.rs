//! Whole workers over a tiny model: started, asked, handed over from one to the other, stopped.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use towline_fabric::{Agent, AgentConfig, ConnectOptions, Limits, ShmConfig, UcxConfig};
use towline_ffi::ucx::Ucx;
use towline_wire::auth::ClusterKey;
use towline_wire::card::Fingerprint;
use towline_wire::engine_card::RankAgent;
use towline_wire::id::{AgentName, EngineId};
use towline_wire::shard::Sharding;
use towline_worker::handoff::Keeper;
use towline_worker::serve::{Progress, Role, ServeError, StartError, Transport, Worker, WorkerConfig};
use towline_worker::testing::TinyModel;

use super::client::{Reply, SOON, call, metric_at, request, until};
use super::log::heard;
use crate::{skips, support};

fn config(model: &Path, role: Role) -> WorkerConfig {
    WorkerConfig {
        role,
        model_name: Some("tiny".into()),
        threads: 1,
        kv_cache_bytes: 4 << 20,
        ..WorkerConfig::new(model, ClusterKey::from_bytes([3; 32]))
    }
}

struct Running {
    address: SocketAddr,
    stop: CancellationToken,
    work: JoinHandle<Result<(), ServeError>>,
}

async fn start(config: WorkerConfig) -> Running {
    let worker =
        tokio::task::spawn_blocking(|| Worker::start(config, |_: Progress| {})).await.unwrap().unwrap();
    let (address, stop) = (worker.http_addr(), CancellationToken::new());
    Running { address, stop: stop.clone(), work: tokio::spawn(worker.run(stop)) }
}

impl Running {
    async fn complete(&self, body: &Value) -> Reply {
        let headers = [("x-towline-receipt", "1")];
        call(self.address, request("POST", "/v1/completions", &headers, body.to_string())).await
    }

    async fn end(self) {
        self.stop.cancel();
        tokio::time::timeout(SOON, self.work).await.expect("a bounded stop").unwrap().unwrap();
    }
}

fn ask(prompt: &str, max_tokens: usize) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true})
}

fn with_params(mut body: Value, params: &Value) -> Value {
    body["kv_transfer_params"] = params.clone();
    body
}

/// Both legs as the router makes them; the decode worker's answer.
async fn two_legs(prefill: &Running, decode: &Running, body: &Value) -> Reply {
    let mut leg = with_params(body.clone(), &json!({"do_remote_decode": true, "do_remote_prefill": false}));
    leg["max_tokens"] = json!(1);
    let reply = prefill.complete(&leg).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    decode.complete(&with_params(body.clone(), &reply.json()["kv_transfer_params"])).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_legs_answer_as_one_worker_does_over_every_transport() {
    let model = support::write(&TinyModel::default());
    let alone = start(config(&model.path, Role::Aggregated)).await;
    for (transport, wire, evidence) in [(Transport::Shm, "shm", "mapping"), (Transport::Tcp, "tcp", "socket")]
    {
        let of = |role| WorkerConfig { transport: transport.clone(), ..config(&model.path, role) };
        let (prefill, decode) = (start(of(Role::Prefill)).await, start(of(Role::Decode)).await);
        for prompt in ["hi", "The world, and all that is in it: 世界 🌍", &"the other one ".repeat(30)] {
            let body = ask(prompt, 12);
            let expected = alone.complete(&body).await.json();
            let reply = two_legs(&prefill, &decode, &body).await;
            assert_eq!(reply.status, 200, "{}", reply.body);
            let answer = reply.json();
            assert_eq!(answer["choices"], expected["choices"]);
            let (usage, receipt) = (&answer["usage"], &answer["usage"]["towline_receipt"]);
            assert!(usage["towline_prompt_tokens_computed"].as_u64().unwrap() <= 16, "{usage}");
            if receipt["bytes"] != 0 {
                assert_eq!(receipt["verified_by"], evidence, "{receipt}");
            }
        }
        until("every lease is given back", async || {
            let held = metric_at(prefill.address, "towline_leases{state=\"held\"}").await;
            let released = metric_at(prefill.address, "towline_leases_ended_total{cause=\"released\"}").await;
            (held, released) == (Some(0.0), Some(3.0))
        })
        .await;
        let moved = format!("towline_agent_bytes_total{{transport=\"{wire}\",direction=\"read\"}}");
        assert!(metric_at(decode.address, &moved).await.unwrap() > 0.0, "{moved}");
        assert_eq!(metric_at(decode.address, "towline_agent_peers").await, Some(1.0));
        prefill.end().await;
        decode.end().await;
    }
    alone.end().await;
}

/// Over UCX's tcp, so no device is needed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_legs_over_ucx_answer_as_one_worker_does() {
    let library = std::env::var_os("TOWLINE_UCX_LIBRARY").map(PathBuf::from);
    if let Err(why) = Ucx::open(library.as_deref()) {
        return skips::note("UCX", &format!("{why} (apt-get install libucx0)"));
    }
    let model = support::write(&TinyModel::default());
    let alone = start(config(&model.path, Role::Aggregated)).await;
    let ucx = UcxConfig { library, software: true, ..UcxConfig::default() };
    let of = |role| WorkerConfig { transport: Transport::Ucx(ucx.clone()), ..config(&model.path, role) };
    let (prefill, decode) = (start(of(Role::Prefill)).await, start(of(Role::Decode)).await);
    let body = ask(&"the other one ".repeat(30), 12);
    let expected = alone.complete(&body).await.json();
    // At once, while both may still be opening the library.
    let reply = two_legs(&prefill, &decode, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    let answer = reply.json();
    assert_eq!(answer["choices"], expected["choices"]);
    let receipt = &answer["usage"]["towline_receipt"];
    assert_eq!((&receipt["transport"], &receipt["verified_by"]), (&json!("ucx"), &json!("library")));
    for worker in [alone, prefill, decode] {
        worker.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_start_says_which_pages_hold_the_kv() {
    heard();
    let model = support::write(&TinyModel::default());
    // More than any other test has, so that its line is known.
    let large = WorkerConfig { kv_cache_bytes: 5 << 20, ..config(&model.path, Role::Aggregated) };
    let worker = start(large).await;
    let mut lines = heard();
    lines.retain(|(_, fields)| {
        fields.contains_key("page_bytes") && fields["bytes"].parse::<u64>().is_ok_and(|bytes| bytes > 4 << 20)
    });
    let [(_, line)] = lines.as_slice() else { panic!("{lines:?}") };
    let page_bytes: f64 = line["page_bytes"].parse().unwrap();
    assert_eq!(metric_at(worker.address, "towline_kv_page_bytes").await, Some(page_bytes));
    // Huge ones were asked for, so that normal ones have a reason.
    assert_eq!(page_bytes < f64::from(2 << 20), line.contains_key("why"), "{line:?}");
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_learns_of_a_workers_engine_from_its_agent() {
    let model = support::write(&TinyModel::default());
    for role in [Role::Prefill, Role::Decode] {
        let config = config(&model.path, role);
        let key = config.key.clone();
        let worker = Worker::start(config, |_| {}).unwrap();
        let asks = AgentConfig {
            name: AgentName::new("asks").unwrap(),
            engine: EngineId::from_bytes([1; 16]),
            key,
            listen: "127.0.0.1:0".parse().unwrap(),
            advertise: None,
            shm: ShmConfig::Off,
            tcp: true,
            fingerprint: Fingerprint::default(),
            copy_threads: 1,
            tcp_streams: 1,
            limits: Limits::default(),
            ucx: None,
            telemetry: None,
        };
        let nothing = Arc::new(Keeper::new(vec![], SOON)).owner(0);
        let agent = Agent::start(asks, nothing).unwrap();
        let address = worker.kv_address().unwrap();
        let peer = agent.connect(&address, ConnectOptions::default()).await.unwrap();
        let card = peer.engine_card().await.unwrap();
        assert_eq!((card.engine, &card.fingerprint), (peer.card().engine, &peer.card().fingerprint));
        assert_eq!(card.layout.describe(), peer.card().fingerprint.layout);
        assert!(!card.fingerprint.weights.is_empty());
        assert_eq!(card.sharding, Sharding { tp_size: 1, stage_layers: vec![3] });
        let [RankAgent::Card(rank)] = card.ranks.as_slice() else { panic!("{card:?}") };
        assert_eq!((rank.kv_region, &rank.agent), (peer.card().kv_region, &peer.card().agent));
        assert_eq!(card.admit(0, &peer.card()), Ok(()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_of_another_deployment_or_model_takes_no_kv() {
    let model = support::write(&TinyModel::default());
    let prefill = start(config(&model.path, Role::Prefill)).await;
    let other = support::write(&TinyModel { seed: 2, ..TinyModel::default() });
    let body = ask(&"the other one ".repeat(10), 4);

    let decode = start(config(&other.path, Role::Decode)).await;
    let reply = two_legs(&prefill, &decode, &body).await;
    assert_eq!(
        (reply.status.as_u16(), reply.fault().0.as_str()),
        (502, "kv_transfer_failed"),
        "{}",
        reply.body
    );
    assert!(reply.body.contains("incompatible") && reply.body.contains("weights"), "{}", reply.body);
    decode.end().await;

    let foreign = WorkerConfig { deployment: "other".into(), ..config(&model.path, Role::Decode) };
    let decode = start(foreign).await;
    let reply = two_legs(&prefill, &decode, &body).await;
    assert_eq!(
        (reply.status.as_u16(), reply.fault().0.as_str()),
        (400, "invalid_kv_transfer_params"),
        "{}",
        reply.body
    );
    decode.end().await;
    prefill.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_context_ends_where_the_kv_memory_does() {
    let model = support::write(&TinyModel::default());
    // 16 blocks of 16 tokens: a quarter of the model's context.
    let small = WorkerConfig { kv_cache_bytes: 100_000, ..config(&model.path, Role::Aggregated) };
    let worker = start(small).await;
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    let reply = call(worker.address, request("POST", "/v1/chat/completions", &[], chat.to_string())).await;
    assert_eq!(reply.status, 200, "a chat without a limit gets what fits: {}", reply.body);
    let reply = worker.complete(&ask("hi", 900)).await;
    assert_eq!(
        (reply.status.as_u16(), reply.fault().0.as_str()),
        (400, "context_length_exceeded"),
        "{}",
        reply.body
    );
    worker.end().await;
}

#[test]
fn a_start_that_cannot_succeed_says_why() {
    let model = support::write(&TinyModel::default());
    let start = |config| Worker::start(config, |_| {}).map(|_| ()).unwrap_err();
    assert!(matches!(start(config(Path::new("/nowhere.gguf"), Role::Prefill)), StartError::Model(_)));
    let tiny = WorkerConfig { kv_cache_bytes: 10, ..config(&model.path, Role::Prefill) };
    assert!(matches!(start(tiny), StartError::KvMemory { bytes: 10, .. }));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    let error = start(WorkerConfig { listen, ..config(&model.path, Role::Prefill) });
    assert!(matches!(&error, StartError::Listen { address, .. } if *address == listen), "{error}");
    let error = start(WorkerConfig { kv_listen: listen, ..config(&model.path, Role::Prefill) });
    assert!(matches!(error, StartError::Handoff(_)), "{error}");
    let named = WorkerConfig { name: Some("a b".into()), ..config(&model.path, Role::Decode) };
    assert!(matches!(start(named), StartError::Name(_)));
}

#[test]
fn the_start_tells_how_far_it_is() {
    let model = support::write(&TinyModel::default());
    let seen = std::cell::RefCell::new(Vec::new());
    let worker = Worker::start(config(&model.path, Role::Prefill), |at| seen.borrow_mut().push(at)).unwrap();
    let seen = seen.into_inner();
    assert_eq!((seen[0].step, seen[0].done), ("loading the model", 1));
    assert_eq!(seen.last().map(|at| (at.step, at.done, at.total)), Some(("ready", 1, 1)));
    assert!(worker.kv_address().is_some_and(|address| address.starts_with("127.0.0.1:")));
    assert_eq!(worker.model_name(), "tiny");
}
