//! The serving side of a data connection.
//!
//! Each request is judged when it is read: region, writability, bounds, lease. A refused write's payload is read
//! and thrown away, so that the stream goes on. Back-pressure: while [`BACKLOG`] replies wait for a peer that does not
//! read, its requests wait in its socket. At most 32 MiB of memory are *named* by what waits, none is copied.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use towline_wire::frame::{FrameKind, Reply, Request, Status};
use towline_wire::receipt::{Op, TransportKind};

use crate::agent::{Environment, RegionEntry, Seat};
use crate::control::answer_card;
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, Session};
use crate::region::Payload;

/// Frames and payloads that may wait to be sent: replies to 16 reads.
const BACKLOG: usize = 32;

/// Bytes sent or received in one turn before other sessions get theirs.
const TURN: u64 = 8 << 20;

/// Frames and pieces of payload handled in one turn: many small requests are work as well.
const STEPS: usize = 256;

/// A request for a few extents, header and body.
const AHEAD_BYTES: usize = 512;

/// Bytes thrown away at once.
const SCRAP: u64 = 64 * 1024;

/// The session of a peer that asks.
pub(crate) fn serve(mut channel: Channel, environment: &Arc<Environment>, seat: Seat) -> Box<dyn Session> {
    channel.avoid_copies();
    channel.read_ahead(AHEAD_BYTES);
    Box::new(TcpServer {
        channel,
        environment: Arc::clone(environment),
        incoming: Incoming::Nothing,
        _seat: seat,
    })
}

enum Incoming {
    Nothing,
    Write { payload: Payload, call: u64 },
    Scrap { left: u64, refused: Reply },
}

struct TcpServer {
    channel: Channel,
    environment: Arc<Environment>,
    incoming: Incoming,
    _seat: Seat,
}

impl TcpServer {
    /// One frame or one piece of payload; false when there is nothing to do now.
    fn step(&mut self, budget: &mut u64) -> Result<bool, SessionError> {
        match std::mem::replace(&mut self.incoming, Incoming::Nothing) {
            Incoming::Write { mut payload, call } => {
                if !self.channel.receive(&mut payload, budget)? {
                    self.incoming = Incoming::Write { payload, call };
                    return Ok(false);
                }
                self.count(Op::Write, payload.moved());
                self.reply(FrameKind::WriteReply, &Reply { call, status: Status::Ok, len: payload.moved() })?;
                Ok(true)
            }
            Incoming::Scrap { left: 0, refused } => {
                self.reply(FrameKind::WriteReply, &refused).map(|()| true)
            }
            Incoming::Scrap { left, refused } => {
                let piece = left.min(SCRAP);
                let read = self.channel.read_exact(usize::try_from(piece).unwrap_or(0))?.is_some();
                self.incoming = Incoming::Scrap { left: if read { left - piece } else { left }, refused };
                Ok(read)
            }
            Incoming::Nothing => {
                let Some((kind, body)) = self.channel.next_frame()? else { return Ok(false) };
                self.handle(kind, &body)?;
                Ok(true)
            }
        }
    }

    fn handle(&mut self, kind: FrameKind, body: &[u8]) -> Result<(), SessionError> {
        match kind {
            FrameKind::Control => answer_card(&mut self.channel, body, &self.environment),
            FrameKind::Read => self.handle_read(Request::decode(body)?),
            FrameKind::Write => self.handle_write(Request::decode(body)?),
            FrameKind::ReadReply | FrameKind::WriteReply => {
                Err(SessionError::Protocol("a reply that was not asked for".into()))
            }
        }
    }

    fn handle_read(&mut self, request: Request) -> Result<(), SessionError> {
        let (call, len) = (request.call, request.payload_bytes());
        let payload = self.judge(&request, Op::Read).and_then(|region| {
            Payload::outgoing(Arc::clone(&region.memory), request.extents).map_err(|_| Status::OutOfRange)
        });
        match payload {
            Ok(payload) => {
                self.reply(FrameKind::ReadReply, &Reply { call, status: Status::Ok, len })?;
                self.channel.send_payload(payload);
                Ok(())
            }
            Err(status) => self.refuse(FrameKind::ReadReply, Reply { call, status, len: 0 }),
        }
    }

    fn handle_write(&mut self, request: Request) -> Result<(), SessionError> {
        let (call, left) = (request.call, request.payload_bytes());
        let payload = self.judge(&request, Op::Write).and_then(|region| {
            Payload::incoming(Arc::clone(&region.memory), request.extents).map_err(|_| Status::OutOfRange)
        });
        self.incoming = match payload {
            Ok(payload) => Incoming::Write { payload, call },
            Err(status) => {
                self.environment.counters.requests_refused.fetch_add(1, Ordering::Relaxed);
                Incoming::Scrap { left, refused: Reply { call, status, len: 0 } }
            }
        };
        Ok(())
    }

    /// Whether the request may be served, and the region it names.
    fn judge(&self, request: &Request, op: Op) -> Result<Arc<RegionEntry>, Status> {
        let region = self.environment.regions.find(request.region).ok_or(Status::UnknownRegion)?;
        if op == Op::Write && !region.options.peer_writable {
            return Err(Status::NotWritable);
        }
        let len = region.memory.len();
        // The decoder checked that no extent wraps.
        if request.extents.iter().any(|extent| extent.offset + extent.len > len) {
            return Err(Status::OutOfRange);
        }
        if region.options.leased && request.lease.is_none() {
            return Err(Status::LeaseRequired);
        }
        self.environment.owner.admit(request.region, request.lease, &request.extents)?;
        Ok(region)
    }

    fn refuse(&mut self, kind: FrameKind, reply: Reply) -> Result<(), SessionError> {
        self.environment.counters.requests_refused.fetch_add(1, Ordering::Relaxed);
        self.reply(kind, &reply)
    }

    fn reply(&mut self, kind: FrameKind, reply: &Reply) -> Result<(), SessionError> {
        self.channel.send(kind, &reply.encode())
    }

    fn count(&self, op: Op, bytes: u64) {
        self.environment.counters.traffic(TransportKind::Tcp).count_served(op, bytes);
    }

    /// Sends what waits; true when there is room for more replies.
    fn flush(&mut self, budget: &mut u64) -> Result<bool, SessionError> {
        let traffic = self.environment.counters.traffic(TransportKind::Tcp);
        let emptied = self.channel.flush(|bytes| {
            traffic.count_served(Op::Read, bytes);
            *budget = budget.saturating_sub(bytes);
        })?;
        if let Some(sends) = self.channel.zero_copy() {
            traffic.count_zero_copy(sends.take_bytes());
        }
        Ok(emptied || self.channel.backlog() < BACKLOG)
    }
}

impl Session for TcpServer {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        Some(self.channel.source())
    }

    fn drive(&mut self, _cause: Cause) -> Result<Flow, SessionError> {
        let mut budget = TURN;
        for _ in 0..STEPS {
            if !self.flush(&mut budget)? {
                return Ok(Flow::Wait);
            }
            if !self.step(&mut budget)? {
                // What the last step queued, and a payload that used the budget up, decide whether to come again.
                let emptied = self.flush(&mut budget)?;
                return Ok(if emptied && budget == 0 { Flow::Again } else { Flow::Wait });
            }
            if budget == 0 {
                break;
            }
        }
        Ok(Flow::Again)
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        if matches!(why, SessionError::Protocol(_)) {
            self.environment.counters.protocol_errors.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%why, "data session closed");
        }
    }
}
