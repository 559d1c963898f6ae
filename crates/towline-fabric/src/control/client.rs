//! The control session to a peer: calls that are answered, messages that are not.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_wire::auth::Purpose;
use towline_wire::control::{Body, decode, encode, v1};
use towline_wire::frame::FrameKind;

use super::{Dialling, Welcome, request_card};
use crate::agent::Environment;
use crate::error::{ControlError, SessionError};
use crate::io::{Cause, Channel, Flow, Mailbox, ReaderIndex, Refusal, Session, Socket};
use crate::pending::{Completer, Pending, pending};

/// Messages that may wait to be sent: 16 MiB of the longest notifications, thousands of releases.
const LETTERS: usize = 1024;

/// Time for an answer; the owner answers from its io thread, so this is a hundred slow round trips.
const CALL: Duration = Duration::from_secs(5);

/// Frames that may wait in the channel before more are taken from the mailbox.
const BACKLOG: usize = 16;

/// Frames handled in one turn before other sessions get theirs.
const TURN: usize = 64;

/// Number of the call for the card, before any other.
const CARD_CALL: u64 = 1;

type Answer = Completer<Result<(), ControlError>>;

struct Letter {
    body: Body,
    answer: Option<Answer>,
}

/// The handle to a control session. Dropping it closes the session.
pub(crate) struct Link {
    mailbox: Arc<Mailbox<Letter>>,
}

impl Link {
    /// Sends a message that has no answer.
    ///
    /// # Errors
    /// [`ControlError::Full`], [`ControlError::Unreachable`].
    pub(crate) fn send(&self, body: Body) -> Result<(), ControlError> {
        self.mailbox.push(Letter { body, answer: None }).map_err(|(_, refusal)| explain(refusal))
    }

    /// Sends a message and gives its answer, within 5 s.
    pub(crate) fn call(&self, body: Body) -> Pending<Result<(), ControlError>> {
        let (answer, pending) =
            pending(|| Err(ControlError::Unreachable { reason: "the session ended".into() }));
        if let Err((letter, refusal)) = self.mailbox.push(Letter { body, answer: Some(answer) })
            && let Some(answer) = letter.answer
        {
            answer.complete(Err(explain(refusal)));
        }
        pending
    }

