//! `src/io/mailbox.rs`: what is pushed reaches one of the sessions, or comes back; no session sleeps through it.

use std::sync::{Arc, PoisonError};

use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread::{self, JoinHandle};

use super::mailbox::{Mailbox, ReaderIndex, Refusal};
use super::{Io, SessionId};
use crate::Model;
use crate::error::SessionError;

pub(crate) const MODELS: &[Model] = &[
    ("no letter waits while every reader sleeps", no_letter_waits),
    ("a letter is taken, given back or refused, whenever the mailbox is closed", every_letter_ends),
    ("letters are taken in order and no more wait than may", the_bound_holds),
    ("a session that ends makes the others end, whether they sleep or not", an_end_reaches_all),
    ("readers that share an io thread are all driven", readers_share_a_thread),
];

/// What became of the letters.
#[derive(Default)]
struct Fates {
    taken: Vec<u32>,
    returned: Vec<u32>,
}

/// Fates, and a way to wait for them.
struct Book {
    fates: Mutex<Fates>,
    news: Condvar,
}

impl Book {
    fn new() -> Arc<Self> {
        Arc::new(Self { fates: Mutex::new(Fates::default()), news: Condvar::new() })
    }

    fn note(&self, write: impl FnOnce(&mut Fates)) {
        write(&mut self.lock());
        self.news.notify_all();
    }

    /// Returns when `count` letters were taken; a lost wake-up is a deadlock here.
    fn wait_for(&self, count: usize) {
        let mut fates = self.lock();
        while fates.taken.len() < count {
            fates = self.news.wait(fates).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Fates> {
        self.fates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session of one mailbox, as `transport/tcp/client.rs` and `control/client.rs` are: driven, it looks whether it should
/// end, then takes what there is.
struct Session {
    mailbox: Arc<Mailbox<u32>>,
    reader: ReaderIndex,
    book: Arc<Book>,
}

impl Session {
    /// False when it has ended.
    fn drive(&self) -> bool {
        if let Err(why) = self.mailbox.check_open() {
            let waiting = self.mailbox.shut(&why);
            self.book.note(|fates| fates.returned.extend(waiting));
            return false;
        }
        while let Some(letter) = self.mailbox.take(self.reader) {
            self.book.note(|fates| fates.taken.push(letter));
        }
        true
    }
}

/// An io thread with one session, which begins, and is driven whenever it is poked.
fn reader(mailbox: &Arc<Mailbox<u32>>, book: &Arc<Book>) -> JoinHandle<()> {
    let io = Arc::new(Io::new());
    let reader = mailbox.join(&io, SessionId(1));
    let session = Session { mailbox: Arc::clone(mailbox), reader, book: Arc::clone(book) };
    thread::spawn(move || {
        while session.drive() {
            io.poked();
        }
    })
}

fn no_letter_waits() {
    let (mailbox, book) = (Mailbox::new(9), Book::new());
    let readers = [(); 2].map(|()| reader(&mailbox, &book));
    for letter in [1, 2] {
        assert!(mailbox.push(letter).is_ok());
    }
    book.wait_for(2);
    mailbox.close();
    for reader in readers {
        reader.join().unwrap();
    }
    assert!(book.lock().returned.is_empty());
}

fn every_letter_ends() {
    let (mailbox, book) = (Mailbox::new(9), Book::new());
    let reader = reader(&mailbox, &book);
    let closed = Arc::clone(&mailbox);
    let closer = thread::spawn(move || closed.close());
    let mut refused = 0;
    for letter in [1, 2] {
        if let Err((back, refusal)) = mailbox.push(letter) {
            assert_eq!(back, letter);
            assert!(matches!(refusal, Refusal::Shut(SessionError::Closed(_))));
            refused += 1;
        }
    }
    closer.join().unwrap();
    reader.join().unwrap();
    let fates = book.lock();
    assert_eq!(fates.taken.len() + fates.returned.len() + refused, 2, "none is lost and none seen twice");
}

fn the_bound_holds() {
    let (mailbox, book) = (Mailbox::new(1), Book::new());
    let reader = reader(&mailbox, &book);
    let mut pushed = Vec::new();
    for letter in [1, 2, 3] {
        match mailbox.push(letter) {
            Ok(()) => pushed.push(letter),
            Err((back, refusal)) => assert!(back == letter && matches!(refusal, Refusal::Full)),
        }
    }
    book.wait_for(pushed.len());
    assert_eq!(book.lock().taken, pushed);
    mailbox.close();
    reader.join().unwrap();
}

fn an_end_reaches_all() {
    let (mailbox, book) = (Mailbox::new(9), Book::new());
    let readers = [(); 2].map(|()| reader(&mailbox, &book));
    assert!(mailbox.push(1).is_ok());
    // A third session breaks, as one does whose peer is gone. Nobody closes the mailbox.
    let waiting = mailbox.shut(&SessionError::Lost("the peer hung up".into()));
    for reader in readers {
        reader.join().unwrap();
    }
    let fates = book.lock();
    assert_eq!(fates.taken.len() + fates.returned.len() + waiting.len(), 1);
}

fn readers_share_a_thread() {
    let (mailbox, book) = (Mailbox::new(9), Book::new());
    let io = Arc::new(Io::new());
    let sessions = [SessionId(0), SessionId(1)].map(|id| {
        let reader = mailbox.join(&io, id);
        Session { mailbox: Arc::clone(&mailbox), reader, book: Arc::clone(&book) }
    });
    let thread = thread::spawn(move || {
        let mut open = sessions.each_ref().map(Session::drive);
        while open.contains(&true) {
            for SessionId(index) in io.poked() {
                open[index] = open[index] && sessions[index].drive();
            }
        }
    });
    for letter in [1, 2] {
        assert!(mailbox.push(letter).is_ok());
    }
    book.wait_for(2);
    mailbox.close();
    thread.join().unwrap();
}
