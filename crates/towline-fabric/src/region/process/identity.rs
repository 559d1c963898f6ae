//! Which process is at the other end of a Unix socket, so that a number that was given to another is never taken for it.
//!
//! The kernel copies between processes by *number*, and numbers are given anew. A `pidfd` is the process itself: it says
//! when the process has ended, and until then nobody else has the number. So: ask the socket for number and `pidfd`, and
//! ask the `pidfd` before and after each use. Before Linux 6.5 the socket gives the number only; the `pidfd` is then opened
//! by number, and the number's start time, equal before and after that, shows that it did not change hands in between.
//! Whether the process is the one meant, and not one that merely holds the socket, its memory shows (`mod.rs`).

use std::ffi::c_int;
use std::fs::read_to_string;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::ReachError;

/// A process of this host.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    handle: OwnedFd,
}

impl Process {
    /// The process that listens, or connected, at the other end of `socket`.
    ///
    /// # Errors
    /// [`ReachError::Hidden`] when it has no number here; [`ReachError::Ended`]; [`ReachError::Unnamed`] with the kernel's
    /// reason.
    pub(crate) fn behind(socket: BorrowedFd<'_>) -> Result<Self, ReachError> {
        let unnamed = |step| move |error| ReachError::Unnamed { step, error };
        let pid = peer_pid(socket).map_err(unnamed("SO_PEERCRED"))?.ok_or(ReachError::Hidden)?;
        match peer_handle(socket) {
            Ok(handle) => Ok(Self { pid, handle }),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOPROTOOPT) => Self::numbered(pid),
            Err(error) if ended(&error) => Err(ReachError::Ended),
            Err(error) => Err(unnamed("SO_PEERPIDFD")(error)),
        }
    }

    /// The process that has the number now.
    pub(super) fn numbered(pid: Pid) -> Result<Self, ReachError> {
        let before = started(pid)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| match errno {
            Errno::SRCH => ReachError::Ended,
            errno => ReachError::Unnamed { step: "pidfd_open", error: errno.into() },
        })?;
        if started(pid)? == before { Ok(Self { pid, handle }) } else { Err(ReachError::Ended) }
    }

    /// Whether it has not ended: then its number is its own, and has been since this was made.
    pub(crate) fn is_alive(&self) -> bool {
        let mut ended = [PollFd::new(&self.handle, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::io::retry_on_intr(|| poll(&mut ended, Some(&now))) == Ok(0)
    }

    /// Its number, which is its own while it lives.
    pub(super) fn pid(&self) -> c_int {
        self.pid.as_raw_pid()
    }

    #[cfg(test)]
    pub(super) fn with_number_of(self, pid: Pid) -> Self {
        Self { pid, ..self }
    }
}

/// Number of the process at the other end of a Unix socket; `None` when it has none in this process's pid namespace.
///
/// # Errors
/// The kernel's.
pub(crate) fn peer_pid(socket: BorrowedFd<'_>) -> io::Result<Option<Pid>> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = length_of(&peer);
    // Not rustix's: its type for the answer has no room for the 0 that a hidden process has.
    // SAFETY: both pointers are to values of this frame, of the types that this option fills.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if done == 0 { Ok(Pid::from_raw(peer.pid)) } else { Err(io::Error::last_os_error()) }
}

/// Linux 6.5.
fn peer_handle(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut handle: c_int = -1;
    let mut len = length_of(&handle);
    // SAFETY: both pointers are to values of this frame, of the types that this option fills.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut handle).cast(),
            &raw mut len,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor, which nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(handle) })
}

fn length_of<T>(value: &T) -> libc::socklen_t {
    libc::socklen_t::try_from(size_of_val(value)).unwrap_or(0)
}

/// What the kernel says of a socket whose process has been reaped: `EINVAL` before Linux 6.16.
fn ended(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::SRCH | Errno::INVAL | Errno::NODATA))
}

/// When the process that has the number began, in the kernel's ticks: field 22 of `/proc/PID/stat`.
fn started(pid: Pid) -> Result<u64, ReachError> {
    let stat = read_to_string(format!("/proc/{pid}/stat")).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ReachError::Ended,
        _ => ReachError::Unnamed { step: "reading /proc/PID/stat", error },
    })?;
    start_time(&stat).ok_or(ReachError::Unnamed {
        step: "reading /proc/PID/stat",
        error: io::ErrorKind::InvalidData.into(),
    })
}

/// The second field is a name in brackets, which may hold anything; the 22nd is the 20th after it.
fn start_time(stat: &str) -> Option<u64> {
    let (_, after) = stat.rsplit_once(')')?;
    after.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn sleeper() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_socket_tells_its_process() {
        let (near, _far) = UnixStream::pair().unwrap();
        let process = Process::behind(near.as_fd()).unwrap();
        assert_eq!(process.pid(), c_int::try_from(std::process::id()).unwrap());
        assert!(process.is_alive());
    }

    #[test]
    fn a_process_named_by_number_is_seen_to_end() {
        let mut child = sleeper();
        let process = Process::numbered(Pid::from_child(&child)).unwrap();
        assert!(process.is_alive());
        drop(child.stdin.take());
        // Waited for without being reaped: the number is still its own.
        let seen = rustix::process::waitid(
            rustix::process::WaitId::Pid(Pid::from_child(&child)),
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT,
        );
        assert!(seen.unwrap().is_some() && !process.is_alive());
        let pid = Pid::from_child(&child);
        child.wait().unwrap();
        assert!(!process.is_alive());
        assert!(matches!(Process::numbered(pid), Err(ReachError::Ended)));
    }

    #[test]
    fn the_start_time_is_read_past_any_name() {
        let fields = (3..=52).map(|field| field.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(start_time(&format!("7 (a) b (c)) {fields}\n")), Some(22));
        assert_eq!(start_time("7 (a) S 1 2"), None);
        let ours = rustix::process::getpid();
        assert_eq!(started(ours).unwrap(), started(ours).unwrap());
    }
}
