//! The control session to a peer: calls that are answered, messages that are not, and news of its card.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_wire::auth::Purpose;
use towline_wire::control::{Body, decode, encode, v1};
use towline_wire::engine_card::EngineCard;
use towline_wire::frame::FrameKind;

use super::{Dialling, Welcome, request_card};
use crate::agent::Environment;
use crate::error::{ControlError, SessionError};
use crate::io::{Cause, Channel, Flow, Mailbox, ReaderIndex, Refusal, Session, Socket};
use crate::pending::Completer;

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

/// Who waits for an answer.
enum Answer {
    Done(Completer<Result<(), ControlError>>),
    EngineCard(Completer<Result<EngineCard, ControlError>>),
}

impl Answer {
    fn fail(self, error: ControlError) {
        match self {
            Self::Done(answer) => _ = answer.complete(Err(error)),
            Self::EngineCard(answer) => _ = answer.complete(Err(error)),
        }
    }

    /// Brings what the peer said.
    ///
    /// # Errors
    /// [`SessionError::Protocol`] when that answers another question.
    fn bring(self, body: Body) -> Result<(), SessionError> {
        match (self, body) {
            (answer, Body::Refused(v1::Refused { code, message })) => {
                let shorten = |text: String| text.chars().take(200).collect();
                answer.fail(ControlError::Refused { code: shorten(code), message: shorten(message) });
            }
            (Self::Done(answer), Body::Done(_)) => _ = answer.complete(Ok(())),
            (Self::EngineCard(answer), Body::EngineCard(card)) => {
                let card =
                    EngineCard::from_wire(card).map_err(|error| ControlError::EngineCard(Box::new(error)));
                answer.complete(card);
            }
            (answer, _) => {
                let reason = "the peer answered another question".to_owned();
                answer.fail(ControlError::Unreachable { reason: reason.clone() });
                return Err(SessionError::Protocol(reason));
            }
        }
        Ok(())
    }
}

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

    /// Sends a message that is answered within 5 s, to `answer`.
    pub(crate) fn call(&self, body: Body, answer: Completer<Result<(), ControlError>>) {
        self.ask(body, Answer::Done(answer));
    }

    /// Asks for the engine's card, likewise.
    pub(crate) fn ask_engine_card(&self, answer: Completer<Result<EngineCard, ControlError>>) {
        self.ask(Body::EngineCardRequest(v1::EngineCardRequest {}), Answer::EngineCard(answer));
    }

    fn ask(&self, body: Body, answer: Answer) {
        if let Err((letter, refusal)) = self.mailbox.push(Letter { body, answer: Some(answer) })
            && let Some(answer) = letter.answer
        {
            answer.fail(explain(refusal));
        }
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

/// Who hears what a session says unasked, and its end. Called on its io thread.
pub(crate) trait LinkEvents: Send + Sync {
    /// A later state of the peer's card.
    ///
    /// # Errors
    /// [`SessionError::Protocol`] when it breaks the rules: the session ends.
    fn handle_card(&self, card: v1::Card) -> Result<(), SessionError>;

    /// The end of a session that was open.
    fn handle_ended(&self, why: &SessionError);
}

/// Dials the control session. `opened` gets it, or why there is none, by `until`; `events` hears what comes later.
pub(crate) fn open_control(
    environment: &Arc<Environment>,
    (address, until): (SocketAddr, Instant),
    opened: Opened,
    events: Arc<dyn LinkEvents>,
) {
    let socket = match Socket::connect(address) {
        Ok(socket) => socket,
        Err(error) => return opened(Err(error.into())),
    };
    let id = environment.io.reserve();
    let mailbox = Mailbox::new(LETTERS);
    let reader = mailbox.join(&environment.io, id);
    let welcome = Box::new(Opening { mailbox, reader, opened, events, until });
    environment.io.spawn_at(id, Dialling::new(socket, environment, (Purpose::Control, until), welcome));
}

struct Opening {
    mailbox: Arc<Mailbox<Letter>>,
    reader: ReaderIndex,
    opened: Opened,
    events: Arc<dyn LinkEvents>,
    until: Instant,
}

impl Welcome for Opening {
    fn proceed(self: Box<Self>, mut channel: Channel) -> Result<Box<dyn Session>, SessionError> {
        let sent = request_card(&mut channel, CARD_CALL);
        let Self { mailbox, reader, opened, events, until } = *self;
        if let Err(why) = sent {
            opened(Err(why.clone()));
            return Err(why);
        }
        Ok(Box::new(ControlClient {
            channel,
            mailbox,
            reader,
            opening: Some((opened, until)),
            events,
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
    events: Arc<dyn LinkEvents>,
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
            // News, asked for or not: a card that was sent is not sent again.
            (Body::Card(card), None) => {
                self.events.handle_card(card)?;
                self.answer(number, Body::Done(v1::Done {}))
            }
            (body @ (Body::Done(_) | Body::EngineCard(_) | Body::Refused(_)), None) => {
                self.answer(number, body)
            }
            (_, None) => Err(SessionError::Protocol("a question where answers are expected".into())),
        }
    }

    fn answer(&mut self, number: u64, body: Body) -> Result<(), SessionError> {
        // Not found: nobody asked, or it came too late.
        let at = self.calls.iter().position(|call| call.number == number);
        at.and_then(|at| self.calls.remove(at)).map_or(Ok(()), |call| call.answer.bring(body))
    }

    fn expire(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        if self.opening.as_ref().is_some_and(|(_, until)| *until <= now) {
            return Err(SessionError::Deadline);
        }
        while self.calls.front().is_some_and(|call| call.until <= now) {
            if let Some(call) = self.calls.pop_front() {
                call.answer.fail(ControlError::Stalled { deadline: CALL });
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
        let Self { channel, mailbox, opening, events, calls, .. } = *self;
        drop(channel);
        match opening {
            Some((opened, _)) => opened(Err(why.clone())),
            None => events.handle_ended(&why),
        }
        let waiting = mailbox.shut(&why).into_iter().filter_map(|letter| letter.answer);
        for answer in waiting.chain(calls.into_iter().map(|call| call.answer)) {
            answer.fail(ControlError::Unreachable { reason: why.to_string() });
        }
    }
}
