//! A library's file: which one it is, how it got here, and the functions in it.
//!
//! **One of a kind.** Two copies of a communication library in a process fight over signals, memory hooks and devices. So what is
//! loaded already (by NIXL, by torch) is used, whatever its file is called, and another one that is asked for by name is refused.
//!
//! **For good.** A library that was opened stays: it may have threads and handlers whose code must not go away.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{self, RTLD_LOCAL, RTLD_NOW};
use thiserror::Error;

use crate::signals::Dispositions;

/// `RTLD_NODELETE` and `RTLD_NOLOAD`, as this system has them.
const STAYS: i32 = libc::RTLD_NODELETE;
const ONLY_IF_LOADED: i32 = libc::RTLD_NOLOAD;

/// Which library to open.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    /// What its files' names begin with, as in `libucp`.
    pub stem: &'static str,
    /// What the loader is asked for: `libucp.so.0`, whose number says which binary interface it has.
    pub soname: &'static str,
}

/// How a library came to be in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Somebody had loaded it before.
    LoadedAlready,
    /// The loader found it.
    Found,
    /// Its file was named.
    Named,
}

/// A library in this process.
#[derive(Debug)]
pub struct Library {
    inner: unix::Library,
    path: PathBuf,
    origin: Origin,
}

/// Why there is no library to use.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LibraryError {
    /// Install it, or name its file. The loader's reason is kept.
    #[error("cannot open {name}: {reason}")]
    NotFound {
        /// What was asked for.
        name: String,
        /// The loader's.
        reason: String,
    },
    /// Name the one that is loaded, or load none before.
    #[error("{wanted} is wanted, but {loaded} is loaded already, and two copies can't share a process")]
    AnotherLoaded {
        /// The file that was named.
        wanted: PathBuf,
        /// The one that is there.
        loaded: PathBuf,
    },
    /// It is no such library, or too old: use a version that has the function.
    #[error("{} has no function {symbol}: another library, or too old", path.display())]
    NoSymbol {
        /// The library's file.
        path: PathBuf,
        /// The function's name.
        symbol: String,
    },
    /// Use one of the versions that are known.
    #[error("{} is version {found}; {wanted} is needed", path.display())]
    Version {
        /// The library's file.
        path: PathBuf,
        /// Its version.
        found: String,
        /// What would do.
        wanted: String,
    },
    /// It can't do what is needed.
    #[error("{}: {reason}", path.display())]
    Unfit {
        /// The library's file.
        path: PathBuf,
        /// What it lacks.
        reason: String,
    },
}

impl Library {
    /// Opens the file `named`, or else the one that is loaded already, or else what the loader finds. What signals do stays as it was.
    ///
    /// # Errors
    /// [`LibraryError::NotFound`], [`LibraryError::AnotherLoaded`].
    pub fn open(name: Name, named: Option<&Path>) -> Result<Self, LibraryError> {
        let loaded = loaded(name.stem);
        let same = |loaded: &Path, named: &Path| match (loaded.canonicalize(), named.canonicalize()) {
            (Ok(loaded), Ok(named)) => loaded == named,
            _ => loaded == named,
        };
        match (named, loaded) {
            (Some(named), Some(loaded)) if !same(&loaded, named) => {
                Err(LibraryError::AnotherLoaded { wanted: named.into(), loaded })
            }
            (_, Some(loaded)) => {
                Self::load(loaded.as_os_str(), ONLY_IF_LOADED, Origin::LoadedAlready, &loaded)
            }
            (Some(named), None) => Self::load(named.as_os_str(), 0, Origin::Named, named),
            (None, None) => {
                let mut library =
                    Self::load(OsStr::new(name.soname), 0, Origin::Found, Path::new(name.soname))?;
                library.path = self::loaded(name.stem).unwrap_or(library.path);
                Ok(library)
            }
        }
    }

    fn load(file: &OsStr, flags: i32, origin: Origin, path: &Path) -> Result<Self, LibraryError> {
        let _kept = Dispositions::keep();
        // SAFETY: it runs the initialisers of a library that is installed on this machine or was named by its owner; it is never
        // unloaded. The signal handlers that they install are taken out again.
        let inner = unsafe { unix::Library::open(Some(file), RTLD_NOW | RTLD_LOCAL | STAYS | flags) };
        let inner = inner.map_err(|error| LibraryError::NotFound {
            name: path.display().to_string(),
            reason: reason(&error),
        })?;
        Ok(Self { inner, path: path.into(), origin })
    }

