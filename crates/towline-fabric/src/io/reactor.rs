//! The loop of an io thread.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token, Waker};

use super::timers::Target;
use super::{Cause, Flow, Io, Session, SessionId, Spin, TimerKey};
use crate::error::SessionError;

/// Below it: the waker's token.
pub(super) const FIRST_SESSION: usize = 1;
const WAKER: Token = Token(0);
/// Events taken in one turn; more wait in the kernel.
const EVENTS: usize = 256;

struct Slot {
    session: Box<dyn Session>,
    timer: Option<(Instant, TimerKey)>,
}

/// The thread's own state.
pub(crate) struct Reactor {
    poll: Poll,
    io: Arc<Io>,
    sessions: HashMap<SessionId, Slot>,
    again: Vec<SessionId>,
    spin: Spin,
}

impl Reactor {
    /// The epoll instance and the handle that others use.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new() -> io::Result<(Arc<Io>, Self)> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let io = Arc::new(Io::new(&waker));
        Ok((
            Arc::clone(&io),
            Self { poll, io, sessions: HashMap::new(), again: Vec::new(), spin: Spin::default() },
        ))
    }

    /// Starts the thread; it ends after [`Io::stop`], or when a callback panics, which `panicked` is told.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn start(
        mut self,
        name: &str,
        panicked: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name.into()).spawn(move || {
            if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
                tracing::error!("a callback panicked on an io thread; the agent stops");
                panicked();
            }
            // Dropped here, not while unwinding: its sessions end, and nobody is left waiting.
            drop(self);
        })
    }

    fn run(&mut self) {
        let mut events = Events::with_capacity(EVENTS);
        while self.take_commands() {
            self.fire_timers();
            self.run_again();
            self.wait(&mut events);
        }
    }

    /// Spawns and pokes; false when the thread should end.
    fn take_commands(&mut self) -> bool {
        let Some(mail) = self.io.inbox.take() else { return false };
        for (id, session) in mail.sessions {
            self.adopt(id, session);
        }
        for id in mail.poked {
            self.drive(id, Cause::Poke);
        }
        true
    }

    fn adopt(&mut self, id: SessionId, mut session: Box<dyn Session>) {
        let interest = Interest::READABLE | Interest::WRITABLE;
        let Some(source) = session.source() else { return };
        match self.poll.registry().register(source, Token(id.0), interest) {
            Ok(()) => {
                self.sessions.insert(id, Slot { session, timer: None });
                self.drive(id, Cause::Ready);
            }
            Err(error) => session.handle_closed(error.into()),
        }
    }

    fn drive(&mut self, id: SessionId, mut cause: Cause) {
        while let Some(slot) = self.sessions.get_mut(&id) {
            match slot.session.drive(cause) {
                Ok(Flow::Become(next)) => {
                    slot.session = next;
                    cause = Cause::Ready;
                    continue;
                }
                Ok(Flow::Move(next, io)) => return self.hand_over(id, next, &io),
                Ok(Flow::Again) => self.again.push(id),
                Ok(Flow::Wait) => {}
                Err(why) => return self.close(id, why),
            }
            return self.retime(id);
        }
    }

    fn retime(&mut self, id: SessionId) {
        let Some(slot) = self.sessions.get_mut(&id) else { return };
        let wanted = slot.session.deadline();
        if wanted == slot.timer.as_ref().map(|(when, _)| *when) {
            return;
        }
        if let Some((_, key)) = slot.timer.take() {
            self.io.timers.cancel(key);
        }
        slot.timer = wanted.map(|when| (when, self.io.timers.insert_target(when, Target::Session(id))));
    }

    fn close(&mut self, id: SessionId, why: SessionError) {
        let Some(mut slot) = self.sessions.remove(&id) else { return };
        self.forget(&mut slot);
        slot.session.handle_closed(why);
    }

    fn hand_over(&mut self, id: SessionId, next: Box<dyn Session>, io: &Arc<Io>) {
        let Some(mut slot) = self.sessions.remove(&id) else { return };
        slot.session = next;
        self.forget(&mut slot);
        io.spawn(slot.session);
    }

    /// Takes a session's socket and deadline out of the books.
    fn forget(&mut self, slot: &mut Slot) {
        if let Some((_, key)) = slot.timer.take() {
            self.io.timers.cancel(key);
        }
        if let Some(source) = slot.session.source() {
            // Fails only for a socket that was never registered.
            let _ = self.poll.registry().deregister(source);
        }
    }

    fn fire_timers(&mut self) {
        let now = Instant::now();
        while let Some(target) = self.io.timers.pop_due(now) {
            match target {
                Target::Session(id) => {
                    if let Some(slot) = self.sessions.get_mut(&id) {
                        slot.timer = None;
                    }
                    self.drive(id, Cause::Deadline);
                }
                Target::Timed(timed) => {
                    if let Some(timed) = timed.upgrade() {
                        timed.handle_deadline();
                    }
                }
            }
        }
    }

    fn run_again(&mut self) {
        for id in std::mem::take(&mut self.again) {
            self.drive(id, Cause::Ready);
        }
    }

    /// Waits for something to do: a socket, another thread, a deadline.
    fn wait(&mut self, events: &mut Events) {
        let Self { poll, io, again, spin, .. } = self;
        let found = spin.look(|| {
            look(poll, events, Some(Duration::ZERO));
            !again.is_empty() || !events.is_empty() || !io.inbox.is_empty()
        });
        if !found {
            let next = io.timers.sleep();
            if io.inbox.fall_asleep() {
                let started = Instant::now();
                look(poll, events, next.map(|when| when.saturating_duration_since(started)));
                spin.handle_sleep(started.elapsed());
            }
            io.timers.awake();
        }
        let ready: Vec<_> =
            events.iter().map(mio::event::Event::token).filter(|token| *token != WAKER).collect();
        for token in ready {
            self.drive(SessionId(token.0), Cause::Ready);
        }
    }

    fn close_all(&mut self) {
        for (_, session) in self.io.inbox.close().sessions {
            session.handle_closed(SessionError::Closed("the agent stopped"));
        }
        let ids: Vec<_> = self.sessions.keys().copied().collect();
        for id in ids {
            self.close(id, SessionError::Closed("the agent stopped"));
        }
    }
}

fn look(poll: &mut Poll, events: &mut Events, timeout: Option<Duration>) {
    if let Err(error) = poll.poll(events, timeout)
        && error.kind() != io::ErrorKind::Interrupted
    {
        tracing::error!(%error, "epoll_wait failed");
    }
}

impl Drop for Reactor {
    /// Whoever comes later finds the agent stopped.
    fn drop(&mut self) {
        self.close_all();
    }
}
