//! What other threads hand to a session.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Io, SessionId};
use crate::error::SessionError;

/// A bounded queue in front of one session. Pushing to an empty one pokes the session, which takes what it can; it
/// takes the rest by itself when it has room.
pub(crate) struct Mailbox<T> {
    io: Arc<Io>,
    session: SessionId,
    bound: usize,
    letters: Mutex<Letters<T>>,
}

struct Letters<T> {
    queue: VecDeque<T>,
    closing: bool,
    shut: Option<SessionError>,
}

/// Why something was not pushed.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    /// As many wait as may.
    Full,
    /// The session is gone.
    Shut(SessionError),
}

impl<T> Mailbox<T> {
    /// For the session of that id, for at most `bound` things.
    pub(crate) fn new(io: &Arc<Io>, session: SessionId, bound: usize) -> Arc<Self> {
        let letters = Mutex::new(Letters { queue: VecDeque::new(), closing: false, shut: None });
        Arc::new(Self { io: Arc::clone(io), session, bound, letters })
    }

    /// Hands something over, or gives it back with the reason.
    pub(crate) fn push(&self, letter: T) -> Result<(), (T, Refusal)> {
        let mut letters = self.lock();
        if let Some(why) = &letters.shut {
            let refusal = Refusal::Shut(why.clone());
            return Err((letter, refusal));
        }
        if letters.closing {
            return Err((letter, Refusal::Shut(SessionError::Closed("closed here"))));
        }
        if letters.queue.len() >= self.bound {
            return Err((letter, Refusal::Full));
        }
        letters.queue.push_back(letter);
        let first = letters.queue.len() == 1;
        drop(letters);
        if first {
            self.io.poke(self.session);
        }
        Ok(())
    }

    /// The oldest thing that waits.
    pub(crate) fn take(&self) -> Option<T> {
        self.lock().queue.pop_front()
    }

    /// Asks the session to end.
    pub(crate) fn close(&self) {
        let mut letters = self.lock();
        let first = !letters.closing && letters.shut.is_none();
        letters.closing = true;
        drop(letters);
        if first {
            self.io.poke(self.session);
        }
    }

    /// For the session: an error once it was asked to end.
    ///
    /// # Errors
    /// [`SessionError::Closed`].
    pub(crate) fn check_open(&self) -> Result<(), SessionError> {
        if self.lock().closing { Err(SessionError::Closed("closed here")) } else { Ok(()) }
    }

    /// For the session, when it ends: refuses what comes later, and gives what still waited.
    pub(crate) fn shut(&self, why: &SessionError) -> VecDeque<T> {
        let mut letters = self.lock();
        letters.shut = Some(why.clone());
        std::mem::take(&mut letters.queue)
    }

    fn lock(&self) -> MutexGuard<'_, Letters<T>> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Reactor;

    #[test]
    fn a_mailbox_is_bounded_keeps_order_and_refuses_after_the_end() {
        let (io, _reactor) = Reactor::new().unwrap();
        let mailbox = Mailbox::new(&io, io.reserve(), 2);
        mailbox.push(1).unwrap();
        mailbox.push(2).unwrap();
        assert!(matches!(mailbox.push(3), Err((3, Refusal::Full))));
        assert_eq!(mailbox.take(), Some(1));
        mailbox.close();
        assert!(mailbox.check_open().is_err());
        assert!(matches!(mailbox.push(4), Err((4, Refusal::Shut(SessionError::Closed(_))))));
        assert_eq!(mailbox.shut(&SessionError::Deadline), [2]);
        assert!(matches!(mailbox.push(5), Err((5, Refusal::Shut(SessionError::Deadline)))));
    }
}
