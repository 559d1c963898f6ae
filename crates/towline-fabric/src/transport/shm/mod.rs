//! Shared memory: maps the peer's memory and copies; foreign memory, which can't be mapped, the kernel copies between the
//! two processes (`region/process/`). Reaches peers of the same host, when the probe says so.
//!
//! **Cost of a read of N bytes.** One copy by the processor, from the peer's pages to ours, by up to `copy_threads`
//! threads in slices of 2 MiB; no system call and no word with the peer. Transfers of at most 64 KiB are copied by the
//! caller: waking a thread costs more. The first pass over a peer's memory also faults its pages in (16 at a time).
//! Expected: the memory's copy rate, 5 to 10 GB/s a thread.
//!
//! **Measured** (`towline bench kv`, 2026-11-30, 2-core Xeon, 256 MiB, docs/benchmarks.md): 19.6 GB/s with two threads and
//! 10.4 with one, where the C library copies 10.8 in one piece; in 4 KiB pages 14.6 and 8.4, where it copies 5.6 with one.
//!
//! **Probe.** Host names prove nothing: containers share them or don't, and share files or don't. What counts is what
//! works: (1) the peer's socket can be reached, at the path or abstract name of its card; (2) whoever answers there
//! holds the cluster's key and is the agent and incarnation of the card; (3) it passes its regions' files, which are
//! sealed against shrinking and have the promised size; (4) each mapping shows the nonce that the card, which came over
//! the other, authenticated session, says it must. Of foreign memory, which has no file, instead of (3) and (4): it
//! tells the address, the socket tells which process it is, and what the kernel copies out of that process shows the nonce.
//! The first of these that fails is the reason that is kept.
//!
//! **What guards it.** Nobody judges a read here: a lease that ended, or a region deregistered since, is told by the fence
//! slot alone. Writes go only into regions made for them; the kernel refuses other mappings. Foreign memory is lent, and
//! got back before its owner lets go of it (`lend.rs`).
//!
//! `server.rs` passes files and addresses, `client.rs` asks for them, `path.rs` is a peer, `copy.rs` the threads;
//! `lend.rs`, `foreign.rs` and `watch.rs` are the two sides of a loan, `ptracer.rs` the permission it may need.

mod client;
mod copy;
mod foreign;
mod lend;
mod path;
mod ptracer;
mod server;
mod watch;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::SocketAddr;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use mio::net::UnixListener;
use towline_wire::card::RegionCard;
use towline_wire::frame::EXTENTS_MAX;
use towline_wire::id::RegionId;
use towline_wire::receipt::TransportKind;

use super::{Availability, Capabilities, Opened, PeerAddress, Transport};
use crate::agent::{Environment, ShmConfig};
use crate::control::ServeUnix;
use crate::region::{Access, Memory, RegisterError};

pub(crate) use copy::Copiers;
pub(crate) use lend::Lent;
pub(crate) use server::serve;

/// First byte of an endpoint whose rest is a path.
const BY_PATH: u8 = 0;
/// First byte of an endpoint whose rest is an abstract name.
const BY_NAME: u8 = 1;

/// The word for a mapping, as evidence and as a rail.
const MAPPING: &str = "mapping";
/// The word for cross-memory attach, as evidence and as a rail.
const CMA: &str = "cma";
/// The rails of every path; one that carried nothing is left out of receipts.
const RAILS: [&str; 2] = [MAPPING, CMA];
const MAPPING_RAIL: usize = 0;
const CMA_RAIL: usize = 1;

struct Shm {
    environment: Arc<Environment>,
    endpoint: Vec<u8>,
}

/// Opens the transport for an agent.
///
/// # Errors
/// Why it is not available.
pub(crate) fn open(environment: &Arc<Environment>) -> Availability {
    let word = format!("{:016x}", environment.identity.boot_epoch.0);
    let (endpoint, unlink) = match &environment.shm {
        ShmConfig::Off => return Err("turned off by the configuration".into()),
        ShmConfig::Abstract => (tagged(BY_NAME, format!("towline-{word}").as_bytes()), None),
        ShmConfig::Dir(dir) => {
            let failed = |error| format!("cannot make {}: {error}", dir.display());
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
            let path = dir.join(format!("{word}.sock"));
            (tagged(BY_PATH, path.as_os_str().as_bytes()), Some(Unlink(path)))
        }
    };
    let address = address(&endpoint)?;
    let listener = UnixListener::bind_addr(&address).map_err(|error| format!("cannot listen: {error}"))?;
    environment.copiers.start().map_err(|error| format!("cannot start the copy threads: {error}"))?;
    environment.io.spawn(ServeUnix::serve(listener, environment, Box::new(unlink)));
    Ok(Arc::new(Shm { environment: Arc::clone(environment), endpoint }))
}

fn tagged(tag: u8, name: &[u8]) -> Vec<u8> {
    [&[tag], name].concat()
}

/// The socket address that an endpoint names.
fn address(endpoint: &[u8]) -> Result<SocketAddr, String> {
    let address = match endpoint.split_first() {
        Some((&BY_PATH, path)) => SocketAddr::from_pathname(FilePath::new(std::ffi::OsStr::from_bytes(path))),
        Some((&BY_NAME, name)) => SocketAddr::from_abstract_name(name),
        _ => return Err("an endpoint of an unknown kind".into()),
    };
    address.map_err(|error| format!("not a socket's name: {error}"))
}

/// What peers may do with a region.
fn access_of(card: &RegionCard) -> Access {
    if card.peer_writable { Access::PeersWrite } else { Access::PeersRead }
}

/// What a region's memory must show.
fn nonce_of(card: &RegionCard) -> Option<&[u8]> {
    let key = card.keys.iter().find(|(kind, _)| *kind == TransportKind::Shm);
    key.map(|(_, nonce)| nonce.as_slice())
}

/// Removes the socket's file when the listener goes.
struct Unlink(PathBuf);

impl Drop for Unlink {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Transport for Shm {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
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

    fn endpoint(&self) -> Option<Vec<u8>> {
        Some(self.endpoint.clone())
    }

    /// The key is the memory's nonce.
    fn register(
        &self,
        _id: RegionId,
        memory: &Arc<Memory>,
        access: Access,
    ) -> Result<Option<Vec<u8>>, RegisterError> {
        if access == Access::PeersWrite && memory.access() != access {
            return Err(RegisterError::Sealed);
        }
        Ok(Some(memory.nonce().to_vec()))
    }

    /// Peers that mapped it keep it; the fence guards. What was lent is recalled by the region itself.
    fn deregister(&self, _id: RegionId) {}

    fn connect(&self, peer: &PeerAddress, opened: Opened) {
        client::connect(&self.environment, peer, opened);
    }
}