    /// Its file, with links followed by the loader.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it came to be here.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// A function, as the pointer type `T`.
    ///
    /// # Errors
    /// [`LibraryError::NoSymbol`].
    ///
    /// # Safety
    /// `T` is the type of a pointer to the function that the library has under this name.
    pub(crate) unsafe fn function<T: Copy>(&self, symbol: &CStr) -> Result<T, LibraryError> {
        // SAFETY: the caller's.
        let found = unsafe { self.inner.get::<T>(symbol.to_bytes_with_nul()) };
        found.map(|found| *found).map_err(|_| LibraryError::NoSymbol {
            path: self.path.clone(),
            symbol: symbol.to_string_lossy().into_owned(),
        })
    }

    /// Another library that this one brought along, of which only what is loaded counts.
    ///
    /// # Errors
    /// [`LibraryError::NotFound`] when it isn't loaded.
    pub(crate) fn companion(&self, stem: &str) -> Result<Self, LibraryError> {
        let not_loaded = || LibraryError::NotFound { name: stem.into(), reason: "it is not loaded".into() };
        let path = loaded(stem).ok_or_else(not_loaded)?;
        Self::load(path.as_os_str(), ONLY_IF_LOADED, self.origin, &path)
    }
}

/// The file of a loaded library whose name begins with `stem` and goes on with no letter: `libucp.so.0`, `libucp-1a2b.so.0.0.0`.
fn loaded(stem: &str) -> Option<PathBuf> {
    struct Search<'a> {
        stem: &'a str,
        found: Option<PathBuf>,
    }
    /// # Safety
    /// As `dl_iterate_phdr` calls it: `info` is valid for the call, `search` is what was given to it.
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> i32 {
        // SAFETY: the loader's, valid during the call.
        let name = unsafe { (*info).dlpi_name };
        // SAFETY: what `loaded` passes below, and nobody else has it.
        let search = unsafe { &mut *search.cast::<Search<'_>>() };
        if name.is_null() {
            return 0;
        }
        // SAFETY: the loader's names end with a zero.
        let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes()));
        let rest = path.file_name().and_then(OsStr::to_str).and_then(|file| file.strip_prefix(search.stem));
        if rest.is_some_and(|rest| rest.starts_with(['.', '-']) && rest.contains(".so")) {
            search.found = Some(path.into());
            return 1;
        }
        0
    }
    let mut search = Search { stem, found: None };
    // SAFETY: `look` takes what is passed here.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

/// The loader's words, which stand behind the call that failed.
fn reason(error: &libloading::Error) -> String {
    let words = std::error::Error::source(error);
    words.map_or_else(|| error.to_string(), ToString::to_string)
}

/// A text for a library.
///
/// # Errors
/// Its position, when it has a zero inside.
pub(crate) fn c_string(text: &str) -> Result<CString, usize> {
    CString::new(text).map_err(|error| error.nul_position())
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: Name = Name { stem: "libc", soname: "libc.so.6" };

    #[test]
    fn what_is_loaded_already_is_used_and_another_one_is_refused() {
        let library = Library::open(C, None).unwrap();
        assert_eq!(library.origin(), Origin::LoadedAlready);
        assert!(library.path().is_absolute(), "{:?}", library.path());
        let again = Library::open(C, Some(library.path())).unwrap();
        assert_eq!(again.path(), library.path());
        let other = Library::open(C, Some(Path::new("/no/libc.so.6")));
        assert!(matches!(other, Err(LibraryError::AnotherLoaded { .. })), "{other:?}");
    }

    #[test]
    fn a_library_that_is_missing_or_none_is_said() {
        let missing = Name { stem: "libtowline-none", soname: "libtowline-none.so.1" };
        let Err(LibraryError::NotFound { name, reason }) = Library::open(missing, None) else { panic!() };
        assert!(name == "libtowline-none.so.1" && reason.contains("No such file"), "{reason}");
        let file = tempfile::NamedTempFile::new().unwrap();
        let Err(LibraryError::NotFound { reason, .. }) = Library::open(missing, Some(file.path())) else {
            panic!()
        };
        assert!(reason.contains("file too short"), "{reason}");
    }

    #[test]
    fn a_function_that_is_missing_is_named() {
        let library = Library::open(C, None).unwrap();
        // SAFETY: its type in C.
        let length =
            unsafe { library.function::<unsafe extern "C" fn(*const i8) -> usize>(c"strlen") }.unwrap();
        // SAFETY: a text that ends with a zero.
        assert_eq!(unsafe { length(c"four".as_ptr()) }, 4);
        // SAFETY: it is never called.
        let none = unsafe { library.function::<unsafe extern "C" fn()>(c"towline_none") };
        assert!(matches!(none, Err(LibraryError::NoSymbol { symbol, .. }) if symbol == "towline_none"));
    }
}
