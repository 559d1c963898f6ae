//! The asking side of one data stream.
//!
//! Requests are pipelined: up to [`ASKED`] are at the owner, the rest wait in the path's mailbox, from which each stream
//! takes when it has room; so a slow stream gets less. Replies come in order. A read's payload is received straight
//! into the slice's extents; a slice completes after the last byte, and lets go of the memory before that. A write
//! whose payload the kernel does not copy completes when the kernel is done with it too. When the session ends the socket is closed
//! first, then the slices complete.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use towline_wire::frame::{FrameKind, Reply, Request, Status};
use towline_wire::receipt::{Op, TransportKind};

use super::path::{Opening, Shared};
use crate::control::{check_card, request_card};
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, ReaderIndex, Session};
use crate::region::Payload;
use crate::transport::{Moved, PathError, Slice};

/// Requests at the owner at a time: 8 MiB a stream, more than what loopback or a stream of 25 Gbit/s and 2 ms holds, and
/// little enough that several streams share one transfer's window.
const ASKED: usize = 4;

/// Payload bytes received in one turn before other sessions get theirs.
const TURN: u64 = 8 << 20;

/// Payloads up to this are read together with their replies: what one system call costs copies some 10 KB.
const SMALL_BYTES: u64 = 8 << 10;

/// A small payload and its reply.
const AHEAD_BYTES: usize = 8 << 10 | 256;

/// See the head of this file.
pub(super) struct TcpClient {
    channel: Channel,
    path: Arc<Shared>,
    reader: ReaderIndex,
    opening: Option<Opening>,
    /// Its number among the path's rails, once open.
    rail: usize,
    asked: VecDeque<(u64, Slice)>,
    receiving: Option<Payload>,
    /// Writes that were answered, each with how many zero-copy sends must be completed before it is.
    answered: VecDeque<(u64, Slice, Result<Moved, PathError>)>,
    next_call: u64,
    /// Payload bytes that the socket took, and how many of them belong to writes that were answered.
    sent: u64,
    settled: u64,
}

impl TcpClient {
    /// Over an authenticated channel; asks for the card first, whose identity must be the expected one.
    ///
    /// # Errors
    /// [`SessionError`], with the opening untouched, when the request can't be sent.
    pub(super) fn open(
        mut channel: Channel,
        (path, reader): (Arc<Shared>, ReaderIndex),
        opening: Opening,
    ) -> Result<Box<Self>, (SessionError, Opening)> {
        if let Err(why) = request_card(&mut channel, 1) {
            return Err((why, opening));
        }
        channel.avoid_copies();
        Ok(Box::new(Self {
            channel,
            path,
            reader,
            opening: Some(opening),
            rail: 0,
            asked: VecDeque::new(),
            receiving: None,
            answered: VecDeque::new(),
            next_call: 1,
            sent: 0,
            settled: 0,
        }))
    }

    /// Requests for what waits, as far as the window allows.
    fn ask(&mut self) -> Result<(), SessionError> {
        while self.asked.len() < ASKED {
            let Some(slice) = self.path.mailbox.take(self.reader) else { return Ok(()) };
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
            self.complete(Ok(Moved { bytes: moved, rail: self.rail }));
            return Ok(true);
        }
        let small = self.asked.front().is_none_or(|(_, slice)| slice.bytes() <= SMALL_BYTES);
        self.channel.read_ahead(if small { AHEAD_BYTES } else { 0 });
        let Some((kind, body)) = self.channel.next_frame()? else { return Ok(false) };
        match self.opening.take() {
            None => self.handle_reply(kind, &body)?,
            Some(opening) => match check_card(kind, &body, &self.path.expected) {
                Ok(()) => {
                    self.rail = self.path.add_rail(self.channel.socket().describe());
                    opening.succeed();
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
            Ok(Moved { bytes: counted, rail: self.rail })
        } else {
            Err(PathError::Refused(reply.status))
        });
        Ok(())
    }

    fn complete(&mut self, outcome: Result<Moved, PathError>) {
        let Some((_, slice)) = self.asked.pop_front() else { return };
        match self.channel.zero_copy().map(|sends| (sends.sent(), sends.completed())) {
            Some((sent, completed)) if slice.op() == Op::Write && completed < sent => {
                self.answered.push_back((sent, slice, outcome));
            }
            _ => slice.complete(outcome),
        }
    }

    /// Sends what waits, and completes what waited for the kernel.
    fn flush(&mut self) -> Result<(), SessionError> {
        let sent = &mut self.sent;
        self.channel.flush(|bytes| *sent += bytes)?;
        let Some(sends) = self.channel.zero_copy() else { return Ok(()) };
        self.path.environment.counters.traffic(TransportKind::Tcp).count_zero_copy(sends.take_bytes());
        let completed = sends.completed();
        while let Some((_, slice, outcome)) = self.answered.pop_front_if(|(until, ..)| *until <= completed) {
            slice.complete(outcome);
        }
        Ok(())
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
        self.path.mailbox.check_open()?;
        if cause == Cause::Deadline && self.opening.is_some() {
            return Err(SessionError::Deadline);
        }
        let mut budget = TURN;
        loop {
            if self.opening.is_none() {
                self.ask()?;
            }
            self.flush()?;
            if !self.step(&mut budget)? {
                return Ok(if budget == 0 { Flow::Again } else { Flow::Wait });
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.opening.as_ref().map(|opening| opening.until)
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        let Self { channel, path, opening, asked, receiving, answered, .. } = *self;
        // Nothing reads or writes the slices' memory from here on.
        drop((channel, receiving));
        if let Some(opening) = opening {
            return opening.fail(&path, why);
        }
        let waiting = path.mailbox.shut(&why);
        let error = PathError::from(why);
        path.events.handle_down(&error);
        let (asked, answered) =
            (asked.into_iter().map(|(_, slice)| slice), answered.into_iter().map(|(_, slice, _)| slice));
        for slice in answered.chain(asked).chain(waiting) {
            slice.complete(Err(error.clone()));
        }
    }
}
