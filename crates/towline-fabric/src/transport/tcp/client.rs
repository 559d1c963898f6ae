//! The asking side of a data connection.
//!
//! Requests are pipelined: up to [`ASKED`] are at the owner, the rest wait in the mailbox. Replies come in order. A
//! read's payload is received straight into the slice's extents; a slice completes after the last byte, and lets go of
//! the memory before that. When the session ends the socket is closed first, then the slices complete.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use towline_wire::auth::{Identity, Purpose};
use towline_wire::frame::{FrameKind, Reply, Request, Status};
use towline_wire::receipt::{Evidence, EvidenceClass, Op, TransportKind};

use crate::agent::Environment;
use crate::control::{Dialling, Welcome, check_card, request_card};
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, Mailbox, Refusal, Session, Socket};
use crate::region::Payload;
use crate::transport::{Opened, Path, PathError, PathEvents, PeerAddress, Slice};

/// Requests at the owner at a time: 32 MiB, several times what loopback or a 100 Gbit/s link of 1 ms holds.
const ASKED: usize = 16;

/// Payload bytes received in one turn before other sessions get theirs.
const TURN: u64 = 8 << 20;

pub(super) fn connect(environment: &Arc<Environment>, peer: &PeerAddress, opened: Opened) {
    if peer.card.endpoint(TransportKind::Tcp).is_none() {
        return opened(Err(PathError::Unfit("the peer does not offer it".into())));
    }
    let socket = match Socket::connect(peer.socket) {
        Ok(socket) => socket,
        Err(error) => return opened(Err(PathError::Down(error.to_string()))),
    };
    let id = environment.io.reserve();
    // Bounded by what the agent's transfers may have in flight together.
    let mailbox = Mailbox::new(&environment.io, id, environment.limits.transfers.saturating_mul(16));
    let expected = Identity { agent: peer.card.agent.clone(), boot_epoch: peer.card.boot_epoch };
    let opening = Opening { expected, opened, until: peer.until };
    let welcome = Box::new(Connected { opening, mailbox, events: Arc::clone(&peer.events) });
    environment.io.spawn_at(id, Dialling::new(socket, environment, (Purpose::Data, peer.until), welcome));
}

struct TcpPath {
    mailbox: Arc<Mailbox<Slice>>,
    rail: String,
}

impl Path for TcpPath {
    fn evidence(&self) -> Evidence {
        Evidence { class: EvidenceClass::LibraryExact, source: "socket".into() }
    }

    fn rail(&self) -> String {
        self.rail.clone()
    }

    fn post(&self, slice: Slice) {
        if let Err((slice, refusal)) = self.mailbox.push(slice) {
            let error = match refusal {
                Refusal::Full => PathError::Down("its queue is full".into()),
                Refusal::Shut(why) => why.into(),
            };
            slice.complete(Err(error));
        }
    }

    fn close(&self) {
        self.mailbox.close();
    }
}

struct Opening {
    expected: Identity,
    opened: Opened,
    until: Instant,
}

struct Connected {
    opening: Opening,
    mailbox: Arc<Mailbox<Slice>>,
    events: Arc<dyn PathEvents>,
}

impl Welcome for Connected {
    fn proceed(self: Box<Self>, mut channel: Channel) -> Result<Box<dyn Session>, SessionError> {
        if let Err(why) = request_card(&mut channel, 1) {
            self.handle_failed(why.clone());
            return Err(why);
        }
        let Self { opening, mailbox, events } = *self;
        Ok(Box::new(TcpClient {
            channel,
            mailbox,
            events,
            opening: Some(opening),
            asked: VecDeque::new(),
            receiving: None,
            next_call: 1,
            sent: 0,
            settled: 0,
        }))
    }

    fn handle_failed(self: Box<Self>, why: SessionError) {
        self.mailbox.shut(&why);
        (self.opening.opened)(Err(why.into()));
    }
}

struct TcpClient {
    channel: Channel,
    mailbox: Arc<Mailbox<Slice>>,
    events: Arc<dyn PathEvents>,
    opening: Option<Opening>,
    asked: VecDeque<(u64, Slice)>,
    receiving: Option<Payload>,
    next_call: u64,
    /// Payload bytes that the socket took, and how many of them belong to writes that were answered.
    sent: u64,
    settled: u64,
}

impl TcpClient {
    /// Requests for what waits, as far as the window allows.
    fn ask(&mut self) -> Result<(), SessionError> {
        while self.asked.len() < ASKED {
            let Some(slice) = self.mailbox.take() else { return Ok(()) };
            if !slice.is_wanted() {
                slice.complete(Err(PathError::Unwanted));
                continue;
            }
            let call = self.next_call;
            self.next_call += 1;
            let extents = slice.remote_extents();
            let body = Request { call, region: slice.region(), lease: slice.lease(), extents }.encode()?;
            match slice.op() {
                Op::Read => self.channel.send(FrameKind::Read, &body)?,
                Op::Write => {
                    let payload = payload(&slice, Payload::outgoing)?;
                    self.channel.send(FrameKind::Write, &body)?;
                    self.channel.send_payload(payload);
                }
            }
            self.asked.push_back((call, slice));
        }
        Ok(())
    }

