//! The asking side: fetches the peer's files, maps them, proves the mappings, and is then a path.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use mio::net::UnixStream;
use towline_wire::auth::{Identity, Purpose};
use towline_wire::card::RegionCard;
use towline_wire::control::{Body, decode};
use towline_wire::frame::{FrameKind, Status};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Evidence, EvidenceClass, TransportKind};

use super::copy::{INLINE_BYTES, Work};
use crate::agent::Environment;
use crate::control::{Dialling, Welcome, check_card, request_card};
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, Session, Socket};
use crate::region::{Access, Memory, RegisterError};
use crate::transport::{Opened, Path, PathError, PeerAddress, Slice, refuse_write};

/// Asks for the peer's files. Answers with a path, or with the step of the probe that failed.
pub(super) fn connect(environment: &Arc<Environment>, peer: &PeerAddress, opened: Opened) {
    let Some(endpoint) = peer.card.endpoint(TransportKind::Shm) else {
        return opened(Err(PathError::Unfit("the peer does not offer it".into())));
    };
    let unreachable =
        |error: std::io::Error| format!("the peer's socket cannot be reached from here: {error}");
    let stream = super::address(endpoint).and_then(|at| UnixStream::connect_addr(&at).map_err(unreachable));
    let stream = match stream {
        Ok(stream) => stream,
        Err(reason) => return opened(Err(PathError::Unfit(reason))),
    };
    let welcome = Box::new(Fetching { environment: Arc::clone(environment), peer: peer.clone(), opened });
    let how = (Purpose::Data, peer.until);
    environment.io.spawn(Dialling::new(Socket::Unix(stream), environment, how, welcome));
}

struct Fetching {
    environment: Arc<Environment>,
    peer: PeerAddress,
    opened: Opened,
}

impl Welcome for Fetching {
    fn proceed(self: Box<Self>, mut channel: Channel) -> Result<Box<dyn Session>, SessionError> {
        channel.accept_files();
        if let Err(why) = request_card(&mut channel, 1) {
            self.handle_failed(why.clone());
            return Err(why);
        }
        let Self { environment, peer, opened } = *self;
        Ok(Box::new(ShmClient {
            channel,
            environment,
            peer,
            opened: Some(opened),
            introduced: false,
            regions: HashMap::new(),
        }))
    }

    fn handle_failed(self: Box<Self>, why: SessionError) {
        (self.opened)(Err(PathError::Unfit(why.to_string())));
    }
}

/// The session while files arrive. It ends with the last; the mappings need no connection.
struct ShmClient {
    channel: Channel,
    environment: Arc<Environment>,
    peer: PeerAddress,
    opened: Option<Opened>,
    introduced: bool,
    regions: HashMap<RegionId, Arc<Memory>>,
}

impl ShmClient {
    fn handle(&mut self, kind: FrameKind, body: &[u8]) -> Result<(), SessionError> {
        if !self.introduced {
            let card = &self.peer.card;
            let expected = Identity { agent: card.agent.clone(), boot_epoch: card.boot_epoch };
            self.introduced = true;
            return check_card(kind, body, &expected);
        }
        let (number, Body::Done(_)) = decode(body)? else {
            return Err(SessionError::Protocol("no file where one was announced".into()));
        };
        if number == 0 {
            return self.finish();
        }
        let file = self.channel.take_file();
        let file = file.ok_or(SessionError::Protocol("a frame came without its file".into()))?;
        let id =
            u32::try_from(number).map(RegionId).map_err(|_| SessionError::Protocol("no such id".into()))?;
        // Regions that appeared after the card are for later connections.
        let Some(card) = self.peer.card.region(id) else { return Ok(()) };
        let mapped =
            map(card, file).map_err(|error| SessionError::Protocol(format!("region {id}: {error}")))?;
        let mapped = Arc::new(mapped);
        self.environment.copiers.populate(&mapped);
        self.regions.insert(id, mapped);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SessionError> {
        let path = ShmPath {
            environment: Arc::clone(&self.environment),
            regions: std::mem::take(&mut self.regions),
            closed: Arc::new(AtomicBool::new(false)),
        };
        if let Some(opened) = self.opened.take() {
            opened(Ok(Arc::new(path)));
        }
        Err(SessionError::Closed("everything is mapped"))
    }
}

/// Maps a region's file and proves that it is the one that the card speaks of.
fn map(card: &RegionCard, file: std::os::fd::OwnedFd) -> Result<Memory, RegisterError> {
    let access = if card.peer_writable { Access::PeersWrite } else { Access::PeersRead };
    let memory = Memory::map_peer(file, card.len_bytes, access)?;
    let key = card.keys.iter().find(|(kind, _)| *kind == TransportKind::Shm);
    match key {
        Some((_, nonce)) if *nonce == memory.mapped_nonce() => Ok(memory),
        _ => Err(RegisterError::NotThePeers),
    }
}

impl Session for ShmClient {
    fn source(&mut self) -> Option<&mut dyn mio::event::Source> {
        Some(self.channel.source())
    }

    fn drive(&mut self, cause: Cause) -> Result<Flow, SessionError> {
        if cause == Cause::Deadline {
            return Err(SessionError::Deadline);
        }
        loop {
            self.channel.flush(|_| {})?;
            let Some((kind, body)) = self.channel.next_frame()? else { return Ok(Flow::Wait) };
            self.handle(kind, &body)?;
        }
    }

    fn deadline(&self) -> Option<Instant> {
        Some(self.peer.until)
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        let Self { channel, opened, .. } = *self;
        drop(channel);
        if let Some(opened) = opened {
            opened(Err(PathError::Unfit(why.to_string())));
        }
    }
}

/// The peer's regions, mapped.
struct ShmPath {
    environment: Arc<Environment>,
    regions: HashMap<RegionId, Arc<Memory>>,
    closed: Arc<AtomicBool>,
}

impl Path for ShmPath {
    fn evidence(&self) -> Evidence {
        Evidence { class: EvidenceClass::LibraryExact, source: "mapping".into() }
    }

    fn rails(&self) -> Vec<String> {
        vec!["mapping".into()]
    }

    fn post(&self, slice: Slice) {
        let Some(remote) = self.regions.get(&slice.region()) else {
            return slice.complete(Err(PathError::Refused(Status::UnknownRegion)));
        };
        let access = if remote.is_writable() { Access::PeersWrite } else { Access::PeersRead };
        if let Err(error) = refuse_write(slice.op(), access) {
            return slice.complete(Err(error));
        }
        let inline = slice.bytes() <= INLINE_BYTES;
        let work = Work { slice, remote: Arc::clone(remote), closed: Arc::clone(&self.closed) };
        if inline { work.run() } else { self.environment.copiers.submit(work) }
    }

    /// Slices that wait complete when a thread comes to them, without being copied; one being copied takes as long
    /// as 2 MiB take.
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_that_does_not_show_the_cards_nonce_is_refused() {
        let memory = Memory::allocate("region", 4096).unwrap();
        let file = || memory.fd().try_clone_to_owned().unwrap();
        let mut card = RegionCard {
            id: RegionId(1),
            len_bytes: 4096,
            place: "host".into(),
            keys: vec![(TransportKind::Shm, memory.nonce().to_vec())],
            peer_writable: false,
        };
        assert!(map(&card, file()).is_ok());
        card.keys[0].1[0] ^= 1;
        assert!(matches!(map(&card, file()), Err(RegisterError::NotThePeers)));
        card.keys.clear();
        assert!(matches!(map(&card, file()), Err(RegisterError::NotThePeers)));
    }
}
