//! What is told of each transfer that ends, to whom, and when; and the lines that are made of it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use towline_fabric::{
    Agent, AgentConfig, EndedTransfer, JsonLines, RegionOptions, Telemetry, TransferError, TransferRequest,
};
use towline_wire::id::Generation;
use towline_wire::receipt::{Op, Receipt, TransportKind};

use crate::child::passes;
use crate::resources::switches;
use crate::support::*;

/// Keeps what it hears.
#[derive(Debug, Default)]
struct Heard(Mutex<Vec<EndedTransfer>>);

impl Telemetry for Heard {
    fn handle_transfer(&self, ended: EndedTransfer) {
        self.0.lock().unwrap().push(ended);
    }
}

impl Heard {
    /// What came since the last call.
    fn news(&self) -> Vec<EndedTransfer> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

fn telling(telemetry: Arc<dyn Telemetry>) -> Agent {
    start(AgentConfig { telemetry: Some(telemetry), ..config("reader") }).0
}

fn outcome(peer: &towline_fabric::Peer, request: TransferRequest) -> Result<Receipt, TransferError> {
    peer.transfer(request).unwrap().wait(PATIENCE).expect("an outcome in time")
}

#[test]
fn each_transfer_is_told_once_and_before_its_caller() {
    const BYTES: u64 = 5 << 20;
    let (owner, _) = start(config("owner"));
    let leased = RegionOptions { leased: true, ..RegionOptions::default() };
    let region = owner.register(memory(BYTES), leased).unwrap();
    let heard = Arc::new(Heard::default());
    let reader = telling(Arc::<Heard>::clone(&heard));
    let local = memory(BYTES);
    let read = |bytes, lease| TransferRequest {
        lease: Some(lease),
        ..request(Op::Read, &local, region.id(), (blocks(bytes, [0]), blocks(bytes, [0])))
    };
    let common = |ended: &EndedTransfer| {
        assert_eq!((ended.op, ended.region, ended.lease), (Op::Read, region.id(), Some(LEASE.0)));
        let agents = (ended.local_agent.as_str(), ended.remote_agent.as_str());
        assert_eq!(agents, ("reader", "owner"));
        assert!(ended.seconds > 0.0);
    };
    for kind in KINDS {
        let peer = wait(reader.connect(owner.address(), only(kind))).unwrap();
        // Copied by the caller, and by other threads.
        for bytes in [512, BYTES] {
            let receipt = outcome(&peer, read(bytes, LEASE)).unwrap();
            let [ended] = &heard.news()[..] else { panic!("one transfer, one call") };
            common(ended);
            assert_eq!((ended.transport, ended.bytes, ended.moved_bytes), (Some(kind), bytes, bytes));
            assert!(ended.seconds.to_bits() == receipt.seconds.to_bits());
            assert_eq!(ended.outcome, Ok(receipt));
        }
        let cancelled = peer.transfer(read(BYTES, LEASE)).unwrap();
        drop(cancelled);
        let [ended] = &heard.news()[..] else { panic!("one transfer, one call") };
        common(ended);
        assert!(ended.moved_bytes <= BYTES);
        // It may have been through.
        assert!(matches!(ended.outcome, Ok(_) | Err(TransferError::Cancelled)), "{ended:?}");
        assert!(peer.transfer(read(BYTES + 1, LEASE)).is_err() && heard.news().is_empty(), "it is none");
    }
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Tcp))).unwrap();
    let error = outcome(&peer, read(512, (LEASE.0, Generation(1)))).unwrap_err();
    let [ended] = &heard.news()[..] else { panic!("one transfer, one call") };
    common(ended);
    assert_eq!((ended.transport, ended.bytes, ended.moved_bytes), (Some(TransportKind::Tcp), 512, 0));
    assert_eq!(ended.outcome, Err(error));
    let stats = reader.stats();
    assert_eq!(stats.transfers_done + stats.transfers_failed, 7);
}