    /// Ends the session.
    pub(crate) fn close(&self) {
        self.mailbox.close();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

fn explain(refusal: Refusal) -> ControlError {
    match refusal {
        Refusal::Full => ControlError::Full { reason: "1024 messages wait already" },
        Refusal::Shut(why) => ControlError::Unreachable { reason: why.to_string() },
    }
}

/// What a control session brings when it opens.
pub(crate) struct Dialled {
    pub(crate) link: Arc<Link>,
    pub(crate) card: v1::Card,
}

type Opened = Box<dyn FnOnce(Result<Dialled, SessionError>) + Send>;
type Ended = Box<dyn FnOnce(&SessionError) + Send>;

/// Dials the control session. `opened` gets it, or why there is none, by `until`; `ended` hears when it ends later.
pub(crate) fn open_control(
    environment: &Arc<Environment>,
    (address, until): (SocketAddr, Instant),
    opened: Opened,
    ended: Ended,
) {
    let socket = match Socket::connect(address) {
        Ok(socket) => socket,
        Err(error) => return opened(Err(error.into())),
    };
    let id = environment.io.reserve();
    let mailbox = Mailbox::new(LETTERS);
    let reader = mailbox.join(&environment.io, id);
    let welcome = Box::new(Opening { mailbox, reader, opened, ended, until });
    environment.io.spawn_at(id, Dialling::new(socket, environment, (Purpose::Control, until), welcome));
}

struct Opening {
    mailbox: Arc<Mailbox<Letter>>,
    reader: ReaderIndex,
    opened: Opened,
    ended: Ended,
    until: Instant,
}

impl Welcome for Opening {
    fn proceed(self: Box<Self>, mut channel: Channel) -> Result<Box<dyn Session>, SessionError> {
        let sent = request_card(&mut channel, CARD_CALL);
        let Self { mailbox, reader, opened, ended, until } = *self;
        if let Err(why) = sent {
            opened(Err(why.clone()));
            return Err(why);
        }
        Ok(Box::new(ControlClient {
            channel,
            mailbox,
            reader,
            opening: Some((opened, until)),
            ended: Some(ended),
            calls: VecDeque::new(),
            next_call: CARD_CALL + 1,
        }))
    }

    fn handle_failed(self: Box<Self>, why: SessionError) {
        (self.opened)(Err(why));
    }
}

struct Call {
    number: u64,
    until: Instant,
    answer: Answer,
}

struct ControlClient {
    channel: Channel,
    mailbox: Arc<Mailbox<Letter>>,
    reader: ReaderIndex,
    opening: Option<(Opened, Instant)>,
    ended: Option<Ended>,
    /// In the order asked, so also in the order of their deadlines.
    calls: VecDeque<Call>,
    next_call: u64,
}

impl ControlClient {
    fn send_letters(&mut self) -> Result<(), SessionError> {
        while self.channel.flush(|_| {})? || self.channel.backlog() < BACKLOG {
            let Some(Letter { body, answer }) = self.mailbox.take(self.reader) else { return Ok(()) };
            let number = if answer.is_some() { self.next_call } else { 0 };
            self.channel.send(FrameKind::Control, &encode(number, body))?;
            if let Some(answer) = answer {
                self.next_call += 1;
                self.calls.push_back(Call { number, until: Instant::now() + CALL, answer });
            }
        }
        Ok(())
    }

    fn handle(&mut self, kind: FrameKind, body: &[u8]) -> Result<(), SessionError> {
        if kind != FrameKind::Control {
            return Err(SessionError::Protocol("a data frame on a control session".into()));
        }
        let (number, body) = decode(body)?;
        match (body, self.opening.take()) {
            (Body::Card(card), Some((opened, _))) if number == CARD_CALL => {
                let link = Arc::new(Link { mailbox: Arc::clone(&self.mailbox) });
                opened(Ok(Dialled { link, card }));
                Ok(())
            }
            (_, Some(opening)) => {
                self.opening = Some(opening);
                Err(SessionError::Protocol("no card where one was asked for".into()))
            }
            (Body::Done(_) | Body::Card(_), None) => {
                self.answer(number, Ok(()));
                Ok(())
            }
            (Body::Refused(v1::Refused { code, message }), None) => {
                let shorten = |text: String| text.chars().take(200).collect();
                self.answer(
                    number,
                    Err(ControlError::Refused { code: shorten(code), message: shorten(message) }),
                );
                Ok(())
            }
            _ => Err(SessionError::Protocol("a question where answers are expected".into())),
        }
    }

    fn answer(&mut self, number: u64, outcome: Result<(), ControlError>) {
        // Not found: it came too late.
        let at = self.calls.iter().position(|call| call.number == number);
        if let Some(call) = at.and_then(|at| self.calls.remove(at)) {
            call.answer.complete(outcome);
        }
    }

    fn expire(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        if self.opening.as_ref().is_some_and(|(_, until)| *until <= now) {
            return Err(SessionError::Deadline);
        }
        while self.calls.front().is_some_and(|call| call.until <= now) {
            if let Some(call) = self.calls.pop_front() {
                call.answer.complete(Err(ControlError::Stalled { deadline: CALL }));
            }
        }
        Ok(())
    }
}

impl Session for ControlClient {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        Some(self.channel.source())
    }

    fn drive(&mut self, cause: Cause) -> Result<Flow, SessionError> {
        self.mailbox.check_open()?;
        if cause == Cause::Deadline {
            self.expire()?;
        }
        for _ in 0..TURN {
            self.send_letters()?;
            let Some((kind, body)) = self.channel.next_frame()? else { return Ok(Flow::Wait) };
            self.handle(kind, &body)?;
        }
        Ok(Flow::Again)
    }

    fn deadline(&self) -> Option<Instant> {
        let opening = self.opening.as_ref().map(|(_, until)| *until);
        opening.or_else(|| self.calls.front().map(|call| call.until))
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        let Self { channel, mailbox, opening, ended, calls, .. } = *self;
        drop(channel);
        if let Some((opened, _)) = opening {
            opened(Err(why.clone()));
        }
        let waiting = mailbox.shut(&why).into_iter().filter_map(|letter| letter.answer);
        for answer in waiting.chain(calls.into_iter().map(|call| call.answer)) {
            answer.complete(Err(ControlError::Unreachable { reason: why.to_string() }));
        }
        if let Some(ended) = ended {
            ended(&why);
        }
    }
}
