//! The asking side of foreign memory: addresses that the owner lent, probed, used, and let go of.
//!
//! **Let go of** means: nothing here can touch the owner's memory by that address any more. Each copy holds the loan; the
//! last holder that goes shuts the loan's socket down, which is what the owner waits for (`lend.rs`). So a region
//! that is recalled, a path that is closed and a process that dies all end the same way, and none before its copies do.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mio::net::UnixStream;
use rustix::net::{Shutdown, shutdown};
use towline_wire::card::{AgentCard, RegionCard};
use towline_wire::control::v1;
use towline_wire::frame::Status;
use towline_wire::id::RegionId;
use towline_wire::receipt::Op;

use super::watch::{End, Watch};
use crate::io::Io;
use crate::region::{Access, NONCE_BYTES, Piece, Place, Process, ProcessMemory, ReachError};
use crate::transport::{PathError, Slice, refuse_write};

/// What the owner said of a foreign region.
pub(super) struct Offer {
    pub(super) place: Place,
    /// This side's end of the loan.
    pub(super) socket: OwnedFd,
}

impl Offer {
    pub(super) fn new(said: &v1::ForeignRegion, socket: OwnedFd) -> Self {
        Self { place: Place { base: said.base, mark: said.nonce_at }, socket }
    }
}

/// A foreign region that was lent and proved.
pub(super) struct Foreign {
    memory: ProcessMemory,
    access: Access,
    socket: OwnedFd,
}

impl Foreign {
    /// Probes what was offered.
    fn new(process: &Arc<Process>, card: &RegionCard, offer: Offer) -> Result<Self, ReachError> {
        let nonce: [u8; NONCE_BYTES] =
            super::nonce_of(card).and_then(|key| key.try_into().ok()).ok_or(ReachError::NotThePeers)?;
        let Offer { place, socket } = offer;
        let memory = ProcessMemory { process: Arc::clone(process), place, len: card.len_bytes, nonce };
        let foreign = Self { memory, access: super::access_of(card), socket };
        foreign.memory.probe()?;
        Ok(foreign)
    }

    /// Copies a slice; its bytes are in place if the owner's process proved itself with them.
    ///
    /// # Errors
    /// Why they are not.
    pub(super) fn copy(&self, slice: &Slice) -> Result<u64, PathError> {
        let Some(local) = slice.local() else { return Ok(0) };
        let runs = slice.runs().iter();
        let copied = match slice.op() {
            Op::Read => {
                let pieces = runs.map(|run| Piece { to: run.local, from: run.remote, len: run.len });
                self.memory.read(local, pieces)
            }
            Op::Write => {
                let pieces = runs.map(|run| Piece { to: run.remote, from: run.local, len: run.len });
                self.memory.write(local, pieces)
            }
        };
        copied.map_err(|error| match error {
            ReachError::Range(_) => PathError::Refused(Status::OutOfRange),
            error => PathError::Down(error.to_string()),
        })
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // Ends the owner's wait, and this side's own watch. Fails only when both have ended.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// The foreign regions of one path, by id.
pub(super) struct Borrowed {
    any: bool,
    /// Set when a loan ended that nobody had asked back: the owner's agent or process is gone.
    gone: AtomicBool,
    regions: Mutex<HashMap<RegionId, Arc<Foreign>>>,
}

impl Borrowed {
    /// Proves all that was offered, by the process at the other end of `socket`.
    ///
    /// # Errors
    /// The first region that can't be reached, and why; nothing is kept of any.
    pub(super) fn probe(
        socket: BorrowedFd<'_>,
        card: &AgentCard,
        offers: HashMap<RegionId, Offer>,
    ) -> Result<Self, String> {
        let mut regions = HashMap::new();
        let failed = |id: RegionId| move |error| format!("region {id} is foreign memory: {error}");
        if let Some(first) = offers.keys().min().copied() {
            let process = Arc::new(Process::behind(socket).map_err(failed(first))?);
            for (id, offer) in offers {
                // One that appeared after the card is for later connections.
                let Some(region) = card.region(id) else { continue };
                let foreign = Foreign::new(&process, region, offer).map_err(failed(id))?;
                regions.insert(id, Arc::new(foreign));
            }
        }
        Ok(Self { any: !regions.is_empty(), gone: AtomicBool::new(false), regions: Mutex::new(regions) })
    }

    /// Has each region given up when the owner recalls it.
    ///
    /// # Errors
    /// The kernel's, for lack of files; all have been given up then.
    pub(super) fn watch(self: &Arc<Self>, io: &Io) -> std::io::Result<()> {
        let socket = |(id, foreign): (&RegionId, &Arc<Foreign>)| {
            Ok((*id, UnixStream::from(foreign.socket.try_clone()?)))
        };
        let sockets: std::io::Result<Vec<_>> = self.lock().iter().map(socket).collect();
        for (id, stream) in sockets.inspect_err(|_| self.clear())? {
            let borrowed = Arc::clone(self);
            io.spawn(Watch::new(stream, Box::new(move |end| borrowed.give_up(id, end))));
        }
        Ok(())
    }

    /// Whether there are none, and never were.
    pub(super) fn is_unused(&self) -> bool {
        !self.any
    }

    /// The region for a slice.
    ///
    /// # Errors
    /// [`PathError::Refused`]: unknown, recalled, or not writable; [`PathError::Down`] when its owner is gone.
    pub(super) fn find(&self, id: RegionId, op: Op) -> Result<Arc<Foreign>, PathError> {
        let found = self.lock().get(&id).cloned();
        let Some(foreign) = found else {
            return Err(match self.gone.load(Ordering::Acquire) {
                true => PathError::Down("the owner of foreign memory is gone".into()),
                false => PathError::Refused(Status::UnknownRegion),
            });
        };
        refuse_write(op, foreign.access)?;
        Ok(foreign)
    }

    /// Starts no copy of any region any more.
    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut *self.lock());
        drop(all);
    }

