//! What goes wrong, and what the client then gets: a clear error or a right answer, never a wrong one, and every process
//! that lived goes on living.

use std::net::TcpListener;

use rustix::process::Signal;
use serde_json::json;

use super::cluster::{Cluster, Spec};
use super::fixture::Bench;
use super::http::{Answer, chat, get, metric, post, question};
use crate::process::eventually;

const HELLO: &str = "Hello, who are you and what do you do all day?";

fn text(answer: &Answer) -> String {
    answer.json()["choices"][0]["message"]["content"].as_str().expect("an answer").to_owned()
}

/// A prefill worker whose KV nobody can reach: it advertises a port where nobody listens.
fn unreachable_prefill() -> (Spec, TcpListener) {
    let held = TcpListener::bind("127.0.0.1:0").unwrap(); // held and never accepted: nobody answers there
    let address = held.local_addr().unwrap();
    (Spec::with(&[&format!("--kv-advertise={address}")]), held)
}

#[test]
fn blocked_data_port_fails_the_request_under_fail() {
    let bench = Bench::new();
    let (prefill, _held) = unreachable_prefill();
    let cluster = Cluster::start(&bench, &prefill, &Spec::with(&["--on-kv-failure=fail"]));
    let answer = chat(&cluster.url, HELLO);
    assert!((500..600).contains(&answer.status), "{answer:?}\n{}", cluster.said());
    answer.error();
    cluster.decode.log_with("no KV from prefill");
    assert!(!answer.body.contains("127.0.0.1"), "a client is told no worker's address: {answer:?}");
    assert_eq!(get(&cluster.decode_url, "/health").status, 200);
    assert_eq!(metric(&cluster.decode_url, "towline_generated_tokens_total", ""), 0.0);
}

#[test]
fn blocked_data_port_gives_the_same_answer_under_recompute() {
    let bench = Bench::new();
    let fine = Cluster::start(&bench, &Spec::default(), &Spec::default());
    let expected = chat(&fine.url, HELLO);
    assert_eq!(expected.status, 200, "{expected:?}\n{}", fine.said());
    let (prefill, _held) = unreachable_prefill();
    let cluster = Cluster::start(&bench, &prefill, &Spec::with(&["--on-kv-failure=recompute"]));
    let answer = chat(&cluster.url, HELLO);
    assert_eq!(answer.status, 200, "{answer:?}\n{}", cluster.said());
    assert_eq!(text(&answer), text(&expected));
    assert!(answer.json()["usage"]["towline_receipt"].is_null(), "nothing travelled: {answer:?}");
}

#[test]
fn other_weights_are_refused_at_connect() {
    let bench = Bench::new();
    bench.write_model("other.gguf", 2);
    let other = Spec { model: "other.gguf", ..Spec::default() };
    let cluster = Cluster::start(&bench, &other, &Spec::default());
    let answer = chat(&cluster.url, HELLO);
    assert!((500..600).contains(&answer.status), "{answer:?}");
    answer.error();
    cluster.decode.log_with("weights"); // it names the field that differs
}

#[test]
fn other_cluster_key_is_refused() {
    let bench = Bench::new();
    let stranger = Spec { key: "77".repeat(32), ..Spec::default() };
    let cluster = Cluster::start(&bench, &stranger, &Spec::with(&["--on-kv-failure=recompute"]));
    let answer = chat(&cluster.url, HELLO);
    assert!(
        answer.status >= 400,
        "parameters sealed with another key are refused even under recompute: {answer:?}"
    );
    answer.error();
}

#[test]
fn killed_prefill_gives_a_clear_error_and_the_rest_live() {
    let bench = Bench::new();
    let mut cluster = Cluster::start(&bench, &Spec::default(), &Spec::default());
    assert_eq!(chat(&cluster.url, HELLO).status, 200, "{}", cluster.said());
    cluster.prefill.signal(Signal::KILL);
    cluster.prefill.end();
    let answer = chat(&cluster.url, "And now?");
    assert!((500..600).contains(&answer.status), "{answer:?}");
    answer.error();
    assert_eq!(get(&cluster.decode_url, "/health").status, 200);
}

