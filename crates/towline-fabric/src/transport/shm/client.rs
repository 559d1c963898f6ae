//! The asking side: fetches the peer's files and addresses, maps and probes, and makes a path of what was proved.
//!
//! All regions of the card are proved now, and one that can't be reached rules the transport out for this peer, with the
//! reason: a peer has one path, so a region left out could not be read at all, where tcp might serve it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use mio::net::UnixStream;
use towline_wire::auth::{Identity, Purpose};
use towline_wire::card::RegionCard;
use towline_wire::control::{Body, decode, v1};
use towline_wire::frame::FrameKind;
use towline_wire::id::RegionId;
use towline_wire::receipt::TransportKind;

use super::foreign::{Borrowed, Offer};
use super::path::ShmPath;
use crate::agent::Environment;
use crate::control::{Dialling, Welcome, check_card, request_card};
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, Session, Socket};
use crate::region::{Memory, RegisterError};
use crate::transport::{Opened, Path, PathError, PeerAddress};

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
            mapped: HashMap::new(),
            offers: HashMap::new(),
        }))
    }

    fn handle_failed(self: Box<Self>, why: SessionError) {
        (self.opened)(Err(unopened(why)));
    }
}

/// Why a session brought no path: the peer was lost, or what answered is not what the transport needs.
fn unopened(why: SessionError) -> PathError {
    match why {
        SessionError::Auth(_) | SessionError::Protocol(_) => PathError::Unfit(why.to_string()),
        why => why.into(),
    }
}

/// The session while files arrive. It ends with the last: mappings need no connection, and loans have their own.
struct ShmClient {
    channel: Channel,
    environment: Arc<Environment>,
    peer: PeerAddress,
    opened: Option<Opened>,
    introduced: bool,
    mapped: HashMap<RegionId, Arc<Memory>>,
    offers: HashMap<RegionId, Offer>,
}

impl ShmClient {
    fn handle(&mut self, kind: FrameKind, body: &[u8]) -> Result<(), SessionError> {
        if !self.introduced {
            let card = &self.peer.card;
            let expected = Identity { agent: card.agent.clone(), boot_epoch: card.boot_epoch };
            self.introduced = true;
            return check_card(kind, body, &expected);
        }
        let (number, body) = decode(body)?;
        if (number, &body) == (0, &Body::Done(v1::Done {})) {
            return self.finish();
        }
        let file = self.channel.take_file();
        let file = file.ok_or(SessionError::Protocol("a frame came without its file".into()))?;
        let id =
            u32::try_from(number).map(RegionId).map_err(|_| SessionError::Protocol("no such id".into()))?;
        // Regions that appeared after the card are for later connections.
        let Some(card) = self.peer.card.region(id) else { return Ok(()) };
        match body {
            Body::Done(_) => {
                let mapped = map(card, file)
                    .map_err(|error| SessionError::Protocol(format!("region {id}: {error}")))?;
                let mapped = Arc::new(mapped);
                self.environment.copiers.populate(&mapped);
                self.mapped.insert(id, mapped);
            }
            Body::ForeignRegion(said) => drop(self.offers.insert(id, Offer::new(&said, file))),
            _ => return Err(SessionError::Protocol("no region where one was announced".into())),
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SessionError> {
        let outcome = self.prove().map_err(PathError::Unfit);
        let outcome = outcome.map(|path| -> Arc<dyn Path> { Arc::new(path) });
        if let Some(opened) = self.opened.take() {
            opened(outcome);
        }
        Err(SessionError::Closed("everything is mapped"))
    }

    fn prove(&mut self) -> Result<ShmPath, String> {
        let offers = std::mem::take(&mut self.offers);
        let borrowed = Arc::new(Borrowed::probe(self.channel.socket().fd(), &self.peer.card, offers)?);
        let watched = borrowed.watch(&self.environment.io);
        watched.map_err(|error| format!("foreign memory cannot be watched: {error}"))?;
        Ok(ShmPath::new(&self.environment, std::mem::take(&mut self.mapped), borrowed))
    }
}

/// Maps a region's file and proves that it is the one that the card speaks of.
fn map(card: &RegionCard, file: std::os::fd::OwnedFd) -> Result<Memory, RegisterError> {
    let memory = Memory::map_peer(file, card.len_bytes, super::access_of(card))?;
    match super::nonce_of(card) {
        Some(nonce) if *nonce == memory.mapped_nonce() => Ok(memory),
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
            opened(Err(unopened(why)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_that_does_not_show_the_cards_nonce_is_refused() {
        let memory = Memory::allocate("region", 4096).unwrap();
        let file = || memory.fd().unwrap().try_clone_to_owned().unwrap();
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
