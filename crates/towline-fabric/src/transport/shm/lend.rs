//! The owner's side of foreign memory: which peers have been told an address, and how it is got back.
//!
//! A mapping can be left to a peer: its pages live as long as anybody maps them. An address can't: the buffer behind it
//! goes back to whoever made it, and a peer that still copied would read, or overwrite, whatever came there next. So an
//! address is *lent*. With it the peer gets one end of a socket pair:
//!
//! ```text
//!   owner                                        peer
//!   address + its end of the pair ─────────────> probes, then copies by that address
//!   keeps the memory                             keeps its end open while a copy may be under way
//!   region deregistered: a byte, shuts down ───> starts no copy any more, waits for those under way,
//!   lets go of the memory <───────────────────── shuts down (or its process ended, which closes all it had)
//! ```
//! A peer that is stopped keeps the memory from being freed until it goes on or is killed: it may be in the middle of a copy.
//! When the owner's agent stops, a thread of its own waits for such peers, so that the rule holds to the end.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use mio::net::UnixStream;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use rustix::process::Pid;

use super::ptracer::{Permit, admit};
use super::watch::{End, Watch};
use crate::agent::{Environment, RegionEntry, Seat};
use crate::error::SessionError;
use crate::region::Memory;

/// The byte that asks for a region, before the end of the stream; its value means nothing.
const ASKS: u8 = 1;

/// Who has been told a region's address. Part of the region's entry in the book.
#[derive(Default)]
pub(crate) struct Lent(Mutex<Loans>);

#[derive(Default)]
struct Loans {
    recalled: bool,
    sockets: Vec<Weak<OwnedFd>>,
}

impl Lent {
    /// Has every peer let go, those under way included.
    pub(crate) fn recall(&self) {
        let mut loans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        loans.recalled = true;
        for socket in loans.sockets.drain(..).filter_map(|socket| socket.upgrade()) {
            // These fail only when the peer has let go already.
            let _ = send(&socket, &[ASKS], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            let _ = shutdown(&socket, Shutdown::Write);
        }
    }

    /// False when the region was recalled.
    fn add(&self, socket: &Arc<OwnedFd>) -> bool {
        let mut loans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !loans.recalled {
            loans.sockets.retain(|socket| socket.strong_count() > 0);
            loans.sockets.push(Arc::downgrade(socket));
        }
        !loans.recalled
    }
}

/// What the owner keeps while a peer has the address.
struct Loan {
    socket: Arc<OwnedFd>,
    _memory: Arc<Memory>,
    _permit: Permit,
    _seat: Seat,
}

/// Lends `region` to `peer`. Gives the peer's end of the pair; `None` when the region has been deregistered.
///
/// # Errors
/// [`SessionError`] at the bound on sessions, and for lack of files.
pub(super) fn lend(
    environment: &Environment,
    region: &RegionEntry,
    peer: Option<Pid>,
) -> Result<Option<OwnedFd>, SessionError> {
    let seat = Seat::take(&environment.counters.sessions, environment.limits.sessions);
    let seat = seat.ok_or(SessionError::Closed("as many sessions as there may be"))?;
    let (ours, theirs) = UnixStream::pair()?;
    let socket = Arc::new(ours.as_fd().try_clone_to_owned()?);
    if !region.lent.add(&socket) {
        return Ok(None);
    }
    let loan = Loan { socket, _memory: Arc::clone(&region.memory), _permit: admit(peer), _seat: seat };
    environment.io.spawn(Watch::new(ours, Box::new(move |end| loan.end(end))));
    Ok(Some(theirs.as_fd().try_clone_to_owned()?))
}

impl Loan {
    /// Dropped here, unless the peer has not let go and it is the agent that stops.
    fn end(self, end: End) {
        if end == End::Stopped {
            self.linger();
        }
    }

    /// Waits for the peer on a thread of its own.
    fn linger(self) {
        let _ = shutdown(&self.socket, Shutdown::Write);
        let loan = Arc::new(self);
        let waits = Arc::clone(&loan);
        let spawned = std::thread::Builder::new().name("towline-linger".into()).spawn(move || waits.wait());
        if let Err(error) = spawned {
            tracing::error!(%error, "foreign memory is kept for good: nobody can wait for its last reader");
            Box::leak(Box::new(loan));
        }
    }

    fn wait(&self) {
        let mut scrap = [0; 64];
        loop {
            let mut ready = [PollFd::new(&self.socket, PollFlags::IN)];
            if let Err(Errno::INTR) = poll(&mut ready, None) {
                continue;
            }
            match rustix::io::read(&self.socket, &mut scrap) {
                Ok(0) => return,
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn loan(socket: &UnixStream) -> (Loan, Weak<Memory>) {
        let memory = Arc::new(Memory::allocate("loan", 1).unwrap());
        let seen = Arc::downgrade(&memory);
        let seat = Seat::take(&Arc::new(AtomicUsize::new(0)), 1).unwrap();
        let socket = Arc::new(socket.as_fd().try_clone_to_owned().unwrap());
        let permit = admit(Some(rustix::process::getpid()));
        (Loan { socket, _memory: memory, _permit: permit, _seat: seat }, seen)
    }

    fn eventually(mut holds: impl FnMut() -> bool) {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !holds() {
            assert!(std::time::Instant::now() < until);
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_a_stopping_agent_lent_is_kept_until_the_peer_lets_go() {
        for end in [End::Gone, End::Recalled] {
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let (loan, memory) = loan(&ours);
            loan.end(end);
            assert!(memory.upgrade().is_none(), "the peer let go");
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (loan, memory) = loan(&ours);
        loan.end(End::Stopped);
        // Asked for: the stream ends.
        let mut theirs: std::os::unix::net::UnixStream = theirs.as_fd().try_clone_to_owned().unwrap().into();
        theirs.set_nonblocking(false).unwrap();
        theirs.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
        assert!(memory.upgrade().is_some(), "a copy may be under way");
        theirs.shutdown(std::net::Shutdown::Both).unwrap();
        eventually(|| memory.upgrade().is_none());
    }

    #[test]
    fn a_region_that_was_recalled_is_lent_to_nobody() {
        let lent = Lent::default();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = Arc::new(ours.as_fd().try_clone_to_owned().unwrap());
        assert!(lent.add(&socket));
        assert!(theirs.read(&mut [0]).is_err(), "nothing is said while it is lent");
        lent.recall();
        let mut heard = Vec::new();
        assert_eq!(theirs.read_to_end(&mut heard).unwrap(), 1, "a byte, and the end");
        assert!(!lent.add(&socket));
    }
}
