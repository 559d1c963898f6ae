//! What the router counts. Labels are words from closed lists: no model, no client, no worker's address.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::error::LegError;
use crate::pool::Role;
use crate::request::Endpoint;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ok,
    ClientError,
    ServerError,
    Overloaded,
    StreamBroken,
    ClientGone,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ClientError => "client_error",
            Self::ServerError => "server_error",
            Self::Overloaded => "overloaded",
            Self::StreamBroken => "stream_broken",
            Self::ClientGone => "client_gone",
        }
    }

    /// The outcome of an error answer.
    pub(crate) fn of(status: StatusCode) -> Self {
        match status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => Self::Overloaded,
            status if status.is_client_error() => Self::ClientError,
            _ => Self::ServerError,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LegLabels {
    leg: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LegLabel {
    leg: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FieldLabel {
    field: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabels {
    role: &'static str,
    state: &'static str,
}

/// The router's metrics and the registry that prints them.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    in_flight: Gauge,
    ttft: Histogram,
    prefill: Histogram,
    leg_failures: Family<LegLabels, Counter>,
    retries: Family<LegLabel, Counter>,
    dropped_fields: Family<FieldLabel, Counter>,
    workers: Family<WorkerLabels, Gauge>,
}

/// 1 ms to 131 s, doubling: a cached short prompt to a long one in a queue.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("towline_router"),
            requests: Family::default(),
            in_flight: Gauge::default(),
            ttft: seconds(),
            prefill: seconds(),
            leg_failures: Family::default(),
            retries: Family::default(),
            dropped_fields: Family::default(),
            workers: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let to = &mut self.registry;
        to.register("requests", "Requests by how they ended", self.requests.clone());
        to.register("requests_in_flight", "Requests not yet ended", self.in_flight.clone());
        to.register("ttft_seconds", "From a request's arrival to its answer's first byte", self.ttft.clone());
        to.register("prefill_seconds", "Prefill legs that succeeded, retries included", self.prefill.clone());
        to.register("leg_failures", "Legs that gave no usable answer", self.leg_failures.clone());
        to.register("leg_retries", "Legs sent to a second worker", self.retries.clone());
        let help = "Requests with a field no client may send, which was dropped";
        to.register("client_fields_dropped", help, self.dropped_fields.clone());
        to.register("workers", "Workers by role and state", self.workers.clone());
    }

    /// The text of `GET /metrics` (OpenMetrics 1.0).
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string can't fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }

    pub(crate) fn observe_prefill(&self, took: Duration) {
        self.prefill.observe(took.as_secs_f64());
    }

    pub(crate) fn count_leg_failure(&self, role: Role, error: &LegError) {
        self.leg_failures.get_or_create(&LegLabels { leg: role.word(), reason: error.reason() }).inc();
    }

    pub(crate) fn count_retry(&self, role: Role) {
        self.retries.get_or_create(&LegLabel { leg: role.word() }).inc();
    }

    pub(crate) fn count_dropped(&self, fields: &[&'static str]) {
        for field in fields {
            self.dropped_fields.get_or_create(&FieldLabel { field }).inc();
        }
    }

    /// Sets how many workers of a role are usable, of how many; called when someone asks.
    pub(crate) fn set_workers(&self, role: Role, usable: usize, all: usize) {
        for (state, count) in [("usable", usable), ("unusable", all.saturating_sub(usable))] {
            let labels = WorkerLabels { role: role.word(), state };
            self.workers.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}

/// One request's entry in the books, made when it arrives and closed however it ends: a tally dropped without an
/// outcome means that the client left.
#[derive(Debug)]
pub(crate) struct Tally {
    metrics: Arc<Metrics>,
    endpoint: Endpoint,
    arrived: Instant,
    waits_for_first_byte: bool,
    outcome: Outcome,
}

impl Tally {
    pub(crate) fn open(metrics: &Arc<Metrics>, endpoint: Endpoint) -> Self {
        metrics.in_flight.inc();
        Self {
            metrics: Arc::clone(metrics),
            endpoint,
            arrived: Instant::now(),
            waits_for_first_byte: true,
            outcome: Outcome::ClientGone,
        }
    }

    /// The answer's first byte is on its way to the client.
    pub(crate) fn handle_byte(&mut self) {
        if std::mem::replace(&mut self.waits_for_first_byte, false) {
            self.metrics.ttft.observe(self.arrived.elapsed().as_secs_f64());
        }
    }

    /// How the request ended.
    pub(crate) fn close(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
        let labels = RequestLabels { endpoint: self.endpoint.word(), outcome: self.outcome.word() };
        self.metrics.requests.get_or_create(&labels).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_as_documented() {
        let metrics = Arc::new(Metrics::new());
        let mut tally = Tally::open(&metrics, Endpoint::Chat);
        assert!(metrics.text().contains("towline_router_requests_in_flight 1\n"));
        tally.handle_byte();
        tally.close(Outcome::Ok);
        drop(tally);
        drop(Tally::open(&metrics, Endpoint::Completions));
        metrics.count_leg_failure(Role::Prefill, &LegError::NoKv);
        metrics.count_dropped(&["kv_transfer_params"]);
        metrics.set_workers(Role::Decode, 1, 3);
        let text = metrics.text();
        for line in [
            r#"towline_router_requests_total{endpoint="chat_completions",outcome="ok"} 1"#,
            r#"towline_router_requests_total{endpoint="completions",outcome="client_gone"} 1"#,
            "towline_router_requests_in_flight 0",
            "towline_router_ttft_seconds_count 1",
            r#"towline_router_leg_failures_total{leg="prefill",reason="no_kv"} 1"#,
            r#"towline_router_client_fields_dropped_total{field="kv_transfer_params"} 1"#,
            r#"towline_router_workers{role="decode",state="unusable"} 2"#,
        ] {
            assert!(text.lines().any(|l| l == line), "no {line} in\n{text}");
        }
    }
}
