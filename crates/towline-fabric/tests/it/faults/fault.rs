//! The words of the matrix: what goes wrong, when, and what a row says of it.

use towline_wire::receipt::TransportKind;

use super::ends::{CONNECT_DEADLINE, STALLED};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    OwnerKilled,
    OwnerStopped,
    Cut,
    Silent,
    Restarted,
    LeaseExpired,
    Deregistered,
    ReaderKilled,
    ReaderStopped,
    ReaderSilent,
    NoMemory,
    Card(CardFlaw),
    Lists(ListFlaw),
    Churn,
}

/// What is wrong with a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CardFlaw {
    Version,
    Truncated,
    TooLong,
    LongerThanAFrame,
    Tampered,
    OfAnother,
}

/// What is wrong with block lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListFlaw {
    Outside,
    Overflowing,
    ZeroLength,
    Empty,
    Overlapping,
}

/// When it goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Registering,
    Handshake,
    Opening,
    Idle,
    Posting,
    Queued,
    Moving,
    Writing,
    Fencing,
    Notifying,
    Completed,
    Releasing,
    Throughout,
}

impl Fault {
    /// The page's section: its title and what is done, in one sentence.
    pub(super) fn section(self) -> (&'static str, &'static str) {
        match self {
            Self::OwnerKilled => ("The owner is killed", "`kill -9` of the owner's process."),
            Self::OwnerStopped => (
                "The owner is stopped",
                "`SIGSTOP` of the owner's process for longer than the deadline, then `SIGCONT`: what it sends late finds \
                 the memory poisoned, and leaves it so.",
            ),
            Self::Cut => ("The connection is cut", "Every connection between the two ends at once."),
            Self::Silent => (
                "The connection is half-open",
                "Both sides stay connected, and nothing passes any more, not even the end of a connection.",
            ),
            Self::Restarted => (
                "The owner is started anew",
                "Killed, and started under the same name, behind the same address, with other bytes in regions of the same \
                 ids. Afterwards the reader connects to it and reads what it lends now.",
            ),
            Self::LeaseExpired => (
                "The lease ends",
                "The owner ends the lease, changes the fence slot, and gives the blocks to somebody else, who writes over \
                 them.",
            ),
            Self::Deregistered => {
                ("The region is deregistered", "The owner drops the region; the lease goes on.")
            }
            Self::ReaderKilled => (
                "The reader is killed",
                "`kill -9` of the reader's process, as the owner sees it: its memory is let go of, its places are free, \
                 nothing more is written into what peers may write, and the next reader is served.",
            ),
            Self::ReaderStopped => (
                "The reader is stopped",
                "`SIGSTOP` of the reader's process, as the owner sees it, then `SIGCONT`. *Success* means that the owner ended \
                 the lease meanwhile, wrote other bytes into what it had lent to be read, and served another reader; that over \
                 TCP everything asked for after the lease was refused; and that nothing was left of the reader once it had \
                 gone. Until then its sessions stay, each a place and a file, as the kernel of a stopped process answers \
                 keep-alive; all but one to which bytes wait to be sent, which ends after two minutes (`TCP_USER_TIMEOUT`).",
            ),
            Self::ReaderSilent => (
                "The reader's connection is half-open",
                "Nothing passes any more between the two, as the owner sees it. *Success* means what it means above. The \
                 owner's kernel ends such a connection within two minutes: by keep-alive (asked after 30 s, then every 30 s), \
                 or, with bytes under way, by `TCP_USER_TIMEOUT` (120 s). The tests don't wait so long, and cut it then.",
            ),
            Self::NoMemory => ("Memory runs out", "`RLIMIT_AS` leaves no room for a mapping (`ENOMEM`)."),
            Self::Card(_) => (
                "The card is wrong",
                "An owner that holds the cluster's key and sends a card that no release of this one sends.",
            ),
            Self::Lists(_) => ("The block lists are wrong", "As the caller posts them."),
            Self::Churn => (
                "Peers come and go",
                "1,000 connects and disconnects, a transfer each; open files, lines of `/proc/self/maps`, threads and \
                 resident bytes are counted before and after.",
            ),
        }
    }

    /// What a row of that section says before its state.
    pub(super) fn detail(self) -> &'static str {
        match self {
            Self::Card(CardFlaw::Version) => "of another version",
            Self::Card(CardFlaw::Truncated) => "cut off half-way",
            Self::Card(CardFlaw::TooLong) => "of 70 KiB, where 64 are the most",
            Self::Card(CardFlaw::LongerThanAFrame) => "of 97 KiB, where a frame has at most 96",
            Self::Card(CardFlaw::Tampered) => "with a bit flipped on the way",
            Self::Card(CardFlaw::OfAnother) => "of another incarnation, on the data connection",
            Self::Lists(ListFlaw::Outside) => "a block outside its region, on either side",
            Self::Lists(ListFlaw::Overflowing) => "offsets or sizes past 64 bits",
            Self::Lists(ListFlaw::ZeroLength) => "blocks of no bytes",
            Self::Lists(ListFlaw::Empty) => "no blocks",
            Self::Lists(ListFlaw::Overlapping) => "a destination named twice",
            _ => "",
        }
    }
}

impl State {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Registering => "registering memory",
            Self::Handshake => "connecting: control handshake",
            Self::Opening => "connecting: path opens",
            Self::Idle => "connected, idle",
            Self::Posting => "posting",
            Self::Queued => "posted, queued",
            Self::Moving => "slices moving",
            Self::Writing => "slices moving, a write",
            Self::Fencing => "data in place, fence not",
            Self::Notifying => "data in place, notification not sent",
            Self::Completed => "completed",
            Self::Releasing => "releasing",
            Self::Throughout => "connect, read, disconnect",
        }
    }
}

/// What one transport does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cell {
    /// One of these, and nothing else.
    Ends(&'static [&'static str]),
    /// It can't happen there, and why.
    Never(&'static str),
}

impl Cell {
    /// Whether the operation runs into its deadline, which should then be a short one.
    pub(super) fn runs_out(self) -> bool {
        match self {
            Self::Ends(ends) => ends.iter().any(|end| [STALLED, CONNECT_DEADLINE].contains(end)),
            Self::Never(_) => false,
        }
    }
}

/// One line of the page, and one test.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) test: &'static str,
    pub(super) fault: Fault,
    pub(super) state: State,
    pub(super) shm: Cell,
    pub(super) tcp: Cell,
    /// Why it is so, where that isn't plain.
    pub(super) note: &'static str,
}

impl Row {
    pub(super) fn cell(&self, kind: TransportKind) -> Cell {
        if kind == TransportKind::Shm { self.shm } else { self.tcp }
    }
}
