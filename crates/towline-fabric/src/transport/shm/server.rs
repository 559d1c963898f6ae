//! Passes the files of an agent's regions, and the addresses of foreign ones, to a peer that proved itself, once, and is
//! done. What happens to an address from then on is between two sockets (`lend.rs`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use towline_wire::control::{Body, encode, v1};
use towline_wire::frame::FrameKind;

use super::lend::lend;
use crate::agent::{Environment, RegionEntry, Seat};
use crate::control::answer_card;
use crate::error::SessionError;
use crate::io::{Cause, Channel, Flow, Session};
use crate::region::peer_pid;

/// Time for a peer to ask, map and hang up; mapping takes milliseconds.
const LIFETIME: Duration = Duration::from_secs(10);

/// The session of a peer that wants to map.
pub(crate) fn serve(channel: Channel, environment: &Arc<Environment>, seat: Seat) -> Box<dyn Session> {
    let until = Instant::now() + LIFETIME;
    Box::new(ShmServer { channel, environment: Arc::clone(environment), answered: false, until, _seat: seat })
}

struct ShmServer {
    channel: Channel,
    environment: Arc<Environment>,
    answered: bool,
    until: Instant,
    _seat: Seat,
}

impl ShmServer {
    /// The card; then for each region a frame with its id as call number, and with its file attached, or its address and
    /// the peer's end of the loan; then one with zero.
    fn answer(&mut self, body: &[u8]) -> Result<(), SessionError> {
        answer_card(&mut self.channel, body, &self.environment)?;
        let peer = peer_pid(self.channel.socket().fd())?;
        for region in self.environment.regions.all() {
            let Some((body, file)) = self.offer(&region, peer)? else { continue };
            let frame = encode(u64::from(region.id.0), body);
            self.channel.send_with_file(FrameKind::Control, &frame, Some(file))?;
        }
        self.channel.send(FrameKind::Control, &encode(0, Body::Done(v1::Done {})))
    }

    fn offer(
        &self,
        region: &RegionEntry,
        peer: Option<Pid>,
    ) -> Result<Option<(Body, OwnedFd)>, SessionError> {
        if let Some(place) = region.memory.place() {
            let said = v1::ForeignRegion { base: place.base, nonce_at: place.mark };
            let lent = lend(&self.environment, region, peer)?;
            return Ok(lent.map(|socket| (Body::ForeignRegion(said), socket)));
        }
        let Some(file) = region.memory.fd() else { return Ok(None) };
        Ok(Some((Body::Done(v1::Done {}), file.try_clone_to_owned()?)))
    }
}

impl Session for ShmServer {
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
            if kind != FrameKind::Control || self.answered {
                return Err(SessionError::Protocol("more than one question".into()));
            }
            self.answered = true;
            self.answer(&body)?;
        }
    }

    fn deadline(&self) -> Option<Instant> {
        Some(self.until)
    }

    fn handle_closed(self: Box<Self>, why: SessionError) {
        tracing::debug!(%why, "mapping session ended");
    }
}
