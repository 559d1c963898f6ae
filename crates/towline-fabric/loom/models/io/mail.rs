//! `src/io/inbox.rs`: an io thread that goes to sleep is woken for whatever comes, though others write to its eventfd only
//! while it sleeps.

use std::sync::Arc;

use loom::thread;

use super::inbox::Inbox;
use super::{SessionId, Waker};
use crate::Model;

pub(crate) const MODELS: &[Model] = &[
    ("a poke reaches an io thread that goes to sleep", a_poke),
    ("of two pokes both are taken, though one wake-up is enough", two_pokes),
    ("a stop ends an io thread, whether it sleeps or not", a_stop),
    ("a session is handed over or comes back when the io thread ends", a_late_session),
];

fn fixture() -> (Arc<Waker>, Arc<Inbox<u32>>) {
    let waker = Arc::new(Waker::new());
    let inbox = Arc::new(Inbox::new(Arc::clone(&waker)));
    (waker, inbox)
}

/// As the reactor does: takes, and sleeps when there is nothing; until `count` pokes came. False after a stop.
fn turns(inbox: &Inbox<u32>, waker: &Waker, count: usize) -> bool {
    let mut poked = Vec::new();
    while let Some(mail) = inbox.take() {
        poked.extend(mail.poked);
        if poked.len() >= count {
            return true;
        }
        if inbox.fall_asleep() {
            waker.sleep();
        }
    }
    false
}

fn a_poke() {
    let (waker, inbox) = fixture();
    let poking = Arc::clone(&inbox);
    let other = thread::spawn(move || poking.poke(SessionId(1)));
    assert!(turns(&inbox, &waker, 1));
    other.join().unwrap();
}

fn two_pokes() {
    let (waker, inbox) = fixture();
    let others = [1, 2].map(|id| {
        let poking = Arc::clone(&inbox);
        thread::spawn(move || poking.poke(SessionId(id)))
    });
    assert!(turns(&inbox, &waker, 2));
    for other in others {
        other.join().unwrap();
    }
}

fn a_stop() {
    let (waker, inbox) = fixture();
    let stopping = Arc::clone(&inbox);
    let other = thread::spawn(move || stopping.stop());
    assert!(!turns(&inbox, &waker, 1));
    other.join().unwrap();
}

fn a_late_session() {
    let (_waker, inbox) = fixture();
    let handing = Arc::clone(&inbox);
    let other = thread::spawn(move || handing.hand_over(SessionId(1), 7).is_err());
    let left = inbox.close().sessions.len();
    let came_back = other.join().unwrap();
    assert_eq!(left + usize::from(came_back), 1);
}
