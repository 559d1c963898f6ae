//! The only door to a machine: its files, live or recorded, each reading with a bound.
//!
//! The cost of a reading is a `stat`, an `open`, two `read`s and a `close`. A snapshot of eight ports makes one for each
//! place of their GID tables, 2,048 with tables of 256, two more for each address in use, and some fifteen a port
//! besides: it is for the start of a process, not for each transfer.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::gap::{Gap, Reason};

/// Most bytes of a file: a sysfs file is a page at most, `/proc/self/status` a few of them.
pub const FILE_BYTES_MAX: u64 = 64 * 1024;

/// Most entries of a folder: the longest one read is a port's GID table, of 1,024 files on soft-RoCE.
pub const ENTRIES_MAX: usize = 4096;

/// A machine's files. Paths are absolute on that machine, such as `/sys/class/net`.
pub trait System {
    /// The text of a regular file, of [`FILE_BYTES_MAX`] at most.
    ///
    /// # Errors
    /// The gap says why there is none; a file over the bound is a gap and never a part of it.
    fn read(&self, path: &str) -> Result<String, Gap>;

    /// The names in a folder, sorted, [`ENTRIES_MAX`] at most.
    ///
    /// # Errors
    /// The gap says why there are none; a folder over the bound is a gap and never a part of it.
    fn list(&self, path: &str) -> Result<Vec<String>, Gap>;

    /// Where a symbolic link points to, as it stands in the link.
    ///
    /// # Errors
    /// The gap says why that can't be told.
    fn link(&self, path: &str) -> Result<String, Gap>;
}

/// The machine on which this process runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Live;

/// A folder that stands for a machine's root. Links are followed inside it and never out of it.
#[derive(Clone, Debug)]
pub struct Recorded {
    root: PathBuf,
}

/// A recorded machine that can't be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The folder can't be found or entered; its path or its permissions are wrong.
    #[error("the recorded machine {path}: {error}")]
    Unreadable {
        /// The path given.
        path: PathBuf,
        /// The kernel's words.
        #[source]
        error: io::Error,
    },
    /// The path names something else than a folder, perhaps an archive still to be unpacked.
    #[error("the recorded machine {path} is not a folder")]
    NotAFolder {
        /// The path given.
        path: PathBuf,
    },
}

impl Recorded {
    /// Opens the folder that holds `proc`, `sys` and `etc`.
    ///
    /// # Errors
    /// [`OpenError`] when there is no such folder.
    pub fn open(root: impl AsRef<Path>) -> Result<Self, OpenError> {
        let path = root.as_ref().to_owned();
        match path.canonicalize() {
            Ok(root) if root.is_dir() => Ok(Self { root }),
            Ok(_) => Err(OpenError::NotAFolder { path }),
            Err(error) => Err(OpenError::Unreadable { path, error }),
        }
    }

    /// Where `path` lies here once its links are followed.
    fn inside(&self, path: &str) -> Result<PathBuf, Gap> {
        let joined = self.root.join(path.trim_start_matches('/'));
        let real = joined.canonicalize().map_err(|error| failed(path, &error))?;
        if real.starts_with(&self.root) { Ok(real) } else { Err(Gap::new(path, Reason::Outside)) }
    }
}

impl System for Live {
    fn read(&self, path: &str) -> Result<String, Gap> {
        read(Path::new(path), path)
    }

    fn list(&self, path: &str) -> Result<Vec<String>, Gap> {
        list(Path::new(path), path)
    }

    fn link(&self, path: &str) -> Result<String, Gap> {
        link(Path::new(path), path)
    }
}

impl System for Recorded {
    fn read(&self, path: &str) -> Result<String, Gap> {
        read(&self.inside(path)?, path)
    }

    fn list(&self, path: &str) -> Result<Vec<String>, Gap> {
        list(&self.inside(path)?, path)
    }

    fn link(&self, path: &str) -> Result<String, Gap> {
        // The link itself is not followed, the folders on the way to it are.
        let bare = path.trim_end_matches('/');
        let (folder, name) = bare.rsplit_once('/').unwrap_or(("", bare));
        link(&self.inside(folder).map_err(|gap| Gap::new(path, gap.reason))?.join(name), path)
    }
}

fn read(file: &Path, subject: &str) -> Result<String, Gap> {
    let gap = |reason| Gap::new(subject, reason);
    // Asked first: to open a pipe without a writer would wait for one.
    let kind = fs::metadata(file).map_err(|error| failed(subject, &error))?;
    if !kind.is_file() {
        return Err(gap(Reason::NotAFile));
    }
    let mut bytes = Vec::new();
    let opened = File::open(file).map_err(|error| failed(subject, &error))?;
    opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| failed(subject, &error))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(gap(Reason::TooLarge { bytes_max: FILE_BYTES_MAX }));
    }
    String::from_utf8(bytes).map_err(|_| gap(Reason::NotText))
}

fn list(folder: &Path, subject: &str) -> Result<Vec<String>, Gap> {
    let entries = fs::read_dir(folder).map_err(|error| failed(subject, &error))?;
    let mut names = Vec::new();
    for entry in entries.take(ENTRIES_MAX + 1) {
        let name = entry.map_err(|error| failed(subject, &error))?.file_name();
        names.push(name.into_string().map_err(|_| Gap::new(subject, Reason::NotText))?);
    }
    if names.len() > ENTRIES_MAX {
        return Err(Gap::new(subject, Reason::TooMany { entries_max: ENTRIES_MAX as u64 }));
    }
    names.sort_unstable();
    Ok(names)
}

fn link(path: &Path, subject: &str) -> Result<String, Gap> {
    let target = fs::read_link(path).map_err(|error| failed(subject, &error))?;
    target.into_os_string().into_string().map_err(|_| Gap::new(subject, Reason::NotText))
}

fn failed(subject: &str, error: &io::Error) -> Gap {
    let reason = match error.kind() {
        io::ErrorKind::NotFound => Reason::Absent,
        io::ErrorKind::PermissionDenied => Reason::Denied,
        _ => Reason::Failed { error: error.to_string() },
    };
    Gap::new(subject, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_file_is_read() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        assert!(Live.read(manifest).unwrap().contains("towline-topo"));
        let names = Live.list(env!("CARGO_MANIFEST_DIR")).unwrap();
        assert!(names.is_sorted() && names.contains(&"src".to_owned()));
        assert_eq!(Live.read("/sys/no/such/file").unwrap_err().reason, Reason::Absent);
    }

    #[test]
    fn what_could_block_or_never_end_is_not_opened() {
        assert_eq!(Live.read("/dev/zero").unwrap_err().reason, Reason::NotAFile);
        assert_eq!(Live.read(env!("CARGO_MANIFEST_DIR")).unwrap_err().reason, Reason::NotAFile);
    }

    #[test]
    fn only_a_folder_is_a_recorded_machine() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        assert!(matches!(Recorded::open(manifest), Err(OpenError::NotAFolder { .. })));
        assert!(matches!(Recorded::open("no such folder"), Err(OpenError::Unreadable { .. })));
    }
}
