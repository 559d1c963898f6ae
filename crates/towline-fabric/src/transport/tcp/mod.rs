//! TCP: goes anywhere, and the owner sees and judges each request.
//!
//! **Cost of a read of N bytes.** One request frame for each 2 MiB (56 bytes and 16 an extent), one reply frame (48
//! bytes), and the payload, which the kernel copies twice: out of the owner's memory into a socket buffer
//! (`sendmsg`), out of it into the destination (`recvmsg`); no copy in user space, no allocation for payload. About
//! three system calls for each MiB. Expected on loopback: what one core copies for one stream, 2 GB/s, and up to what the
//! cores copy together for several.
//!
//! **Measured** (`towline bench kv`, 2026-11-30, 2-core Xeon, loopback, 256 MiB, docs/benchmarks.md): 4.8 GB/s over two
//! streams at 0.42 processor seconds a GB, raw streams of the same kind 4.0; in 4 KiB pages 3.5, raw 3.3.
//!
//! A data connection goes to the same port as the control session, with its own handshake; its first answer must
//! name the same agent and incarnation. A path has up to `tcp_streams` of them, spread over as many threads on both
//! sides, because one stream ends at what one core copies; each takes the next slice when it has room.
//!
//! `path.rs` keeps the queue and dials, `client.rs` asks, `server.rs` serves.

mod client;
mod path;
mod server;

use std::sync::Arc;

use towline_wire::frame::EXTENTS_MAX;
use towline_wire::id::RegionId;
use towline_wire::receipt::TransportKind;

use super::{Availability, Capabilities, Opened, PeerAddress, Transport};
use crate::agent::Environment;
use crate::region::{Access, Memory, RegisterError};

pub(crate) use server::serve;

struct Tcp {
    environment: Arc<Environment>,
}

/// Opens the transport for an agent.
///
/// # Errors
/// Why it is not available.
pub(crate) fn open(environment: &Arc<Environment>) -> Availability {
    if !environment.tcp {
        return Err("turned off by the configuration".into());
    }
    Ok(Arc::new(Tcp { environment: Arc::clone(environment) }))
}

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: false,
            device_memory: false,
            checked_by_owner: true,
            ordered: true,
            extents_max: EXTENTS_MAX,
        }
    }

    /// Nothing: data goes where control went.
    fn endpoint(&self) -> Option<Vec<u8>> {
        Some(Vec::new())
    }

    /// No key: the session authenticates, and the owner looks each request's region up.
    fn register(
        &self,
        _id: RegionId,
        _memory: &Arc<Memory>,
        _access: Access,
    ) -> Result<Option<Vec<u8>>, RegisterError> {
        Ok(Some(Vec::new()))
    }

    fn deregister(&self, _id: RegionId) {}

    fn connect(&self, peer: &PeerAddress, opened: Opened) {
        path::connect(&self.environment, peer, opened);
    }
}
