//! A socket that matters for being open: who holds the other end, and how that ended.
//!
//! One byte may come before the end: the other side asks for what it lent. An end without it is the other side's own.

use std::io::{ErrorKind, Read};

use mio::net::UnixStream;

use crate::error::SessionError;
use crate::io::{Cause, Flow, Session};

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The other side asked for it.
    Recalled,
    /// The other side closed, shut down or died.
    Gone,
    /// This side's agent stops.
    Stopped,
}

/// Hears the end, after this side's socket was closed.
pub(super) type Ended = Box<dyn FnOnce(End) + Send>;

/// See the head of this file.
pub(super) struct Watch {
    stream: UnixStream,
    asked: bool,
    ended: Ended,
}

impl Watch {
    pub(super) fn new(stream: UnixStream, ended: Ended) -> Box<Self> {
        Box::new(Self { stream, asked: false, ended })
    }
}

impl Session for Watch {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        Some(&mut self.stream)
    }

    fn drive(&mut self, _cause: Cause) -> Result<Flow, SessionError> {
        match self.stream.read(&mut [0; 64]) {
            Ok(0) => Err(SessionError::Lost("the other side let go".into())),
            Ok(_) => {
                self.asked = true;
                Ok(Flow::Again)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Flow::Wait),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Flow::Again),
            Err(error) => Err(error.into()),
        }
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        let Self { stream, asked, ended } = *self;
        drop(stream);
        ended(match (why, asked) {
            (SessionError::Lost(_), true) => End::Recalled,
            (SessionError::Lost(_), false) => End::Gone,
            _ => End::Stopped,
        });
    }
}