    fn give_up(&self, id: RegionId, end: End) {
        self.gone.fetch_or(end != End::Recalled, Ordering::AcqRel);
        let gone = self.lock().remove(&id);
        drop(gone);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RegionId, Arc<Foreign>>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{PollFd, PollFlags, poll};
    use towline_wire::receipt::TransportKind;

    use super::*;
    use crate::region::Memory;

    fn card(memory: &Memory) -> RegionCard {
        RegionCard {
            id: RegionId(1),
            len_bytes: memory.len(),
            place: "host".into(),
            keys: vec![(TransportKind::Shm, memory.nonce().to_vec())],
            peer_writable: false,
        }
    }

    /// Whether the owner's end of a loan hears that it is over.
    fn is_over(owner: &UnixStream) -> bool {
        let mut ready = [PollFd::new(owner, PollFlags::IN)];
        poll(&mut ready, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    #[test]
    fn what_is_refused_dropped_or_asked_back_is_let_go_of_at_once() {
        let memory = Memory::foreign_sample(4096, Access::PeersRead);
        let place = memory.place().unwrap();
        let (near, _far) = UnixStream::pair().unwrap();
        let process = Arc::new(Process::behind(near.as_fd()).unwrap());
        let offer = |place| {
            let (owner, ours) = UnixStream::pair().unwrap();
            (owner, Offer { place, socket: ours.as_fd().try_clone_to_owned().unwrap() })
        };
        let (owner, honest) = offer(place);
        let foreign = Foreign::new(&process, &card(&memory), honest).ok().unwrap();
        assert!(!is_over(&owner));
        drop(foreign);
        assert!(is_over(&owner));
        let (owner, second) = offer(place);
        let foreign = Foreign::new(&process, &card(&memory), second).ok().unwrap();
        let regions = Mutex::new(HashMap::from([(RegionId(1), Arc::new(foreign))]));
        let borrowed = Borrowed { any: true, gone: AtomicBool::new(false), regions };
        assert!(borrowed.find(RegionId(1), Op::Read).is_ok());
        let why = |op| borrowed.find(RegionId(1), op).err().unwrap();
        assert_eq!(why(Op::Write), PathError::Refused(Status::NotWritable));
        borrowed.give_up(RegionId(1), End::Recalled);
        assert_eq!(why(Op::Read), PathError::Refused(Status::UnknownRegion));
        assert!(is_over(&owner));
        borrowed.give_up(RegionId(1), End::Gone);
        assert!(matches!(why(Op::Read), PathError::Down(_)));
        let (owner, lie) = offer(Place { mark: place.mark + 1, ..place });
        assert!(Foreign::new(&process, &card(&memory), lie).is_err() && is_over(&owner));
        let (owner, keyless) = offer(place);
        let card = RegionCard { keys: vec![(TransportKind::Shm, vec![1])], ..card(&memory) };
        assert!(Foreign::new(&process, &card, keyless).is_err() && is_over(&owner));
    }
}
