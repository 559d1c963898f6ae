//! The accepting side of a handshake.
//!
//! Nothing is allocated beyond the fixed messages (40, 42 and at most 128 bytes), nothing is said but the challenge,
//! and it is over within 2 s, whatever the stranger does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use towline_wire::auth::{AUTH_HEAD_BYTES, AuthError, HELLO_BYTES, Identity, Purpose, Server};

use super::server::ControlServer;
use crate::agent::{Environment, Seat};
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, Role, Session, SessionId, Socket};
use crate::transport::{shm, tcp};

/// Time for a handshake: three messages, so hundreds of times a slow network's round trip.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);

enum Stage {
    Hello,
    Auth(Server),
    Name(Server, [u8; AUTH_HEAD_BYTES]),
    Over,
}

/// A connection that has not proved itself.
pub(super) struct Greeting {
    channel: Option<Channel>,
    stage: Stage,
    environment: Arc<Environment>,
    until: Instant,
    /// Kept by the control session that it becomes.
    id: SessionId,
    seat: Option<Seat>,
}

impl Greeting {
    pub(super) fn new(socket: Socket, environment: &Arc<Environment>, (id, seat): (SessionId, Seat)) -> Self {
        Self {
            channel: Some(Channel::new(socket)),
            stage: Stage::Hello,
            environment: Arc::clone(environment),
            until: Instant::now() + HANDSHAKE,
            id,
            seat: Some(seat),
        }
    }

    /// One message; `None` when the socket has no whole one.
    fn step(&mut self) -> Result<Option<Flow>, SessionError> {
        let channel = self.channel.as_mut().ok_or(SessionError::Closed("greeted already"))?;
        let malformed = || SessionError::from(AuthError::Malformed);
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Hello => match channel.read_exact(HELLO_BYTES)? {
                None => self.stage = Stage::Hello,
                Some(hello) => {
                    let hello = hello.try_into().map_err(|_| malformed())?;
                    let nonce = crate::agent::random()?;
                    let (server, challenge) =
                        Server::handle_hello(self.environment.key.clone(), hello, nonce)?;
                    channel.queue(challenge.to_vec());
                    self.stage = Stage::Auth(server);
                    return Ok(Some(Flow::Again));
                }
            },
            Stage::Auth(server) => match channel.read_exact(AUTH_HEAD_BYTES)? {
                None => self.stage = Stage::Auth(server),
                Some(head) => {
                    self.stage = Stage::Name(server, head.try_into().map_err(|_| malformed())?);
                    return Ok(Some(Flow::Again));
                }
            },
            Stage::Name(server, head) => match channel.read_exact(Server::auth_name_len(&head)?)? {
                None => self.stage = Stage::Name(server, head),
                Some(name) => return self.admit(server, (&head, &name)).map(Some),
            },
            Stage::Over => {}
        }
        Ok(None)
    }

    fn admit(
        &mut self,
        server: Server,
        (head, name): (&[u8; AUTH_HEAD_BYTES], &[u8]),
    ) -> Result<Flow, SessionError> {
        let purpose = server.purpose();
        let (peer, keys) = server.handle_auth(head, name)?;
        let limit = self.environment.limits.sessions;
        let seat = Seat::take(&self.environment.counters.sessions, limit);
        let seat = seat.ok_or(SessionError::Closed("as many sessions as there may be"))?;
        let mut channel = self.channel.take().ok_or(SessionError::Closed("greeted already"))?;
        channel.socket().tune()?;
        channel.secure(&keys, Role::Server);
        self.seat = None;
        let streams = purpose == Purpose::Data && !channel.socket().is_unix();
        let session = self.serve(channel, (purpose, peer), seat)?;
        Ok(match streams {
            true => Flow::Move(session, Arc::clone(self.environment.next_lane())),
            false => Flow::Become(session),
        })
    }

    fn serve(
        &self,
        channel: Channel,
        (purpose, peer): (Purpose, Identity),
        seat: Seat,
    ) -> Result<Box<dyn Session>, SessionError> {
        let environment = &self.environment;
        match (purpose, channel.socket().is_unix()) {
            (Purpose::Control, false) => {
                Ok(Box::new(ControlServer::new(channel, environment, (self.id, peer, seat))))
            }
            (Purpose::Data, true) => Ok(shm::serve(channel, environment, seat)),
            (Purpose::Data, false) if environment.tcp => Ok(tcp::serve(channel, environment, seat)),
            _ => Err(SessionError::Closed("the transport is off")),
        }
    }
}

impl Session for Greeting {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        self.channel.as_mut().map(Channel::source)
    }

    fn drive(&mut self, cause: Cause) -> Result<Flow, SessionError> {
        if cause == Cause::Deadline {
            return Err(SessionError::Deadline);
        }
        loop {
            let step = self.step()?;
            if let Some(channel) = &mut self.channel {
                channel.flush(|_| {})?;
            }
            match step {
                None => return Ok(Flow::Wait),
                Some(Flow::Again) => {}
                Some(flow) => return Ok(flow),
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        Some(self.until)
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        self.environment.counters.handshakes_refused.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(%why, "a connection did not prove itself");
    }
}
