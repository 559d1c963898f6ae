//! What a worker counts, in OpenMetrics text on `/metrics`.
//!
//! **Names are an interface**: dashboards and `towline up` read them, so they are tested as written. prometheus-client appends
//! `_total` to counters itself, so counters are registered without it.
//!
//! Two kinds of numbers: what the front sees is counted as it happens; what engine, pool, handoff and agent (`agent`)
//! count themselves is copied when somebody asks ([`Metrics::render`]), so the hot paths know nothing of this registry.

mod agent;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use towline_wire::receipt::{Receipt, TransportKind};

use crate::engine::EngineStats;
use crate::http::HandoffCounts;
use crate::pool::PoolStats;

/// The content type of [`Metrics::render`].
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Bounds of time to first token: a cached short prompt to a long one on a laptop.
const TTFT_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Bounds of a KV transfer: one block over shm to gigabytes over a slow network.
const TRANSFER_BUCKETS: [f64; 13] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Answered.
    Ok,
    /// The client's mistake.
    ClientError,
    /// Ours, or prefill's.
    ServerError,
    /// Refused for want of room.
    Overloaded,
    /// The client left.
    Cancelled,
}

impl Outcome {
    /// The outcome of an answer with an error status.
    pub fn of(status: StatusCode) -> Self {
        match status {
            StatusCode::SERVICE_UNAVAILABLE => Self::Overloaded,
            status if status.is_client_error() => Self::ClientError,
            _ => Self::ServerError,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ClientError => "client_error",
            Self::ServerError => "server_error",
            Self::Overloaded => "overloaded",
            Self::Cancelled => "cancelled",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    endpoint: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Cause {
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Transport {
    transport: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Transfer {
    transport: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Direction {
    transport: &'static str,
    direction: &'static str,
}

/// The counters of a worker.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<Request, Counter>,
    ttft: Histogram,
    transfer_bytes: Family<Direction, Counter>,
    transfer_seconds: Family<Transport, Histogram, fn() -> Histogram>,
    transfers: Family<Transfer, Counter>,
    copied: Copied,
}

/// Numbers that others count.
#[derive(Debug, Default)]
struct Copied {
    prompt_computed: Counter,
    prompt_cached: Counter,
    prompt_loaded: Counter,
    generated: Counter,
    running: Gauge,
    waiting: Gauge,
    blocks: Family<State, Gauge>,
    leases: Family<State, Gauge>,
    leases_ended: Family<Cause, Counter>,
    contract_violations: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Everything at zero.
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            requests: Family::default(),
            ttft: Histogram::new(TTFT_BUCKETS),
            transfer_bytes: Family::default(),
            transfer_seconds: Family::new_with_constructor(|| Histogram::new(TRANSFER_BUCKETS)),
            transfers: Family::default(),
            copied: Copied::default(),
        };
        metrics.register_requests();
        metrics.register_tokens();
        metrics.register_kv();
        metrics
    }

    fn register_requests(&mut self) {
        let (registry, copied) = (&mut self.registry, &self.copied);
        registry.register("towline_requests", "Requests, by how they ended", self.requests.clone());
        registry.register(
            "towline_ttft_seconds",
            "From a request's arrival to its first token",
            self.ttft.clone(),
        );
        registry.register(
            "towline_requests_running",
            "Sequences in the engine's batch",
            copied.running.clone(),
        );
        registry.register(
            "towline_requests_waiting",
            "Jobs that wait for the engine",
            copied.waiting.clone(),
        );
    }

    fn register_tokens(&mut self) {
        let (registry, copied) = (&mut self.registry, &self.copied);
        let tokens = [
            (
                "towline_prompt_tokens_computed",
                "Prompt tokens computed by this worker",
                &copied.prompt_computed,
            ),
            (
                "towline_prompt_tokens_cached",
                "Prompt tokens found in the prefix cache",
                &copied.prompt_cached,
            ),
            ("towline_prompt_tokens_loaded", "Prompt tokens whose KV was pulled", &copied.prompt_loaded),
            ("towline_generated_tokens", "Tokens generated", &copied.generated),
        ];
        for (name, help, counter) in tokens {
            registry.register(name, help, counter.clone());
        }
    }

    fn register_kv(&mut self) {
        let (registry, copied) = (&mut self.registry, &self.copied);
        registry.register("towline_kv_blocks", "KV blocks, by state", copied.blocks.clone());
        registry.register("towline_leases", "Leases on this worker's KV, by state", copied.leases.clone());
        registry.register("towline_leases_ended", "Leases that ended, by cause", copied.leases_ended.clone());
        registry.register("towline_kv_transfer_bytes", "KV bytes moved", self.transfer_bytes.clone());
        registry.register(
            "towline_kv_transfer_seconds",
            "Time of a KV transfer",
            self.transfer_seconds.clone(),
        );
        registry.register("towline_kv_transfers", "KV transfers, by how they ended", self.transfers.clone());
        registry.register(
            "towline_contract_violations",
            "Times that a path began to break the contract",
            copied.contract_violations.clone(),
        );
    }

    /// The KV memory is made of pages of so many bytes, from now on among the numbers.
    pub fn kv_pages(&mut self, bytes: u64) {
        let help = "Bytes of a page of the KV memory";
        self.registry.register("towline_kv_page_bytes", help, ConstGauge::new(bytes));
    }

    /// A request ended.
    pub fn request(&self, endpoint: &'static str, outcome: Outcome) {
        self.requests.get_or_create(&Request { endpoint, outcome: outcome.as_str() }).inc();
    }

    /// A request has its first token.
    pub fn first_token(&self, after: Duration) {
        self.ttft.observe(after.as_secs_f64());
    }

    /// KV was pulled.
    pub fn pulled(&self, receipt: &Receipt) {
        let transport = receipt.transport.as_str();
        self.transfers.get_or_create(&Transfer { transport, outcome: "ok" }).inc();
        self.transfer_seconds.get_or_create(&Transport { transport }).observe(receipt.seconds);
        self.transfer_bytes.get_or_create(&Direction { transport, direction: "in" }).inc_by(receipt.bytes);
    }

    /// KV was not pulled; `code` says why. No transport can be blamed: there may have been none.
    pub fn pull_failed(&self, code: &'static str) {
        self.transfers.get_or_create(&Transfer { transport: "none", outcome: code }).inc();
    }

    /// The text of `/metrics`, with the numbers of others as they are now.
    pub fn render(&self, engine: &EngineStats, pool: &PoolStats, handoff: Option<&HandoffCounts>) -> String {
        self.copied.engine(engine);
        self.copied.pool(pool);
        if let Some(counts) = handoff {
            self.copied.handoff(counts);
            // Over shm the reader copies by itself, and only it can count.
            let labels = Direction { transport: TransportKind::Tcp.as_str(), direction: "out" };
            store(&self.transfer_bytes.get_or_create(&labels), counts.agent.tcp.bytes_served);
        }
        let agent = handoff.map(|counts| agent::registry(&counts.agent));
        let mut text = String::new();
        for registry in std::iter::once(&self.registry).chain(&agent) {
            // Writing into a string does not fail.
            _ = encode_registry(&mut text, registry);
        }
        _ = encode_eof(&mut text);
        text
    }
}

impl Copied {
    fn engine(&self, stats: &EngineStats) {
        store(&self.prompt_computed, stats.prompt_tokens_computed);
        store(&self.prompt_cached, stats.prompt_tokens_cached);
        store(&self.prompt_loaded, stats.prompt_tokens_loaded);
        store(&self.generated, stats.tokens_generated);
        self.running.set(gauge(stats.running));
        self.waiting.set(gauge(stats.waiting));
    }

    fn pool(&self, stats: &PoolStats) {
        for (state, count) in [("free", stats.free), ("cached", stats.cached), ("used", stats.used)] {
            self.blocks.get_or_create(&State { state }).set(gauge(count));
        }
    }

    fn handoff(&self, counts: &HandoffCounts) {
        self.leases.get_or_create(&State { state: "held" }).set(gauge(counts.leases_held));
        let ended = [
            ("released", counts.leases_released),
            ("expired", counts.leases_expired),
            ("revoked", counts.leases_revoked),
        ];
        for (cause, count) in ended {
            store(&self.leases_ended.get_or_create(&Cause { cause }), count);
        }
        store(&self.contract_violations, counts.agent.contract_violations);
    }
}

/// Sets a counter to what its owner counted; owners never count backwards.
fn store(counter: &Counter<u64, AtomicU64>, total: u64) {
    counter.inner().fetch_max(total, Ordering::Relaxed);
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use towline_fabric::{AgentStats, TransportTraffic};
    use towline_wire::receipt::{Evidence, EvidenceClass, Op, RECEIPT_SCHEMA, Timings};

    use super::*;

    fn receipt() -> Receipt {
        Receipt {
            schema: RECEIPT_SCHEMA,
            transport: TransportKind::Shm,
            op: Op::Read,
            local_agent: "d".into(),
            remote_agent: "p".into(),
            bytes: 4096,
            blocks: 2,
            descriptors: 2,
            descriptors_merged: 1,
            staged: false,
            rails: Vec::new(),
            seconds: 0.004,
            gb_per_s: 0.001,
            timings: Timings::default(),
            violation: None,
            lease: None,
            evidence: Evidence { class: EvidenceClass::LibraryExact, source: "mapping".into() },
            verified_by: "mapping".into(),
        }
    }

    /// All numbers, with something of each family.
    fn text() -> String {
        let mut metrics = Metrics::new();
        metrics.kv_pages(2 << 20);
        metrics.request("completions", Outcome::Ok);
        metrics.first_token(Duration::from_millis(30));
        metrics.pulled(&receipt());
        metrics.pull_failed("stalled");
        let engine = EngineStats { prompt_tokens_computed: 7, running: 2, ..EngineStats::default() };
        let pool = PoolStats { total: 9, free: 4, cached: 3, used: 2, ..PoolStats::default() };
        let tcp = TransportTraffic { bytes_served: 64, ..TransportTraffic::default() };
        let counts = HandoffCounts {
            leases_held: 1,
            leases_expired: 5,
            agent: AgentStats { contract_violations: 2, tcp, ..AgentStats::default() },
            ..HandoffCounts::default()
        };
        metrics.render(&engine, &pool, Some(&counts))
    }

    #[test]
    fn names_are_exactly_as_published() {
        let text = text();
        for line in [
            "towline_prompt_tokens_computed_total 7",
            "towline_prompt_tokens_cached_total 0",
            "towline_generated_tokens_total 0",
            "towline_requests_total{endpoint=\"completions\",outcome=\"ok\"} 1",
            "towline_ttft_seconds_count 1",
            "towline_ttft_seconds_bucket{le=\"0.05\"} 1",
            "towline_kv_blocks{state=\"free\"} 4",
            "towline_kv_page_bytes 2097152",
            "towline_kv_transfer_bytes_total{transport=\"shm\",direction=\"in\"} 4096",
            "towline_kv_transfer_bytes_total{transport=\"tcp\",direction=\"out\"} 64",
            "towline_contract_violations_total 2",
            "towline_kv_transfer_seconds_count{transport=\"shm\"} 1",
            "towline_kv_transfers_total{transport=\"shm\",outcome=\"ok\"} 1",
            "towline_kv_transfers_total{transport=\"none\",outcome=\"stalled\"} 1",
            "towline_leases{state=\"held\"} 1",
            "towline_leases_ended_total{cause=\"expired\"} 5",
            "towline_requests_running 2",
            "towline_requests_waiting 0",
            "towline_agent_peers 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    /// What OpenMetrics demands of the text as a whole; a scraper refuses all of it otherwise.
    #[test]
    fn families_are_declared_once_and_samples_follow_their_family() {
        let text = text();
        let mut families = BTreeSet::new();
        let (mut family, mut kind) = ("", "");
        for line in text.strip_suffix("# EOF\n").unwrap().lines() {
            if let Some(words) = line.strip_prefix("# HELP ") {
                family = words.split(' ').next().unwrap();
                assert!(families.insert(family), "{family} is declared twice");
            } else if let Some(words) = line.strip_prefix("# TYPE ") {
                kind = words.strip_prefix(family).unwrap().trim();
            } else {
                let name = line.split(['{', ' ']).next().unwrap();
                let endings = match kind {
                    "counter" => ["_total"].as_slice(),
                    "histogram" => ["_bucket", "_count", "_sum"].as_slice(),
                    _ => [""].as_slice(),
                };
                let ending = name.strip_prefix(family).unwrap_or("?");
                assert!(endings.contains(&ending), "{line} under {family}, a {kind}");
            }
        }
        assert!(families.len() > 25 && families.iter().all(|name| name.starts_with("towline_")));
    }

    #[test]
    fn a_worker_without_an_agent_has_no_numbers_of_one() {
        let text = Metrics::new().render(&EngineStats::default(), &PoolStats::default(), None);
        assert!(!text.contains("towline_agent_"), "{text}");
    }

    #[test]
    fn a_later_scrape_shows_the_later_numbers() {
        let metrics = Metrics::new();
        let at = |generated, waiting| {
            let engine = EngineStats { tokens_generated: generated, waiting, ..EngineStats::default() };
            metrics.render(&engine, &PoolStats::default(), None)
        };
        at(3, 8);
        let text = at(5, 0);
        assert!(text.contains("towline_generated_tokens_total 5\n"), "{text}");
        assert!(text.contains("towline_requests_waiting 0\n"), "{text}");
    }
}
