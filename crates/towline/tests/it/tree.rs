//! The repository as files: where it is and what lies in it.

use std::fs;
use std::path::{Path, PathBuf};

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository's root")
}

/// Every file under `folder` (relative to the root) that `wanted` accepts, as (relative path, text). Build outputs,
/// hidden folders but `.ci`, and files that aren't text are passed over.
pub(crate) fn files(folder: &str, wanted: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("a readable folder").path();
            let name = path.strip_prefix(&root).unwrap().to_str().expect("UTF-8 names").to_owned();
            let last = path.file_name().and_then(|last| last.to_str()).unwrap_or_default();
            let skipped =
                last == "target" || last == "__pycache__" || (last.starts_with('.') && last != ".ci");
            if path.is_dir() && !path.is_symlink() && !skipped {
                folders.push(path);
            } else if path.is_file() && wanted(&name) {
                found.extend(fs::read_to_string(&path).ok().map(|text| (name, text)));
            }
        }
    }
    found.sort();
    found
}

/// Every Rust file of the crates.
pub(crate) fn rust_files() -> Vec<(String, String)> {
    files("crates", |name| name.ends_with(".rs"))
}
