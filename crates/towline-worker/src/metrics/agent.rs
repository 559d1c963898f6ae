//! What an agent counts, as metric families: the transfer engine under a worker, whatever it moved.
//!
//! Made anew when somebody asks, as the agent keeps the counts. What it can't see has no sample, rather than a zero: over
//! shm a peer copies by itself, so what it read or wrote here is known to the peer alone.

use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use towline_fabric::AgentStats;
use towline_wire::receipt::TransportKind::{self, Shm, Tcp, Ucx};

use super::{Direction, Transport};

type Count = fn(&AgentStats) -> u64;

/// Name, help, number.
type Row = (&'static str, &'static str, Count);

const GAUGES: [Row; 4] = [
    ("towline_agent_sessions", "Authenticated sessions from peers", |stats| stats.sessions),
    ("towline_agent_unauthenticated", "Connections that have not proved themselves yet", |stats| {
        stats.unauthenticated
    }),
    ("towline_agent_peers", "Peers connected to", |stats| stats.peers),
    ("towline_agent_transfers_in_flight", "Transfers in flight or draining", |stats| stats.transfers),
];

/// Contract violations are among the worker's own.
const COUNTERS: [Row; 9] = [
    ("towline_agent_handshakes_refused", "Handshakes of peers that failed or met a bound", |stats| {
        stats.handshakes_refused
    }),
    ("towline_agent_protocol_errors", "Sessions closed because the peer broke the protocol", |stats| {
        stats.protocol_errors
    }),
    ("towline_agent_requests_refused", "Requests of peers refused for region, bounds or lease", |stats| {
        stats.requests_refused
    }),
    ("towline_agent_transfers_done", "Transfers that succeeded, fence reads included", |stats| {
        stats.transfers_done
    }),
    ("towline_agent_transfers_failed", "Transfers that failed or were cancelled", |stats| {
        stats.transfers_failed
    }),
    ("towline_agent_forced_closes", "Paths closed because a transfer did not drain", |stats| {
        stats.forced_closes
    }),
    ("towline_agent_paths_rested", "Paths closed because their peer was idle", |stats| stats.paths_rested),
    ("towline_agent_sessions_rested", "Sessions to peers closed because the peer was idle", |stats| {
        stats.sessions_rested
    }),
    ("towline_agent_heartbeats", "Messages that keep held leases, each for all of a pair", |stats| {
        stats.heartbeats
    }),
];

const BYTES: [(TransportKind, &str, Count); 8] = [
    (Shm, "read", |stats| stats.shm.bytes_read),
    (Shm, "written", |stats| stats.shm.bytes_written),
    (Ucx, "read", |stats| stats.ucx.bytes_read),
    (Ucx, "written", |stats| stats.ucx.bytes_written),
    (Tcp, "read", |stats| stats.tcp.bytes_read),
    (Tcp, "written", |stats| stats.tcp.bytes_written),
    (Tcp, "served", |stats| stats.tcp.bytes_served),
    (Tcp, "received", |stats| stats.tcp.bytes_received),
];

/// The families with their numbers.
pub(super) fn registry(stats: &AgentStats) -> Registry {
    let mut registry = Registry::default();
    for (name, help, count) in GAUGES {
        registry.register(name, help, ConstGauge::new(count(stats)));
    }
    for (name, help, count) in COUNTERS {
        registry.register(name, help, ConstCounter::new(count(stats)));
    }
    let bytes = Family::<Direction, Counter>::default();
    for (transport, direction, count) in BYTES {
        let labels = Direction { transport: transport.as_str(), direction };
        bytes.get_or_create(&labels).inc_by(count(stats));
    }
    registry.register("towline_agent_bytes", "Bytes moved, by transport and direction", bytes);
    let zero_copy = Family::<Transport, Counter>::default();
    let labels = Transport { transport: Tcp.as_str() };
    zero_copy.get_or_create(&labels).inc_by(stats.tcp.bytes_zero_copy);
    registry.register("towline_agent_zero_copy_bytes", "Bytes sent without the kernel's copy", zero_copy);
    registry
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use towline_fabric::TransportTraffic;

    use super::*;

    #[test]
    fn names_and_numbers_are_exactly_as_published() {
        let traffic = |first| TransportTraffic {
            bytes_read: first,
            bytes_written: first + 1,
            bytes_served: first + 2,
            bytes_received: first + 3,
            bytes_zero_copy: first + 4,
        };
        let stats = AgentStats {
            sessions: 1,
            unauthenticated: 2,
            peers: 3,
            transfers: 4,
            handshakes_refused: 5,
            protocol_errors: 6,
            requests_refused: 7,
            transfers_done: 8,
            transfers_failed: 9,
            forced_closes: 10,
            contract_violations: 11,
            paths_rested: 12,
            sessions_rested: 13,
            heartbeats: 14,
            shm: traffic(20),
            tcp: traffic(30),
            ucx: traffic(40),
        };
        let mut text = String::new();
        encode(&mut text, &registry(&stats)).unwrap();
        let mut found: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        found.sort_unstable();
        let expected = [
            "towline_agent_bytes_total{transport=\"shm\",direction=\"read\"} 20",
            "towline_agent_bytes_total{transport=\"shm\",direction=\"written\"} 21",
            "towline_agent_bytes_total{transport=\"tcp\",direction=\"read\"} 30",
            "towline_agent_bytes_total{transport=\"tcp\",direction=\"received\"} 33",
            "towline_agent_bytes_total{transport=\"tcp\",direction=\"served\"} 32",
            "towline_agent_bytes_total{transport=\"tcp\",direction=\"written\"} 31",
            "towline_agent_bytes_total{transport=\"ucx\",direction=\"read\"} 40",
            "towline_agent_bytes_total{transport=\"ucx\",direction=\"written\"} 41",
            "towline_agent_forced_closes_total 10",
            "towline_agent_handshakes_refused_total 5",
            "towline_agent_heartbeats_total 14",
            "towline_agent_paths_rested_total 12",
            "towline_agent_peers 3",
            "towline_agent_protocol_errors_total 6",
            "towline_agent_requests_refused_total 7",
            "towline_agent_sessions 1",
            "towline_agent_sessions_rested_total 13",
            "towline_agent_transfers_done_total 8",
            "towline_agent_transfers_failed_total 9",
            "towline_agent_transfers_in_flight 4",
            "towline_agent_unauthenticated 2",
            "towline_agent_zero_copy_bytes_total{transport=\"tcp\"} 34",
        ];
        assert_eq!(found, expected, "{text}");
    }
}
