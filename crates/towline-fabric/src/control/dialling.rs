//! The connecting side of a handshake, for sessions of any purpose.

use std::sync::Arc;
use std::time::Instant;

use towline_wire::auth::{CHALLENGE_BYTES, Client, Purpose};

use crate::agent::{Environment, random};
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, Role, Session, Socket};

/// Where a handshake leads.
pub(crate) trait Welcome: Send {
    /// The session that goes on over the authenticated channel.
    ///
    /// # Errors
    /// [`SessionError`] ends it.
    fn proceed(self: Box<Self>, channel: Channel) -> Result<Box<dyn Session>, SessionError>;

    /// It came to nothing.
    fn handle_failed(self: Box<Self>, why: SessionError);
}

enum Stage {
    Connecting,
    Challenge(Client),
}

/// A connection whose other end has not proved itself.
pub(crate) struct Dialling {
    channel: Option<Channel>,
    stage: Option<Stage>,
    purpose: Purpose,
    environment: Arc<Environment>,
    until: Instant,
    welcome: Option<Box<dyn Welcome>>,
}

impl Dialling {
    pub(crate) fn new(
        socket: Socket,
        environment: &Arc<Environment>,
        (purpose, until): (Purpose, Instant),
        welcome: Box<dyn Welcome>,
    ) -> Box<Self> {
        Box::new(Self {
            channel: Some(Channel::new(socket)),
            stage: Some(Stage::Connecting),
            purpose,
            environment: Arc::clone(environment),
            until,
            welcome: Some(welcome),
        })
    }

    fn step(&mut self) -> Result<Flow, SessionError> {
        let gone = || SessionError::Closed("dialled already");
        let channel = self.channel.as_mut().ok_or_else(gone)?;
        let client = match self.stage.take() {
            None => return Err(gone()),
            Some(Stage::Challenge(client)) => client,
            Some(Stage::Connecting) => {
                if !channel.socket().check_connected()? {
                    self.stage = Some(Stage::Connecting);
                    return Ok(Flow::Wait);
                }
                channel.socket().tune()?;
                let (client, hello) = Client::start(self.environment.key.clone(), self.purpose, random()?);
                channel.queue(hello.to_vec());
                client
            }
        };
        channel.flush(|_| {})?;
        let Some(challenge) = channel.read_exact(CHALLENGE_BYTES)? else {
            self.stage = Some(Stage::Challenge(client));
            return Ok(Flow::Wait);
        };
        let challenge = challenge.try_into().map_err(|_| gone())?;
        let (auth, keys) = client.handle_challenge(&challenge, &self.environment.identity)?;
        channel.queue(auth);
        channel.secure(&keys, Role::Client);
        channel.flush(|_| {})?;
        let (channel, welcome) = self.channel.take().zip(self.welcome.take()).ok_or_else(gone)?;
        welcome.proceed(channel).map(Flow::Become)
    }
}

impl Session for Dialling {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        self.channel.as_mut().map(Channel::source)
    }

    fn drive(&mut self, cause: Cause) -> Result<Flow, SessionError> {
        if cause == Cause::Deadline { Err(SessionError::Deadline) } else { self.step() }
    }

    fn deadline(&self) -> Option<Instant> {
        Some(self.until)
    }

    fn handle_closed(mut self: Box<Self>, why: SessionError) {
        self.channel = None;
        if let Some(welcome) = self.welcome.take() {
            welcome.handle_failed(why);
        }
    }
}
