//! A socket that speaks frames: sealing, opening, partial reads and writes, payloads in between.
//!
//! Where the socket leaves this host, the kernel sends payloads without copying them ([`ZeroCopy`]).
//!
//! **Bounds.** A frame is read into a buffer of its own length, at most 96 KiB; a payload goes straight to or from its
//! memory. What waits to be sent is bounded by the session that queues it: it looks at [`Channel::backlog`] first.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use towline_wire::auth::SessionKeys;
use towline_wire::frame::{FrameKind, HEADER_BYTES, Header, Opener, Sealer};

use super::Socket;
use super::ahead::Ahead;
use crate::error::SessionError;
use crate::region::{Payload, ZeroCopy};

/// Which end of the handshake this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Client,
    Server,
}

/// See the head of this file.
pub(crate) struct Channel {
    socket: Socket,
    sealer: Option<Sealer>,
    opener: Option<Opener>,
    out: VecDeque<Out>,
    input: Vec<u8>,
    filled: usize,
    ahead: Ahead,
    ahead_bytes: usize,
    header: Option<Header>,
    /// Files that came along, when this side takes them.
    files: Option<VecDeque<OwnedFd>>,
    /// Payload that the kernel sends without copying it, where that is worth it.
    zero_copy: Option<ZeroCopy>,
}

enum Out {
    Bytes { bytes: Vec<u8>, at: usize, file: Option<OwnedFd> },
    Payload(Payload),
}

impl Channel {
    pub(crate) fn new(socket: Socket) -> Self {
        Self {
            socket,
            sealer: None,
            opener: None,
            out: VecDeque::new(),
            input: Vec::new(),
            filled: 0,
            ahead: Ahead::default(),
            ahead_bytes: 0,
            header: None,
            files: None,
            zero_copy: None,
        }
    }

    /// After the handshake: frames from now on.
    pub(crate) fn secure(&mut self, keys: &SessionKeys, role: Role) {
        let (ours, theirs) = match role {
            Role::Client => (keys.client, keys.server),
            Role::Server => (keys.server, keys.client),
        };
        (self.sealer, self.opener) = (Some(Sealer::new(ours)), Some(Opener::new(theirs)));
    }

    /// How many bytes to read before they are asked for: what small frames and payloads come to. Not for a channel that
    /// takes files.
    pub(crate) fn read_ahead(&mut self, bytes: usize) {
        self.ahead_bytes = bytes;
    }

    /// Takes files that the peer attaches from now on, one a frame.
    pub(crate) fn accept_files(&mut self) {
        self.files = Some(VecDeque::new());
    }

    /// The oldest file that came and was not taken.
    pub(crate) fn take_file(&mut self) -> Option<OwnedFd> {
        self.files.as_mut()?.pop_front()
    }

    /// Has the kernel send payloads without copying them from now on, if the socket leaves this host and the kernel can.
    pub(crate) fn avoid_copies(&mut self) {
        if self.socket.leaves_host() {
            self.zero_copy = ZeroCopy::open(self.socket.fd());
        }
    }

    /// What was sent so, and how much of it is completed.
    pub(crate) fn zero_copy(&mut self) -> Option<&mut ZeroCopy> {
        self.zero_copy.as_mut()
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// What the reactor registers.
    pub(crate) fn source(&mut self) -> &mut dyn mio::event::Source {
        self.socket.source()
    }

    /// Frames and payloads that wait to be sent.
    pub(crate) fn backlog(&self) -> usize {
        self.out.len()
    }

    /// Queues bytes of the handshake.
    pub(crate) fn queue(&mut self, bytes: Vec<u8>) {
        self.out.push_back(Out::Bytes { bytes, at: 0, file: None });
    }

    /// Queues a frame.
    ///
    /// # Errors
    /// [`SessionError::Protocol`] for a body that is too long.
    pub(crate) fn send(&mut self, kind: FrameKind, body: &[u8]) -> Result<(), SessionError> {
        self.send_with_file(kind, body, None)
    }

    /// Queues a frame with a file attached.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub(crate) fn send_with_file(
        &mut self,
        kind: FrameKind,
        body: &[u8],
        file: Option<OwnedFd>,
    ) -> Result<(), SessionError> {
        let sealer = self.sealer.as_mut().ok_or(SessionError::Protocol("no handshake yet".into()))?;
        let bytes = sealer.seal(kind, body)?;
        self.out.push_back(Out::Bytes { bytes, at: 0, file });
        Ok(())
    }

    /// Queues the payload of the frame before it.
    pub(crate) fn send_payload(&mut self, payload: Payload) {
        self.out.push_back(Out::Payload(payload));
    }