#[test]
fn one_that_ends_while_its_peer_connects_is_told_too() {
    let heard = Arc::new(Heard::default());
    let reader = telling(Arc::<Heard>::clone(&heard));
    let (owner, _) = start(config("owner"));
    let region = offer(&owner, 1, 4096);
    let (id, card) = (region.id(), owner.seal_card(owner.card(), Duration::from_secs(600)).unwrap());
    drop((region, owner));
    let peer = reader.introduce(&card, only(TransportKind::Tcp)).unwrap();
    let list = || blocks(4096, [0]);
    let error = outcome(&peer, request(Op::Read, &memory(4096), id, (list(), list()))).unwrap_err();
    assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
    let [ended] = &heard.news()[..] else { panic!("one transfer, one call") };
    assert_eq!((ended.transport, ended.bytes, ended.moved_bytes), (None, 4096, 0));
    assert_eq!((ended.remote_agent.as_str(), &ended.outcome), ("owner", &Err(error)));
    assert_eq!((reader.stats().transfers_done, reader.stats().transfers_failed), (0, 1));
}

/// The fields of an object, and of those in it, each with its path.
fn fields(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            found.insert(path.clone());
            // What is in a receipt is the receipt's own schema.
            if path != "receipt" {
                fields(value, &path, found);
            }
        }),
        _ => assert!(!path.is_empty(), "a line is an object"),
    }
}

#[test]
fn lines_have_the_fields_that_the_page_lists_and_are_complete_when_the_agent_is_gone() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("transfers.jsonl");
    std::fs::write(&path, "what was there stays\n").unwrap();
    let (owner, _) = start(config("owner"));
    let region = offer(&owner, 1, 4096);
    let reader = telling(Arc::new(JsonLines::append(&path).unwrap()));
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Tcp))).unwrap();
    let local = memory(4096);
    let read = |lease| TransferRequest {
        lease,
        ..request(Op::Read, &local, region.id(), (blocks(4096, [0]), blocks(4096, [0])))
    };
    let receipt = outcome(&peer, read(Some(LEASE))).unwrap();
    let error = outcome(&peer, read(Some((LEASE.0, Generation(1))))).unwrap_err();
    drop((peer, reader));
    let text = std::fs::read_to_string(&path).unwrap();
    let (kept, lines) = text.split_once('\n').unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [done, failed] = &lines[..] else { panic!("two transfers, two lines: {text}") };
    assert_eq!(kept, "what was there stays");
    assert_eq!(done["receipt"], serde_json::to_value(&receipt).unwrap());
    assert_eq!((&done["bytes"], &done["moved_bytes"]), (&4096.into(), &4096.into()));
    let told = ["kind", "text", "fault", "retry"].map(|key| failed["error"][key].as_str().unwrap());
    assert_eq!(told, ["expired", &error.to_string(), "peer", "elsewhere"]);
    assert!(failed["unix_s"].as_f64().unwrap() >= done["unix_s"].as_f64().unwrap());

    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operate.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, section) = page.split_once("| field of a line |").expect("the table of fields");
    let listed = section.lines().skip(2).take_while(|line| line.starts_with("| `"));
    let listed: BTreeSet<String> = listed.map(|line| line.split('`').nth(1).unwrap().to_owned()).collect();
    let mut found = BTreeSet::new();
    lines.iter().for_each(|line| fields(line, "", &mut found));
    assert_eq!(found, listed, "docs/operate.md lists the fields of a line");
}

#[test]
fn a_record_that_has_nothing_to_write_sleeps() {
    passes("telemetry::child_sleeps");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_sleeps() {
    let folder = TempDir::new().unwrap();
    let lines = Arc::new(JsonLines::append(&folder.path().join("transfers.jsonl")).unwrap());
    let reader = telling(Arc::<JsonLines>::clone(&lines));
    let (owner, _) = start(config("owner"));
    let region = offer(&owner, 1, 4096);
    let peer = wait(reader.connect(owner.address(), only(TransportKind::Shm))).unwrap();
    read(&peer, region.id(), 4096).unwrap();
    eventually("the line is written", || lines.stats().written == 1);
    // Past every deadline of what went before: handshakes, mapping sessions.
    pause(Duration::from_millis(500));
    let before = switches();
    assert_eq!(before.len(), 9, "four io threads, four copy threads, the writer");
    pause(Duration::from_millis(1200));
    assert_eq!(switches(), before, "a thread woke up");
}