    /// One frame or one piece of payload; false when the socket has nothing more now.
    fn step(&mut self, budget: &mut u64) -> Result<bool, SessionError> {
        if let Some(payload) = &mut self.receiving {
            if !self.channel.receive(payload, budget)? {
                return Ok(false);
            }
            let moved = payload.moved();
            self.receiving = None;
            self.complete(Ok(moved));
            return Ok(true);
        }
        let Some((kind, body)) = self.channel.next_frame()? else { return Ok(false) };
        match self.opening.take() {
            None => self.handle_reply(kind, &body)?,
            Some(opening) => match check_card(kind, &body, &opening.expected) {
                Ok(()) => {
                    let path = TcpPath {
                        mailbox: Arc::clone(&self.mailbox),
                        rail: self.channel.socket().describe(),
                    };
                    (opening.opened)(Ok(Arc::new(path)));
                }
                Err(why) => {
                    self.opening = Some(opening);
                    return Err(why);
                }
            },
        }
        Ok(true)
    }

    fn handle_reply(&mut self, kind: FrameKind, body: &[u8]) -> Result<(), SessionError> {
        let reply = Reply::decode(body)?;
        let protocol = |what: &str| Err(SessionError::Protocol(what.into()));
        let Some((call, slice)) = self.asked.front() else { return protocol("a reply to nothing") };
        let expected = if slice.op() == Op::Read { FrameKind::ReadReply } else { FrameKind::WriteReply };
        if *call != reply.call || kind != expected {
            return protocol("a reply to another request than the oldest");
        }
        let bytes = slice.bytes();
        if reply.status == Status::Ok && reply.len != bytes {
            return protocol("a reply with another length than asked for");
        }
        let receives = kind == FrameKind::ReadReply && reply.status == Status::Ok;
        if receives {
            self.receiving = Some(payload(slice, Payload::incoming)?);
            return Ok(());
        }
        let mut counted = 0;
        if kind == FrameKind::WriteReply {
            // Payloads leave in order, so what the socket took beyond earlier writes is this one's. Only when it took
            // everything may the memory be let go of.
            counted = self.sent.saturating_sub(self.settled).min(bytes);
            self.settled += counted;
            if counted != bytes {
                return protocol("a reply to a write before its bytes were sent");
            }
        }
        self.complete(if reply.status == Status::Ok {
            Ok(counted)
        } else {
            Err(PathError::Refused(reply.status))
        });
        Ok(())
    }

    fn complete(&mut self, outcome: Result<u64, PathError>) {
        if let Some((_, slice)) = self.asked.pop_front() {
            slice.complete(outcome);
        }
    }
}

type Direct =
    fn(Arc<crate::Memory>, Vec<towline_wire::blocks::Extent>) -> Result<Payload, crate::region::RangeError>;

/// The local side of a slice. The agent checked its ranges; a slice that lost its memory is a bug of this file.
fn payload(slice: &Slice, direction: Direct) -> Result<Payload, SessionError> {
    let local = slice.local().ok_or(SessionError::Closed("a slice was completed twice"))?;
    direction(Arc::clone(local), slice.local_extents()).map_err(|error| SessionError::Lost(error.to_string()))
}

impl Session for TcpClient {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        Some(self.channel.source())
    }

    fn drive(&mut self, cause: Cause) -> Result<Flow, SessionError> {
        self.mailbox.check_open()?;
        if cause == Cause::Deadline && self.opening.is_some() {
            return Err(SessionError::Deadline);
        }
        let mut budget = TURN;
        loop {
            if self.opening.is_none() {
                self.ask()?;
            }
            let sent = &mut self.sent;
            self.channel.flush(|bytes| *sent += bytes)?;
            if !self.step(&mut budget)? {
                return Ok(if budget == 0 { Flow::Again } else { Flow::Wait });
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.opening.as_ref().map(|opening| opening.until)
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        let Self { channel, mailbox, events, opening, asked, receiving, .. } = *self;
        // Nothing reads or writes the slices' memory from here on.
        drop((channel, receiving));
        let waiting = mailbox.shut(&why);
        let error = PathError::from(why);
        if opening.is_none() {
            events.handle_down(&error);
        }
        for slice in asked.into_iter().map(|(_, slice)| slice).chain(waiting) {
            slice.complete(Err(error.clone()));
        }
        if let Some(opening) = opening {
            (opening.opened)(Err(error));
        }
    }
}
