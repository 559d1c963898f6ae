//! UCX: reads and writes of a peer's memory through `libucp`, which is opened at run time (`towline-ffi`).
//!
//! **Cost of a read of N bytes.** Over RDMA no copy and no word with the peer: the devices move the bytes, this side spends a call
//! of some 100 ns and a callback for each piece. What the library emulates in software (`tcp`) costs both sides a copy and a wake-up.
//! Memory is mapped once: a region when it is registered, other local memory when it is first used, which pins its pages (about
//! 0.1 s a GB) on the thread that serves everybody; so register what is used often.
//!
//! **One thread**, `towline-ucx`: it opens the library in the background, so that an agent is ready before (10 to 500 ms, most of it
//! devices); until then connects that want this transport and no other wait, and others go over what there is. It sleeps on the worker's file
//! unless something is in flight, and looks around for at most 100 µs before that while answers come quickly (`io::Spin`).
//!
//! **What guards it.** Nobody judges a read here, as over shared memory: the fence tells. A region that is deregistered is unmapped, and
//! its key then opens nothing. What the software paths of UCX trust, docs/threat-model.md says; they are off unless allowed.
//!
//! `settings.rs` is which options are set and why, `book.rs` what is mapped, `engine.rs` the thread, `inbox.rs` what it is asked for,
//! `path.rs` a peer.

mod book;
mod engine;
mod inbox;
mod path;
mod settings;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use towline_wire::frame::EXTENTS_MAX;
use towline_wire::id::RegionId;
use towline_wire::receipt::TransportKind;

use super::{Availability, Capabilities, Opened, PathError, PeerAddress, Transport};
use crate::agent::Environment;
use crate::region::{Access, Memory, RegisterError};
use book::Book;
use inbox::{Inbox, Order};

pub use settings::UcxConfig;

/// First byte of an endpoint and of a key, so that later ones can look different.
const FORMAT: u8 = 1;

/// What the agent's side and the thread share.
struct Shared {
    inbox: Inbox,
    book: Mutex<Book>,
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct UcxTransport {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Begins to open the transport for an agent.
///
/// # Errors
/// Why it is not available.
pub(crate) fn open(environment: &Arc<Environment>) -> Availability {
    let Some(config) = environment.ucx.clone() else { return Err("turned off by the configuration".into()) };
    let inbox = Inbox::new().map_err(|error| format!("cannot make an event file: {error}"))?;
    let shared = Arc::new(Shared { inbox, book: Mutex::default() });
    let thread = engine::start(&shared, environment, config)
        .map_err(|error| format!("cannot start its thread: {error}"))?;
    Ok(Arc::new(UcxTransport { shared, thread: Some(thread) }))
}

impl Transport for UcxTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Ucx
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: true,
            device_memory: false,
            checked_by_owner: false,
            ordered: false,
            extents_max: EXTENTS_MAX,
        }
    }

    fn unavailable(&self) -> Option<String> {
        self.shared.book().why_closed()
    }

    /// Empty, until the library is open.
    fn endpoint(&self) -> Option<Vec<u8>> {
        Some(Vec::new())
    }

    fn register(
        &self,
        id: RegionId,
        memory: &Arc<Memory>,
        access: Access,
    ) -> Result<Option<Vec<u8>>, RegisterError> {
        Ok(self.shared.book().register(id, memory, access))
    }

    /// Unmaps it: its key opens nothing any more.
    fn deregister(&self, id: RegionId) {
        let gone = self.shared.book().deregister(id);
        // Outside the lock: unmapping takes its time.
        drop(gone);
    }

    fn connect(&self, peer: &PeerAddress, opened: Opened) {
        if !peer.insists && self.shared.book().is_opening() {
            return opened(Err(PathError::Opening("this agent")));
        }
        if let Err(Order::Connect { opened, .. }) =
            self.shared.inbox.push(Order::Connect { peer: peer.clone(), opened })
        {
            opened(Err(PathError::Closed("the agent stopped".into())));
        }
    }
}

impl Drop for UcxTransport {
    fn drop(&mut self) {
        self.shared.inbox.close();
        // A callback may hold the last handle; its thread can't join itself and ends right after.
        if let Some(thread) = self.thread.take().filter(|it| it.thread().id() != std::thread::current().id())
        {
            _ = thread.join();
        }
    }
}
