//! What other threads hand to the sessions of one path.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use super::{Io, SessionId};
use crate::error::SessionError;
use crate::sync::{Mutex, MutexGuard};

/// A bounded queue in front of one or several sessions. Each takes what it has room for; one that found nothing is
/// *idle*, and pushing pokes one idle session, so that a single thing wakes a single thread. A session that has no room
/// comes back by itself: what waits goes to whoever is first.
pub(crate) struct Mailbox<T> {
    bound: usize,
    letters: Mutex<Letters<T>>,
}

struct Letters<T> {
    queue: VecDeque<T>,
    readers: Vec<Reader>,
    closing: bool,
    shut: Option<SessionError>,
}

struct Reader {
    io: Arc<Io>,
    session: SessionId,
    idle: bool,
}

/// Which of a mailbox's sessions one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReaderIndex(usize);

/// Why something was not pushed.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    /// As many wait as may.
    Full,
    /// The session is gone.
    Shut(SessionError),
}

impl<T> Mailbox<T> {
    /// For at most `bound` things; nobody reads it yet.
    pub(crate) fn new(bound: usize) -> Arc<Self> {
        let letters = Letters { queue: VecDeque::new(), readers: Vec::new(), closing: false, shut: None };
        Arc::new(Self { bound, letters: Mutex::new(letters) })
    }

    /// Adds the session of that id, which will look into the mailbox when it begins.
    pub(crate) fn join(&self, io: &Arc<Io>, session: SessionId) -> ReaderIndex {
        let mut letters = self.lock();
        letters.readers.push(Reader { io: Arc::clone(io), session, idle: false });
        ReaderIndex(letters.readers.len() - 1)
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
        let idle = letters.readers.iter_mut().find(|reader| reader.idle).map(|reader| {
            reader.idle = false;
            (Arc::clone(&reader.io), reader.session)
        });
        drop(letters);
        if let Some((io, session)) = idle {
            io.poke(session);
        }
        Ok(())
    }

    /// The oldest thing that waits. A reader that gets nothing is poked when there is something.
    pub(crate) fn take(&self, reader: ReaderIndex) -> Option<T> {
        let mut letters = self.lock();
        let letter = letters.queue.pop_front();
        if let Some(reader) = letters.readers.get_mut(reader.0) {
            reader.idle = letter.is_none();
        }
        letter
    }

    /// Asks the sessions to end.
    pub(crate) fn close(&self) {
        let mut letters = self.lock();
        if letters.closing || letters.shut.is_some() {
            return;
        }
        letters.closing = true;
        Self::poke_all(letters);
    }

    /// For a session: an error once it is to end, because it was asked to or another one ended.
    ///
    /// # Errors
    /// [`SessionError::Closed`], or why the other one ended.
    pub(crate) fn check_open(&self) -> Result<(), SessionError> {
        let letters = self.lock();
        match &letters.shut {
            _ if letters.closing => Err(SessionError::Closed("closed here")),
            Some(why) => Err(why.clone()),
            None => Ok(()),
        }
    }

    /// For a session, when it ends: refuses what comes later, has the others end too, and gives what still waited.
    pub(crate) fn shut(&self, why: &SessionError) -> VecDeque<T> {
        let mut letters = self.lock();
        let waiting = std::mem::take(&mut letters.queue);
        if letters.shut.is_none() {
            letters.shut = Some(why.clone());
            Self::poke_all(letters);
        }
        waiting
    }

    fn poke_all(letters: MutexGuard<'_, Letters<T>>) {
        let readers: Vec<_> =
            letters.readers.iter().map(|reader| (Arc::clone(&reader.io), reader.session)).collect();
        drop(letters);
        for (io, session) in readers {
            io.poke(session);
        }
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
        let mailbox = Mailbox::new(2);
        let reader = mailbox.join(&io, io.reserve());
        mailbox.push(1).unwrap();
        mailbox.push(2).unwrap();
        assert!(matches!(mailbox.push(3), Err((3, Refusal::Full))));
        assert_eq!(mailbox.take(reader), Some(1));
        mailbox.close();
        assert!(mailbox.check_open().is_err());
        assert!(matches!(mailbox.push(4), Err((4, Refusal::Shut(SessionError::Closed(_))))));
        assert_eq!(mailbox.shut(&SessionError::Deadline), [2]);
        assert!(matches!(mailbox.push(5), Err((5, Refusal::Shut(SessionError::Deadline)))));
    }

    #[test]
    fn each_push_wakes_one_idle_reader_and_an_end_wakes_all() {
        let (io, _reactor) = Reactor::new().unwrap();
        let mailbox = Mailbox::new(9);
        let [first, second] = [io.reserve(), io.reserve()];
        let readers = [mailbox.join(&io, first), mailbox.join(&io, second)];
        for reader in readers {
            assert_eq!(mailbox.take(reader), None);
        }
        for letter in 0..3 {
            mailbox.push(letter).unwrap();
        }
        assert_eq!(io.take_pokes(), [first, second], "the third goes to whoever has room first");
        assert_eq!(mailbox.take(readers[1]), Some(0));
        assert_eq!(mailbox.shut(&SessionError::Deadline), [1, 2]);
        assert_eq!(io.take_pokes(), [first, second]);
        assert_eq!(mailbox.check_open(), Err(SessionError::Deadline), "the other one learns why");
    }
}
