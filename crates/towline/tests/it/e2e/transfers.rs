//! The record that a worker keeps of its transfers.

use std::fs::read_to_string;

use rustix::process::Signal;
use serde_json::Value;

use super::cluster::{Cluster, Spec};
use super::fixture::Bench;
use super::http::chat;
use crate::process::finish;

const HELLO: &str = "Hello, who are you and what do you do all day?";

#[test]
fn a_decode_worker_records_its_transfers() {
    let (bench, other) = (Bench::new(), Bench::new());
    let [asked, served] = ["asked.jsonl", "served.jsonl"].map(|name| other.model().with_file_name(name));
    let log = |path: &std::path::Path| Spec::with(&[&format!("--transfer-log={}", path.display())]);
    let Cluster { mut prefill, mut decode, url, router: _router, .. } =
        Cluster::start(&bench, &log(&served), &log(&asked));
    let answer = chat(&url, HELLO);
    assert_eq!(answer.status, 200, "{answer:?}");
    let told = &answer.json()["usage"]["towline_receipt"];
    for process in [&mut decode, &mut prefill] {
        process.signal(Signal::TERM);
        assert!(process.end().success(), "{}", process.said());
    }
    let lines: Vec<Value> =
        read_to_string(&asked).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [blocks, fence] = &lines[..] else { panic!("the blocks, then the fence slot: {lines:?}") };
    assert_eq!(
        (&blocks["op"], &blocks["schema"], &blocks["dropped"]),
        (&"read".into(), &1.into(), &0.into())
    );
    assert_eq!((&blocks["bytes"], &blocks["receipt"]["transport"]), (&told["bytes"], &told["transport"]));
    assert_eq!((&blocks["lease"], &blocks["remote_agent"]), (&told["lease"], &told["remote_agent"]));
    assert!(fence["bytes"].as_u64() < blocks["bytes"].as_u64() && fence["receipt"].is_object(), "{fence}");
    assert_eq!(read_to_string(&served).unwrap(), "", "a prefill worker asks for nothing");
}

#[test]
fn a_record_that_cannot_be_written_stops_the_start() {
    let bench = Bench::new();
    let mut command =
        bench.command(&["worker", "--role=decode", "--model=tiny.gguf", "--listen=127.0.0.1:0"]);
    command.args(["--transfer-log=no-such-folder/log"]).env("TOWLINE_CLUSTER_KEY", "5a".repeat(32));
    let output = finish(command);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("can't write the transfer log no-such-folder/log"), "{said}");
}
