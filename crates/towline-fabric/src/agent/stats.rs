//! Plain counters, for metrics and for bounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use towline_wire::receipt::{Op, TransportKind};

/// Bytes that went over one transport since the agent's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportTraffic {
    /// Bytes this agent read from peers.
    pub bytes_read: u64,
    /// Bytes this agent wrote to peers.
    pub bytes_written: u64,
    /// Bytes this agent sent to peers that read (what it sees: not over shm).
    pub bytes_served: u64,
    /// Bytes peers wrote here (what it sees: not over shm).
    pub bytes_received: u64,
    /// Of the bytes sent, those that the kernel was given without a copy (tcp that leaves the host).
    pub bytes_zero_copy: u64,
}

/// An agent's counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AgentStats {
    /// Authenticated sessions from peers now, and foreign regions that they have the address of.
    pub sessions: u64,
    /// Connections that have not proved themselves yet, now.
    pub unauthenticated: u64,
    /// Peers connected to now.
    pub peers: u64,
    /// Transfers in flight or draining now.
    pub transfers: u64,
    /// Handshakes of peers that failed or were refused for a bound.
    pub handshakes_refused: u64,
    /// Sessions closed because the peer broke the protocol.
    pub protocol_errors: u64,
    /// Requests of peers that were refused: region, bounds, lease.
    pub requests_refused: u64,
    /// Transfers that succeeded.
    pub transfers_done: u64,
    /// Transfers that failed, cancelled ones included.
    pub transfers_failed: u64,
    /// Paths closed by force because a transfer did not drain.
    pub forced_closes: u64,
    /// Times that a pair began to break its contract.
    pub contract_violations: u64,
    /// Paths closed because their peer was idle.
    pub paths_rested: u64,
    /// Control sessions to peers closed because their peer was idle.
    pub sessions_rested: u64,
    /// Heartbeat messages sent for held leases.
    pub heartbeats: u64,
    /// Traffic over shared memory.
    pub shm: TransportTraffic,
    /// Traffic over TCP.
    pub tcp: TransportTraffic,
    /// Over UCX: what this agent read and wrote; what peers did of their own is not seen.
    pub ucx: TransportTraffic,
}

/// The atomics behind [`TransportTraffic`].
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    read: AtomicU64,
    written: AtomicU64,
    served: AtomicU64,
    received: AtomicU64,
    zero_copy: AtomicU64,
}

impl Traffic {
    /// Counts what this agent's own requests moved.
    pub(crate) fn count(&self, op: Op, bytes: u64) {
        match op {
            Op::Read => self.read.fetch_add(bytes, Ordering::Relaxed),
            Op::Write => self.written.fetch_add(bytes, Ordering::Relaxed),
        };
    }

    /// Counts what peers' requests moved.
    pub(crate) fn count_served(&self, op: Op, bytes: u64) {
        match op {
            Op::Read => self.served.fetch_add(bytes, Ordering::Relaxed),
            Op::Write => self.received.fetch_add(bytes, Ordering::Relaxed),
        };
    }

    /// Counts what the kernel was given without a copy.
    pub(crate) fn count_zero_copy(&self, bytes: u64) {
        self.zero_copy.fetch_add(bytes, Ordering::Relaxed);
    }

    fn snapshot(&self) -> TransportTraffic {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TransportTraffic {
            bytes_read: of(&self.read),
            bytes_written: of(&self.written),
            bytes_served: of(&self.served),
            bytes_received: of(&self.received),
            bytes_zero_copy: of(&self.zero_copy),
        }
    }
}

/// The atomics behind [`AgentStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) sessions: Arc<AtomicUsize>,
    pub(crate) unauthenticated: Arc<AtomicUsize>,
    pub(crate) peers: Arc<AtomicUsize>,
    pub(crate) transfers: Arc<AtomicUsize>,
    pub(crate) handshakes_refused: AtomicU64,
    pub(crate) protocol_errors: AtomicU64,
    pub(crate) requests_refused: AtomicU64,
    pub(crate) transfers_done: AtomicU64,
    pub(crate) transfers_failed: AtomicU64,
    pub(crate) forced_closes: AtomicU64,
    pub(crate) contract_violations: AtomicU64,
    pub(crate) paths_rested: AtomicU64,
    pub(crate) sessions_rested: AtomicU64,
    pub(crate) heartbeats: AtomicU64,
    shm: Traffic,
    tcp: Traffic,
    ucx: Traffic,
}

impl Counters {
    /// The traffic of a transport; those to come get their own when they do.
    pub(crate) fn traffic(&self, kind: TransportKind) -> &Traffic {
        match kind {
            TransportKind::Shm => &self.shm,
            TransportKind::Ucx => &self.ucx,
            TransportKind::Tcp | TransportKind::Libfabric => &self.tcp,
        }
    }

    pub(crate) fn snapshot(&self) -> AgentStats {
        let now = |gauge: &AtomicUsize| gauge.load(Ordering::Relaxed) as u64;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        AgentStats {
            sessions: now(&self.sessions),
            unauthenticated: now(&self.unauthenticated),
            peers: now(&self.peers),
            transfers: now(&self.transfers),
            handshakes_refused: of(&self.handshakes_refused),
            protocol_errors: of(&self.protocol_errors),
            requests_refused: of(&self.requests_refused),
            transfers_done: of(&self.transfers_done),
            transfers_failed: of(&self.transfers_failed),
            forced_closes: of(&self.forced_closes),
            contract_violations: of(&self.contract_violations),
            paths_rested: of(&self.paths_rested),
            sessions_rested: of(&self.sessions_rested),
            heartbeats: of(&self.heartbeats),
            shm: self.shm.snapshot(),
            tcp: self.tcp.snapshot(),
            ucx: self.ucx.snapshot(),
        }
    }
}

/// A place under a bound, given back when dropped.
#[derive(Debug)]
pub(crate) struct Seat(Arc<AtomicUsize>);

impl Seat {
    /// Takes one of `limit` places; `None` when all are taken.
    pub(crate) fn take(gauge: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        let more = |count| (count < limit).then_some(count + 1);
        gauge.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).ok().map(|_| Self(Arc::clone(gauge)))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_are_bounded_and_come_back() {
        let gauge = Arc::new(AtomicUsize::new(0));
        let first = Seat::take(&gauge, 1);
        assert!(first.is_some() && Seat::take(&gauge, 1).is_none());
        drop(first);
        assert!(Seat::take(&gauge, 1).is_some());
    }
}
