//! UCX: `libucp.so.0`, 1.13 or later.
//!
//! - [`Ucx`] is the library; [`Settings`] what its options are for one context.
//! - [`Context`] may be used by several threads: it maps memory ([`Mapped`]), whose packed key a peer needs to reach it.
//! - [`Worker`] belongs to one thread, and so does what stands on it: [`Endpoint`]s to peers, their [`RemoteKey`]s, and what was asked
//!   of them. Nothing moves unless [`Worker::progress`] is called, which also tells what came to its end; between calls the thread may
//!   sleep on the worker's file, once [`Worker::arm`] has agreed.
//! - [`lanes`] says what an endpoint's bytes go over.
//!
//! ```text
//! Ucx ── Context ── Mapped ─────────┐
//!           └────── Worker ── Endpoint ── Batch { get | put | flush … } ── its end
//!                               └──────── RemoteKey ┘
//! ```
//!
//! **Cost of a get.** A call of some 100 ns, a request of UCX's own pool, one callback; a batch of any number of them is one
//! allocation here.

pub mod abi;
mod api;
mod batch;
mod context;
mod endpoint;
pub mod lanes;
mod status;
mod worker;

use std::ffi::CStr;
use std::path::Path;

use abi::{LIB_ATTR_MAX_THREAD_LEVEL, LibAttr, THREAD_MODE_MULTI};
use api::Table;
use status::Words;

pub use batch::{Batch, Finished};
pub use context::{Context, Mapped, Reach, Settings};
pub use endpoint::{Endpoint, ErrorHandling, Piece, RemoteKey};
pub use status::UcxError;
pub use worker::Worker;

use crate::library::{Library, LibraryError, Name, Origin};

const NAME: Name = Name { stem: "libucp", soname: "libucp.so.0" };
/// The oldest version that is known to work: Debian 12's.
const OLDEST: Version = Version { major: 1, minor: 13, release: 0 };

/// A version of UCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 1 for all that have this interface.
    pub major: u32,
    /// Features.
    pub minor: u32,
    /// Repairs.
    pub release: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// The library, opened.
#[derive(Debug)]
pub struct Ucx {
    library: Library,
    version: Version,
    table: Table,
    words: Words,
}

impl Ucx {
    /// Opens the file `named`, or what is loaded, or what the loader finds.
    ///
    /// # Errors
    /// [`LibraryError`]: missing, too old, or built for one thread only.
    pub fn open(named: Option<&Path>) -> Result<Self, LibraryError> {
        let library = Library::open(NAME, named)?;
        // The version first: a library that is too old is to be called that, and not by what it lacks.
        // SAFETY: its type in the header, in every version.
        let ask = unsafe {
            library.function::<unsafe extern "C" fn(*mut u32, *mut u32, *mut u32)>(c"ucp_get_version")
        }?;
        let version = version(ask);
        if version < OLDEST || version.major != OLDEST.major {
            let wanted = format!("{OLDEST} or a later {}.x", OLDEST.major);
            let (path, found) = (library.path().into(), version.to_string());
            return Err(LibraryError::Version { path, found, wanted });
        }
        let table = Table::load(&library)?;
        let companion = library.companion("libucs")?;
        // SAFETY: its type in the header.
        let words = Words(unsafe { companion.function(c"ucs_status_string") }?);
        let ucx = Self { library, version, table, words };
        if ucx.thread_level() < THREAD_MODE_MULTI {
            let reason = "built for one thread only (configure it with --enable-mt)".into();
            return Err(LibraryError::Unfit { path: ucx.path().into(), reason });
        }
        Ok(ucx)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// How it came to be here.
    pub fn origin(&self) -> Origin {
        self.library.origin()
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    fn thread_level(&self) -> i32 {
        let mut attr = LibAttr { field_mask: LIB_ATTR_MAX_THREAD_LEVEL, max_thread_level: 0 };
        // SAFETY: a structure of this call's, with what its mask says.
        let status = unsafe { (self.table.ucp_lib_query)(&raw mut attr) };
        if status == 0 { attr.max_thread_level } else { 0 }
    }
}

/// Asks the library.
fn version(ask: unsafe extern "C" fn(*mut u32, *mut u32, *mut u32)) -> Version {
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: three numbers of this call's.
    unsafe { ask(&raw mut major, &raw mut minor, &raw mut release) };
    Version { major, minor, release }
}

/// A text of the library's, which may be none.
///
/// # Safety
/// It is null, or ends with a zero.
unsafe fn text(pointer: *const std::ffi::c_char) -> Option<String> {
    // SAFETY: the caller's.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}
