//! Accepts connections, within bounds.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, UnixListener};

use super::greeting::Greeting;
use crate::agent::{Environment, Seat};
use crate::error::{SessionError, StartError};
use crate::io::{Cause, Flow, Session, Socket};

/// Connections accepted in one turn, so that a flood does not keep the sessions waiting.
const ACCEPTS: usize = 32;

/// Pause after the process ran out of files: epoll will not tell again, and files come back slowly.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(200);

/// The listening port of an agent.
pub(crate) struct Listener(TcpListener);

impl Listener {
    /// Binds; answers with the address bound.
    ///
    /// # Errors
    /// [`StartError::Listen`].
    pub(crate) fn bind(address: SocketAddr) -> Result<(Self, SocketAddr), StartError> {
        let failed = |error| StartError::Listen { address, error };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        Ok((Self(listener), bound))
    }

    /// As a session.
    pub(crate) fn serve(self, environment: &Arc<Environment>) -> Box<dyn Session> {
        Box::new(Accepting { from: Source::Tcp(self.0), environment: Arc::clone(environment), again: None })
    }
}

/// A Unix listener as a session: data sessions of shared memory only.
pub(crate) struct ServeUnix;

impl ServeUnix {
    /// `guard` is dropped when the listener is.
    pub(crate) fn serve(
        listener: UnixListener,
        environment: &Arc<Environment>,
        guard: Box<dyn Send>,
    ) -> Box<dyn Session> {
        let from = Source::Unix { listener, _guard: guard };
        Box::new(Accepting { from, environment: Arc::clone(environment), again: None })
    }
}

enum Source {
    Tcp(TcpListener),
    Unix { listener: UnixListener, _guard: Box<dyn Send> },
}

struct Accepting {
    from: Source,
    environment: Arc<Environment>,
    again: Option<Instant>,
}

impl Accepting {
    fn accept(&self) -> std::io::Result<Socket> {
        match &self.from {
            Source::Tcp(listener) => listener.accept().map(|(stream, _)| Socket::Tcp(stream)),
            Source::Unix { listener, .. } => listener.accept().map(|(stream, _)| Socket::Unix(stream)),
        }
    }

    fn greet(&self, socket: Socket) {
        let counters = &self.environment.counters;
        match Seat::take(&counters.unauthenticated, self.environment.limits.unauthenticated) {
            Some(seat) => {
                let id = self.environment.io.reserve();
                let greeting = Greeting::new(socket, &self.environment, (id, seat));
                self.environment.io.spawn_at(id, Box::new(greeting));
            }
            None => drop(counters.handshakes_refused.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

impl Session for Accepting {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        match &mut self.from {
            Source::Tcp(listener) => Some(listener),
            Source::Unix { listener, .. } => Some(listener),
        }
    }

    fn drive(&mut self, _cause: Cause) -> Result<Flow, SessionError> {
        self.again = None;
        for _ in 0..ACCEPTS {
            match self.accept() {
                Ok(socket) => self.greet(socket),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(Flow::Wait),
                // The peer gave up between connecting and accepting.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "accept failed; trying again");
                    self.again = Some(Instant::now() + EXHAUSTED_PAUSE);
                    return Ok(Flow::Wait);
                }
            }
        }
        Ok(Flow::Again)
    }

    fn deadline(&self) -> Option<Instant> {
        self.again
    }

    fn handle_closed(self: Box<Self>, _why: SessionError) {}
}