    /// Sends until nothing waits (true) or the socket would block (false). `sent` hears the bytes of each payload.
    ///
    /// # Errors
    /// [`SessionError::Lost`].
    pub(crate) fn flush(&mut self, mut sent: impl FnMut(u64)) -> Result<bool, SessionError> {
        if let Some(sends) = &mut self.zero_copy {
            sends.collect(self.socket.fd())?;
        }
        while !self.out.is_empty() {
            match self.send_front(&mut sent) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// One call for what waits longest. A frame leaves together with the start of its payload.
    fn send_front(&mut self, sent: &mut impl FnMut(u64)) -> io::Result<()> {
        let Self { socket, out, zero_copy, .. } = self;
        let (first, rest) = out.as_mut_slices();
        let (front, next) = match (first, rest) {
            ([front, next, ..], _) => (front, Some(next)),
            ([front], rest) => (front, rest.first_mut()),
            ([], _) => return Ok(()),
        };
        let done = match (front, next) {
            (Out::Bytes { bytes, at, file: None }, Some(Out::Payload(payload))) => {
                let before = payload.moved();
                *at += payload.send(socket.fd(), &bytes[*at..], zero_copy.as_mut())?;
                sent(payload.moved() - before);
                usize::from(*at == bytes.len()) + usize::from(payload.is_complete())
            }
            (Out::Bytes { bytes, at, file }, _) => {
                *at += match file {
                    Some(file) => socket.write_with_file(&bytes[*at..], file.as_fd())?,
                    None => socket.write(&bytes[*at..])?,
                };
                *file = None;
                usize::from(*at == bytes.len())
            }
            (Out::Payload(payload), _) => {
                let before = payload.moved();
                payload.send(socket.fd(), &[], zero_copy.as_mut())?;
                sent(payload.moved() - before);
                usize::from(payload.is_complete())
            }
        };
        self.out.drain(..done);
        Ok(())
    }

    /// Exactly `count` bytes of the handshake, once they are there.
    ///
    /// # Errors
    /// [`SessionError::Lost`].
    pub(crate) fn read_exact(&mut self, count: usize) -> Result<Option<Vec<u8>>, SessionError> {
        if self.input.len() != count {
            self.input.resize(count, 0);
        }
        while self.filled < count {
            let Self { input, filled, ahead, ahead_bytes, files, socket, .. } = self;
            let into = &mut input[*filled..];
            let waits = ahead.rest();
            if !waits.is_empty() {
                let taken = waits.len().min(into.len());
                into[..taken].copy_from_slice(&waits[..taken]);
                ahead.consume(taken);
                *filled += taken;
                continue;
            }
            let read = match files {
                Some(files) => socket.read_with_files(into, files),
                None if *ahead_bytes > into.len() => ahead.fill(*ahead_bytes, |into| socket.read(into)),
                None => socket.read(into),
            };
            match read {
                Ok(0) => return Err(SessionError::Lost("the peer closed the connection".into())),
                Ok(_) if !ahead.rest().is_empty() => {}
                Ok(more) => *filled += more,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.filled = 0;
        Ok(Some(std::mem::take(&mut self.input)))
    }

    /// The next frame whose seal holds, once it is there whole.
    ///
    /// # Errors
    /// [`SessionError::Protocol`] for a frame that breaks a bound or its seal; [`SessionError::Lost`].
    pub(crate) fn next_frame(&mut self) -> Result<Option<(FrameKind, Vec<u8>)>, SessionError> {
        let header = match self.header {
            Some(header) => header,
            None => {
                let Some(bytes) = self.read_exact(HEADER_BYTES)? else { return Ok(None) };
                let bytes: [u8; HEADER_BYTES] =
                    bytes.try_into().map_err(|_| SessionError::Protocol("a short header".into()))?;
                *self.header.insert(Header::parse(&bytes)?)
            }
        };
        let Some(body) = self.read_exact(header.len)? else { return Ok(None) };
        self.header = None;
        let opener = self.opener.as_mut().ok_or(SessionError::Protocol("no handshake yet".into()))?;
        opener.open(&header, &body)?;
        Ok(Some((header.kind, body)))
    }

    /// Receives a payload: true when it is complete, false when the socket would block, or after `budget` bytes.
    ///
    /// # Errors
    /// [`SessionError::Lost`].
    pub(crate) fn receive(&mut self, payload: &mut Payload, budget: &mut u64) -> Result<bool, SessionError> {
        let taken = payload.take(self.ahead.rest());
        self.ahead.consume(taken);
        while !payload.is_complete() && *budget > 0 {
            match payload.receive(self.socket.fd()) {
                Ok(0) => return Err(SessionError::Lost("the peer closed the connection".into())),
                Ok(count) => *budget = budget.saturating_sub(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(payload.is_complete())
    }
}

impl Drop for Channel {
    /// Memory that the kernel is not done with must not be sent any more, with whatever its owner writes there next:
    /// the connection is reset.
    fn drop(&mut self) {
        if self.zero_copy.as_ref().is_some_and(|sends| sends.completed() < sends.sent()) {
            self.socket.reset_at_close();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use mio::net::UnixStream;
    use towline_wire::blocks::Extent;

    use super::*;
    use crate::Memory;

    fn channels() -> (Channel, Channel, std::os::unix::net::UnixStream) {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        let keys = SessionKeys { client: [1; 32], server: [2; 32] };
        let raw = far.try_clone().unwrap();
        let mut client = Channel::new(Socket::Unix(UnixStream::from_std(near)));
        let mut server = Channel::new(Socket::Unix(UnixStream::from_std(far)));
        client.secure(&keys, Role::Client);
        server.secure(&keys, Role::Server);
        (client, server, raw)
    }

    #[test]
    fn frames_that_come_byte_by_byte_are_read_whole() {
        let (mut client, _server, mut raw) = channels();
        let mut sealer = Sealer::new([2; 32]);
        let bytes =
            [sealer.seal(FrameKind::Control, b"one").unwrap(), sealer.seal(FrameKind::Read, b"").unwrap()];
        let mut frames = Vec::new();
        for byte in bytes.concat() {
            raw.write_all(&[byte]).unwrap();
            frames.extend(client.next_frame().unwrap());
        }
        assert_eq!(frames, [(FrameKind::Control, b"one".to_vec()), (FrameKind::Read, vec![])]);
    }

    #[test]
    fn a_payload_larger_than_the_socket_holds_goes_in_pieces() {
        let (mut client, mut server, _raw) = channels();
        let len = 3 << 20;
        let [from, to] = ["from", "to"].map(|name| Arc::new(Memory::allocate(name, len).unwrap()));
        from.write_from(len - 4, b"last").unwrap();
        let whole = || vec![Extent { offset: 0, len }];
        client.send(FrameKind::Write, b"payload follows").unwrap();
        client.send_payload(Payload::outgoing(from, whole()).unwrap());
        let mut incoming = Payload::incoming(Arc::clone(&to), whole()).unwrap();
        let (mut sent, mut head) = (0, None);
        for _ in 0..100_000 {
            client.flush(|bytes| sent += bytes).unwrap();
            if head.is_none() {
                head = server.next_frame().unwrap();
            } else if server.receive(&mut incoming, &mut (1 << 16)).unwrap() {
                break;
            }
        }
        assert_eq!((sent, incoming.moved(), client.backlog()), (len, len, 0));
        let mut last = [0; 4];
        to.read_into(len - 4, &mut last).unwrap();
        assert_eq!(&last, b"last");
    }

    #[test]
    fn files_arrive_with_their_frames_and_strangers_cannot_attach_any() {
        let (mut client, mut server, _raw) = channels();
        let file = || Memory::allocate("file", 1).unwrap().fd().unwrap().try_clone_to_owned().unwrap();
        server.accept_files();
        for word in [b"a", b"b"] {
            client.send_with_file(FrameKind::Control, word, Some(file())).unwrap();
        }
        server.send_with_file(FrameKind::Control, b"c", Some(file())).unwrap();
        client.flush(|_| {}).unwrap();
        server.flush(|_| {}).unwrap();
        assert!(server.next_frame().unwrap().is_some() && server.take_file().is_some());
        assert!(server.take_file().is_none());
        assert!(server.next_frame().unwrap().is_some() && server.take_file().is_some());
        assert!(client.next_frame().unwrap().is_some() && client.take_file().is_none());
    }

    #[test]
    fn the_end_of_the_stream_right_behind_a_frame_is_seen_in_the_same_turn() {
        let (mut client, mut server, raw) = channels();
        server.send(FrameKind::Control, b"last words").unwrap();
        server.flush(|_| {}).unwrap();
        drop((server, raw));
        client.read_ahead(512);
        assert!(client.next_frame().unwrap().is_some());
        assert!(matches!(client.next_frame(), Err(SessionError::Lost(_))), "no event will tell it again");
    }

    #[test]
    fn the_end_of_the_stream_is_a_lost_session() {
        let (mut client, server, raw) = channels();
        drop((server, raw));
        assert!(matches!(client.next_frame(), Err(SessionError::Lost(_))));
    }
}