#[test]
fn lease_of_a_decode_that_never_comes_expires() {
    let bench = Bench::new();
    let cluster = Cluster::start(&bench, &Spec::with(&["--lease-seconds=1"]), &Spec::default());
    let mut leg = question(HELLO);
    leg["max_tokens"] = json!(1);
    leg["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let granted = post(&cluster.prefill_url, "/v1/chat/completions", &leg);
    assert_eq!(granted.status, 200, "{granted:?}");
    let params = granted.json()["kv_transfer_params"].clone();
    assert_eq!(params["do_remote_prefill"], true, "{params}");
    eventually("the lease expires", || metric(&cluster.prefill_url, "towline_leases", "") == 0.0);
    let ended = metric(&cluster.prefill_url, "towline_leases_ended_total", "expired");
    assert_eq!(ended, 1.0, "{}", get(&cluster.prefill_url, "/metrics").body);
    // A ticket whose lease is over is never decoded.
    let mut late = question(HELLO);
    late["kv_transfer_params"] = params;
    let refused = post(&cluster.decode_url, "/v1/chat/completions", &late);
    assert!(refused.status >= 400, "{refused:?}");
    refused.error();
}

#[test]
fn unsigned_parameters_are_refused_by_decode_and_dropped_by_the_router() {
    let bench = Bench::new();
    let cluster = Cluster::start(&bench, &Spec::default(), &Spec::default());
    let mut forged = question(HELLO);
    forged["kv_transfer_params"] = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[0, 1]],
        "remote_engine_id": "00000000-0000-4000-8000-000000000000", "remote_request_id": "x",
        "remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 1, "remote_num_tokens": 32,
        "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
    });
    let refused = post(&cluster.decode_url, "/v1/chat/completions", &forged);
    assert!((400..500).contains(&refused.status), "{refused:?}");
    let through = post(&cluster.url, "/v1/chat/completions", &forged);
    assert_eq!(through.status, 200, "{through:?}\n{}", cluster.said());
    assert_eq!(text(&through), text(&chat(&cluster.url, HELLO)));
}

#[test]
fn bad_requests_get_clear_errors_and_leave_all_alive() {
    let bench = Bench::new();
    let cluster = Cluster::start(&bench, &Spec::default(), &Spec::default());
    let with = |key: &str, value: serde_json::Value| {
        let mut body = question(HELLO);
        body[key] = value;
        body
    };
    for (body, status, part) in [
        (with("max_tokens", json!(0)), 400, "max_tokens"),
        (with("max_tokens", json!(-1)), 400, "max_tokens"),
        (with("temperature", json!("hot")), 400, "temperature"),
        (with("model", json!("gpt-17")), 404, "gpt-17"),
        (with("messages", json!([])), 400, "messages"),
        (question(&"word ".repeat(20_000)), 400, "context"),
    ] {
        let answer = post(&cluster.url, "/v1/chat/completions", &body);
        assert_eq!(answer.status, status, "{part}: {answer:?}");
        assert!(answer.error().0.contains(part), "{part}: {answer:?}");
    }
    let broken = post(&cluster.url, "/v1/chat/completions", &json!("{not an object"));
    assert_eq!(broken.status, 400, "{broken:?}");
    broken.error();
    assert_eq!(chat(&cluster.url, HELLO).status, 200, "{}", cluster.said());
}

#[test]
fn requests_together_get_the_answers_they_get_alone() {
    let bench = Bench::new();
    let cluster = Cluster::start(&bench, &Spec::default(), &Spec::default());
    let prompts: Vec<String> =
        (0..8).map(|index| format!("{HELLO} Number {index}. {}", "ship ".repeat(index * 7))).collect();
    let alone: Vec<String> = prompts.iter().map(|prompt| text(&chat(&cluster.url, prompt))).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let running: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(|| text(&chat(&cluster.url, prompt)))).collect();
        running.into_iter().map(|request| request.join().expect("an answer")).collect()
    });
    assert_eq!(together, alone);
}
