//! A proxy between a reader and its owner that passes, holds, cuts or falls silent when it is told to.
//!
//! It stands in front of the owner's port, and of its Unix socket as well. Which connection is which is in the Hello
//! (docs/wire.md, section 2); files that come along over a Unix socket are passed on. A connection that arrives while
//! its answers are held isn't dialled onward yet: the owner that answers in the end is the one that is there then.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};

use crate::support::PATIENCE;

const HELLO_BYTES: usize = 40;
/// Where in the Hello the purpose stands, and what it is for data.
const PURPOSE: (usize, u8) = (6, 2);
/// Bytes passed at a time, so also by how much a hold may come late.
const CHUNK: usize = 64 << 10;
/// Files that one message may carry here; an agent sends one.
const FILES: usize = 4;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Control,
    Data,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Towards the owner.
    Up,
    /// Back to the reader.
    Down,
}

/// Where connections are passed to.
#[derive(Clone, Debug)]
pub(super) enum Upstream {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// See the head of this file. A clone is the same valve.
#[derive(Clone)]
pub(super) struct Valve(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    news: Condvar,
}

struct State {
    upstream: Upstream,
    /// Bytes that may still pass, for each lane and way.
    allowed: [u64; 4],
    /// Connections that want to pass something and may not.
    held: [usize; 4],
    /// Connections of an earlier life are cut.
    life: usize,
    /// Connections so far, and how many of them have fallen silent: the first ones.
    dialled: usize,
    silent: usize,
    sockets: Vec<Arc<OwnedFd>>,
}

/// Which connection.
#[derive(Clone, Copy)]
struct Birth {
    life: usize,
    number: usize,
}

fn index(lane: Lane, way: Way) -> usize {
    usize::from(lane == Lane::Data) * 2 + usize::from(way == Way::Down)
}

impl Valve {
    /// Opens a port; gives the address to dial.
    pub(super) fn tcp(upstream: SocketAddr) -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let valve = Self::new(Upstream::Tcp(upstream));
        valve.serve(move || listener.accept().map(|(stream, _)| stream.into()));
        (valve, address)
    }

    /// Takes the place of the socket at `path`.
    pub(super) fn unix(path: &Path) -> Self {
        let moved = path.with_extension("moved");
        std::fs::rename(path, &moved).unwrap();
        let listener = UnixListener::bind(path).unwrap();
        let valve = Self::new(Upstream::Unix(moved));
        valve.serve(move || listener.accept().map(|(stream, _)| stream.into()));
        valve
    }

    fn new(upstream: Upstream) -> Self {
        let (allowed, held) = ([u64::MAX; 4], [0; 4]);
        let state = State { upstream, allowed, held, life: 0, dialled: 0, silent: 0, sockets: Vec::new() };
        Self(Arc::new(Shared { state: Mutex::new(state), news: Condvar::new() }))
    }

