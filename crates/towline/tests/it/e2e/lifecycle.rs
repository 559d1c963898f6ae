//! How a deployment starts, says where it is, and ends: by Ctrl-C, by a lost child, by SIGKILL. Nothing is left behind.

use std::net::TcpListener;

use rustix::process::Signal;
use serde_json::Value;

use super::cluster::{Cluster, Spec, worker};
use super::fixture::Bench;
use super::http::{chat, post, question};
use crate::process::{Process, Watched, children};

const HELLO: &str = "Hello, who are you and what do you do?";

/// An `up` that takes requests, its address and its three children.
fn running(bench: &Bench) -> (Process, String, Vec<Watched>) {
    let up = bench.up(&["--model-name=tiny"]);
    let base = up.address();
    let children = children(up.pid());
    let mut what: Vec<String> = children.iter().map(Watched::what).collect();
    what.sort();
    assert_eq!(what.len(), 3, "{what:?}");
    assert!(what[0].starts_with("router ") && what[1] == "worker --role=decode", "{what:?}");
    assert_eq!(what[2], "worker --role=prefill");
    (up, base, children)
}

fn all_end(children: &[Watched]) {
    for child in children {
        assert!(child.ends(), "{} was left behind", child.what());
    }
}

#[test]
fn up_serves_requests_and_prints_a_receipt_for_each() {
    let bench = Bench::new();
    let (up, base, _) = running(&bench);
    let whole = chat(&base, HELLO);
    assert_eq!((whole.status, whole.json()["object"].as_str()), (200, Some("chat.completion")), "{whole:?}");
    assert_eq!(whole.json()["usage"]["towline_receipt"]["verified_by"], "mapping", "{whole:?}");
    assert!(up.line_with("kv over shm: ").contains("verified by mapping"));
    let mut body = question("Another one, long enough for a block or two of its own.");
    body["stream"] = true.into();
    let streamed = post(&base, "/v1/chat/completions", &body);
    assert!(
        streamed.head.contains("text/event-stream") && streamed.body.contains("data: [DONE]"),
        "{streamed:?}"
    );
    up.line_with("kv over shm: ");
}

#[test]
fn interrupt_stops_everything_and_succeeds() {
    let bench = Bench::new();
    for signal in [Signal::INT, Signal::TERM] {
        let (mut up, _, children) = running(&bench);
        up.signal(signal);
        let status = up.end();
        assert!(status.success(), "{status}: {}", up.said());
        all_end(&children);
    }
}

#[test]
fn killed_up_takes_its_children_along() {
    let bench = Bench::new();
    let (mut up, _, children) = running(&bench);
    up.signal(Signal::KILL);
    up.end();
    all_end(&children);
}

#[test]
fn lost_child_is_named_and_ends_everything() {
    let bench = Bench::new();
    let (mut up, _, children) = running(&bench);
    children.iter().find(|child| child.what().contains("decode")).unwrap().signal(Signal::KILL);
    let status = up.end();
    assert_eq!(status.code(), Some(2));
    all_end(&children);
    assert!(up.said_at_end().contains("the decode worker ended (signal: 9 (SIGKILL))"));
}

#[test]
fn taken_port_is_replaced_and_named() {
    let bench = Bench::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let up = bench.up(&["--model-name=tiny", &format!("--listen=127.0.0.1:{port}")]);
    up.line_with(&format!("port {port} is taken"));
    let base = up.address();
    assert!(!base.ends_with(&format!(":{port}")), "{base}");
    assert_eq!(chat(&base, HELLO).status, 200);
}

#[test]
fn closed_standard_output_is_a_quiet_success() {
    let bench = Bench::new();
    let mut up = bench.up_command(&["--prompt", "Hello", "--max-tokens", "2", "--format", "json"]);
    up.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut up = up.spawn().unwrap();
    drop(up.stdout.take());
    let output = up.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(!said.contains("error"), "{said}");
}

#[test]
fn processes_by_hand_share_a_key_and_serve() {
    let bench = Bench::new();
    let Cluster { prefill, decode, mut router, url, .. } =
        Cluster::start(&bench, &Spec::default(), &Spec::default());
    let answer = chat(&url, HELLO);
    assert_eq!(answer.status, 200, "{answer:?}\n{}\n{}", prefill.said(), decode.said());
    router.signal(Signal::TERM);
    assert!(router.end().success());
    for mut process in [prefill, decode] {
        process.signal(Signal::TERM);
        assert!(process.end().success(), "{}", process.said());
    }
}

#[test]
fn ready_line_in_json_tells_the_addresses() {
    let bench = Bench::new();
    let worker = worker(&bench, "prefill", &Spec::with(&["--format=json"]));
    let ready: Value = serde_json::from_str(&worker.line_with("listening")).unwrap();
    assert_eq!(ready["event"], "listening");
    assert!(ready["http"].as_str().unwrap().starts_with("http://127.0.0.1:"));
    assert!(ready["kv"].as_str().unwrap().rsplit_once(':').unwrap().1.parse::<u16>().unwrap() > 0);
}
