//! Which of UCX's options are set, and why. docs/operate.md has the same table; a variable `UCX_…` of the environment is stronger.

use std::path::PathBuf;

use towline_ffi::ucx::{Settings, UcxError};

/// How UCX is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UcxConfig {
    /// The library's file; by default what is loaded already or the loader finds.
    pub library: Option<PathBuf>,
    /// Whether transports may be used that UCX emulates reads and writes over (`tcp`) or that need no network (`sysv`, `posix`, `cma`).
    /// They trust addresses in what peers send.
    pub software: bool,
    /// Further options, by their names without `UCX_`.
    pub options: Vec<(String, String)>,
}

/// An option that is always set, its value, and why.
pub(super) const OPTIONS: [(&str, &str, &str); 1] = [(
    "RCACHE_ENABLE",
    "n",
    "memory is mapped with its region and unmapped with it; a cache would keep it open to peers that had its key",
)];

/// The transports without software emulation: what UCX has for InfiniBand and RoCE.
const DEVICES_ONLY: &str = "ib";

impl UcxConfig {
    /// Sets what is to be set.
    ///
    /// # Errors
    /// UCX's: no such value.
    pub(super) fn apply(&self, settings: &mut Settings) -> Result<(), UcxError> {
        let transports = (!self.software).then_some(("TLS", DEVICES_ONLY));
        let ours = OPTIONS.iter().map(|(option, value, _)| (*option, *value)).chain(transports);
        for (option, value) in ours.filter(|(option, _)| !is_set(option)) {
            settings.set(option, value)?;
        }
        self.options.iter().try_for_each(|(option, value)| settings.set(option, value))
    }
}

/// Whether the environment has it.
fn is_set(option: &str) -> bool {
    std::env::var_os(format!("UCX_{option}")).is_some()
}
