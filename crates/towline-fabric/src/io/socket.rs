//! A stream socket, whichever family.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use mio::net::{TcpStream, UnixStream};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, send, sendmsg, sockopt,
};

/// Idle time before the kernel asks a silent peer whether it is there, and between its three questions: a host that
/// vanished is noticed within two minutes, without this process waking up for it.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// How long bytes that were sent may stay unanswered: what keepalive does for a silent connection, for one with bytes
/// under way, which the kernel else repeats for a quarter of an hour.
const UNANSWERED_MS: u32 = 120_000;

/// Bytes under way on loopback, which the kernel doubles for its bookkeeping. Its own buffers grow to several MiB, which
/// then go through memory twice; between hosts they have to.
const LOOPBACK_BYTES: usize = 256 << 10;

/// A connected or connecting stream.
pub(crate) enum Socket {
    /// To any host.
    Tcp(TcpStream),
    /// Within this host.
    Unix(UnixStream),
}

impl Socket {
    /// Starts connecting; the first readiness tells how it went.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn connect(address: SocketAddr) -> io::Result<Self> {
        TcpStream::connect(address).map(Self::Tcp)
    }

    /// What the reactor registers.
    pub(crate) fn source(&mut self) -> &mut dyn mio::event::Source {
        match self {
            Self::Tcp(stream) => stream,
            Self::Unix(stream) => stream,
        }
    }

    /// For raw vectored calls.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }

    /// Whether it connects processes of one host by file.
    pub(crate) fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Whether the connection stands; false while it is still being made.
    ///
    /// # Errors
    /// Why it was not made.
    pub(crate) fn check_connected(&self) -> io::Result<bool> {
        let (error, peer) = match self {
            Self::Tcp(stream) => (stream.take_error()?, stream.peer_addr().map(drop)),
            Self::Unix(stream) => (stream.take_error()?, stream.peer_addr().map(drop)),
        };
        match (error, peer) {
            (Some(error), _) => Err(error),
            (None, Ok(())) => Ok(true),
            (None, Err(error)) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
            (None, Err(error)) => Err(error),
        }
    }

    /// Small frames leave at once; vanished hosts are noticed; within the host, what is under way stays in the caches.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn tune(&self) -> io::Result<()> {
        let Self::Tcp(stream) = self else { return Ok(()) };
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
        sockopt::set_tcp_keepintvl(stream, KEEPALIVE)?;
        sockopt::set_tcp_keepcnt(stream, 3)?;
        sockopt::set_tcp_user_timeout(stream, UNANSWERED_MS)?;
        if !self.leaves_host() {
            sockopt::set_socket_send_buffer_size(stream, LOOPBACK_BYTES)?;
            sockopt::set_socket_recv_buffer_size(stream, LOOPBACK_BYTES)?;
        }
        Ok(())
    }

    /// Whether the other end is on another host, as far as the addresses tell: of one of this host's own addresses the
    /// kernel makes loopback.
    pub(crate) fn leaves_host(&self) -> bool {
        let Self::Tcp(stream) = self else { return false };
        match (stream.local_addr(), stream.peer_addr()) {
            (Ok(local), Ok(remote)) => !remote.ip().to_canonical().is_loopback() && local.ip() != remote.ip(),
            _ => false,
        }
    }

    /// Has the connection reset when the socket is closed: what was not sent by then never is.
    pub(crate) fn reset_at_close(&self) {
        if let Self::Tcp(stream) = self
            && let Err(error) = sockopt::set_socket_linger(stream, Some(Duration::ZERO))
        {
            tracing::warn!(%error, "a connection that is being closed could not be set to reset");
        }
    }

    /// Local and remote end, for receipts.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Tcp(stream) => match (stream.local_addr(), stream.peer_addr()) {
                (Ok(local), Ok(remote)) => format!("{local}->{remote}"),
                _ => "tcp".into(),
            },
            Self::Unix(_) => "unix".into(),
        }
    }

    /// Reads without taking files: what a stranger attaches is dropped by the kernel.
    ///
    /// # Errors
    /// The kernel's, `WouldBlock` included.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(into),
            Self::Unix(stream) => stream.read(into),
        }
    }

    /// Reads, and takes the files that come along.
    ///
    /// # Errors
    /// The kernel's, `WouldBlock` included.
    pub(crate) fn read_with_files(
        &self,
        into: &mut [u8],
        files: &mut VecDeque<OwnedFd>,
    ) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message =
            recvmsg(self.fd(), &mut [IoSliceMut::new(into)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for ancillary in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = ancillary {
                files.extend(received);
            }
        }
        Ok(message.bytes)
    }

    /// Writes. Never raises a signal.
    ///
    /// # Errors
    /// The kernel's, `WouldBlock` included.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.fd(), bytes, SendFlags::NOSIGNAL)?)
    }

    /// Writes with a file attached to the first byte.
    ///
    /// # Errors
    /// The kernel's, `WouldBlock` included; the file has gone with the first byte that went.
    pub(crate) fn write_with_file(&self, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        Ok(sendmsg(self.fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
    }
}
