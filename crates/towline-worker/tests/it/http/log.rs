//! What stands in the log: `towline up` prints the lines of transfers, so their fields are an interface.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, OnceLock};

use serde_json::json;
use towline_wire::handoff::HandoffError;
use towline_worker::http::{FrontParts, OnKvFailure, Role};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use super::client::{request, serve_front};
use super::fakes::{MODEL, ScriptedEngine, ScriptedHandoff, Wire, parts_with, remote_kv};

/// An event's level and fields.
pub(crate) type Line = (Level, BTreeMap<&'static str, String>);

/// Keeps the events of the targets `kv_transfer` and `kv_memory`.
#[derive(Clone, Default)]
struct Ear(Arc<Mutex<Vec<Line>>>);

/// Has the log listened to from now on; gives what was heard. For the whole process, as an ear for one thread misses events
/// whose call site another thread is just registering: other tests are heard too.
pub(crate) fn heard() -> Vec<Line> {
    static EAR: OnceLock<Ear> = OnceLock::new();
    let ear = EAR.get_or_init(|| {
        let ear = Ear::default();
        tracing::subscriber::set_global_default(ear.clone()).unwrap();
        ear
    });
    ear.0.lock().unwrap().clone()
}

struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for Ear {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        ["kv_transfer", "kv_memory"].contains(&metadata.target())
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields(BTreeMap::new());
        event.record(&mut fields);
        self.0.lock().unwrap().push((*event.metadata().level(), fields.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[tokio::test]
async fn a_transfer_is_one_line_with_its_receipt_and_a_failure_one_with_its_cause() {
    heard();
    let (engine, handoff) = (Arc::<ScriptedEngine>::default(), Arc::new(ScriptedHandoff::new()));
    let parts = parts_with(&engine, Role::Decode, &handoff);
    let served = serve_front(FrontParts { on_kv_failure: OnKvFailure::Recompute, ..parts }).await;
    let body = json!({"model": MODEL, "prompt": "hello", "kv_transfer_params": remote_kv()}).to_string();
    let ask = |id: &'static str| request("POST", "/v1/completions", &[("x-request-id", id)], body.clone());
    assert_eq!(served.send(ask("log-1")).await.status, 200);
    handoff.next(Wire::Fails(HandoffError::PeerRestarted.into()));
    assert_eq!(served.send(ask("log-2")).await.status, 200);

    let mut lines = heard();
    lines.retain(|(_, fields)| fields.get("request_id").is_some_and(|id| id.starts_with("log-")));
    let [(told, receipt), (warned, failure)] = lines.as_slice() else { panic!("{lines:?}") };
    assert_eq!((*told, *warned), (Level::INFO, Level::WARN));
    let expected = [
        ("request_id", "log-1"),
        ("transport", "shm"),
        ("bytes", "4096"),
        ("blocks", "2"),
        ("seconds", "0.004"),
        ("gb_per_s", "0.001"),
        ("lease", "7"),
        ("verified_by", "mapping"),
        ("peer", "prefill-0"),
    ];
    for (name, value) in expected {
        assert_eq!(receipt.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert_eq!((failure["request_id"].as_str(), failure["code"].as_str()), ("log-2", "peer_restarted"));
}