    fn serve(&self, accept: impl Fn() -> io::Result<OwnedFd> + Send + 'static) {
        let shared = Arc::clone(&self.0);
        std::thread::spawn(move || {
            while let Ok(client) = accept() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.connect(Arc::new(client)));
            }
        });
    }

    /// Lets `bytes` more pass on that lane and way, and then nothing.
    pub(super) fn hold(&self, lane: Lane, way: Way, bytes: u64) {
        self.0.lock().allowed[index(lane, way)] = bytes;
    }

    /// Whether something is held there.
    pub(super) fn is_held(&self, lane: Lane, way: Way) -> bool {
        self.0.lock().held[index(lane, way)] > 0
    }

    /// Waits until something is held there.
    pub(super) fn wait_held(&self, lane: Lane, way: Way) {
        let until = Instant::now() + PATIENCE;
        let mut state = self.0.lock();
        while state.held[index(lane, way)] == 0 {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "nothing came to the valve: {lane:?} {way:?}");
            state = self.0.news.wait_timeout(state, left).unwrap().0;
        }
    }

    /// Passes everything, what was held first.
    pub(super) fn resume(&self) {
        let mut state = self.0.lock();
        (state.allowed, state.silent) = ([u64::MAX; 4], 0);
        drop(state);
        self.0.news.notify_all();
    }

    /// Passes nothing any more of the connections that there are, not even their end: both sides find them half-open. Those
    /// that come later pass.
    pub(super) fn silence(&self) {
        let mut state = self.0.lock();
        (state.allowed, state.silent) = ([u64::MAX; 4], state.dialled);
    }

    /// Cuts every connection; what is held is lost.
    pub(super) fn cut(&self) {
        let mut state = self.0.lock();
        state.life += 1;
        state.allowed = [u64::MAX; 4];
        for socket in state.sockets.drain(..) {
            let _ = shutdown(&socket, Shutdown::Both);
        }
        drop(state);
        self.0.news.notify_all();
    }

    /// Passes connections on to another owner from now on.
    pub(super) fn point_at(&self, upstream: Upstream) {
        self.0.lock().upstream = upstream;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits until `bytes` may pass; false when the connection was cut meanwhile.
    fn admit(&self, index: usize, bytes: u64, Birth { life, number }: Birth) -> bool {
        let mut state = self.lock();
        while (state.allowed[index] == 0 || number < state.silent) && state.life == life {
            state.held[index] += 1;
            self.news.notify_all();
            state = self.news.wait(state).unwrap();
            state.held[index] -= 1;
        }
        state.allowed[index] = state.allowed[index].saturating_sub(bytes);
        state.life == life
    }

    fn connect(self: &Arc<Self>, client: Arc<OwnedFd>) {
        let birth = {
            let mut state = self.lock();
            state.sockets.push(Arc::clone(&client));
            state.dialled += 1;
            Birth { life: state.life, number: state.dialled - 1 }
        };
        let Some(hello) = read_hello(client.as_fd()) else { return };
        let lane = if hello[PURPOSE.0] == PURPOSE.1 { Lane::Data } else { Lane::Control };
        let admitted = self.admit(index(lane, Way::Down), 0, birth);
        let upstream = self.lock().upstream.clone();
        let server = match upstream {
            Upstream::Tcp(address) => TcpStream::connect(address).map(OwnedFd::from),
            Upstream::Unix(path) => UnixStream::connect(path).map(OwnedFd::from),
        };
        let Some(server) = server.ok().filter(|_| admitted).map(Arc::new) else {
            let _ = shutdown(&client, Shutdown::Both);
            return;
        };
        self.lock().sockets.push(Arc::clone(&server));
        if send(server.as_fd(), &hello, &[]).is_err() {
            return;
        }
        let up = (Arc::clone(&client), Arc::clone(&server), index(lane, Way::Up));
        let shared = Arc::clone(self);
        std::thread::spawn(move || shared.pass(&up.0, &up.1, (up.2, birth)));
        self.pass(&server, &client, (index(lane, Way::Down), birth));
    }

    fn pass(&self, from: &OwnedFd, to: &OwnedFd, (index, birth): (usize, Birth)) {
        let mut buffer = vec![0; CHUNK];
        while let Ok((count @ 1.., files)) = receive(from.as_fd(), &mut buffer) {
            if !self.admit(index, count as u64, birth) || send(to.as_fd(), &buffer[..count], &files).is_err()
            {
                break;
            }
        }
        // The end of a connection is held like everything else.
        self.admit(index, 0, birth);
        for socket in [from, to] {
            let _ = shutdown(socket, Shutdown::Both);
        }
    }
}

fn read_hello(client: BorrowedFd<'_>) -> Option<[u8; HELLO_BYTES]> {
    let (mut hello, mut filled) = ([0; HELLO_BYTES], 0);
    while filled < HELLO_BYTES {
        let (count, _) = receive(client, &mut hello[filled..]).ok()?;
        filled += Some(count).filter(|count| *count > 0)?;
    }
    Some(hello)
}

fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let rights = control.drain().filter_map(|ancillary| match ancillary {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok((message.bytes, rights.flatten().collect()))
}

fn send(socket: BorrowedFd<'_>, mut bytes: &[u8], files: &[OwnedFd]) -> io::Result<()> {
    let mut files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        bytes = &bytes[sent..];
        files.clear();
    }
    Ok(())
}
