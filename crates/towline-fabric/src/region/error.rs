//! What can go wrong with memory.

use std::path::PathBuf;

use thiserror::Error;

use super::REGION_BYTES_MAX;

/// Why memory could not be made, mapped or registered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// Ask for 1 byte to 1 TiB.
    #[error("a region has 1 to {REGION_BYTES_MAX} bytes, not {len}")]
    Size {
        /// Bytes asked for.
        len: u64,
    },
    /// The kernel refused: free memory, raise the container's limit, or ask for less.
    #[error("{step} failed for a region of {len} bytes: {errno}")]
    Allocate {
        /// Bytes asked for.
        len: u64,
        /// The system call.
        step: &'static str,
        /// Its error.
        errno: rustix::io::Errno,
    },
    /// The host has not enough huge pages left, or can't keep their seals: reserve more (`vm.nr_hugepages`), or take
    /// normal ones. `ENOSPC` and `ENOMEM`: too few; `EOPNOTSUPP`: Linux before 5.13; `EINVAL`: before 4.16.
    #[error("no huge pages for a region of {len} bytes ({step}: {errno})")]
    HugePages {
        /// Bytes asked for.
        len: u64,
        /// The system call.
        step: &'static str,
        /// Its error.
        errno: rustix::io::Errno,
    },
    /// The file can't be used; the kernel says why.
    #[error("{step} of {} failed: {errno}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system call.
        step: &'static str,
        /// Its error.
        errno: rustix::io::Errno,
    },
    /// Name a regular file: folders, pipes and devices are no memory.
    #[error("{} is no regular file", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
    },
    /// Ask for less, or make the file longer first.
    #[error("{} has {found} bytes, which are not {len} from {offset} on", path.display())]
    FileEnds {
        /// The file.
        path: PathBuf,
        /// Where the memory was to begin.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// No such bytes can be in this process: the pointer or the length is wrong.
    #[error("{len} bytes from that address pass the end of the address space")]
    Wraps {
        /// Bytes named.
        len: u64,
    },
    /// The peer passed a file that it could still shrink; it is not mapped.
    #[error("the peer's memory is not sealed against resizing")]
    Unsealed,
    /// The mapping does not show what the card promised: it is not the memory of the agent that sent the card.
    #[error("the mapping does not carry the nonce of the peer's card")]
    NotThePeers,
    /// Peers can write only into memory made for it, with [`Access::PeersWrite`](super::Access).
    #[error("the memory is not made for writes of peers")]
    Sealed,
    /// A memory that belongs to a peer cannot be offered to others.
    #[error("the memory is a peer's, mapped here")]
    Peers,
    /// Deregister regions first.
    #[error("an agent has at most {limit} regions")]
    TooMany {
        /// The bound.
        limit: usize,
    },
    /// The peer's card and its file disagree; fetch the card again.
    #[error("the peer promised {promised} bytes, its memory has {found}")]
    Length {
        /// Bytes in the card.
        promised: u64,
        /// Bytes of the file.
        found: i64,
    },
}

/// A range that leaves the memory, or a write to one that takes none.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{len} bytes at {offset} are outside a {} memory of {memory_len} bytes", if *writable { "writable" } else { "read-only" })]
pub struct RangeError {
    /// First byte asked for.
    pub offset: u64,
    /// Bytes asked for.
    pub len: u64,
    /// Bytes there are; of a file, now.
    pub memory_len: u64,
    /// Whether writes are allowed at all.
    pub writable: bool,
}
