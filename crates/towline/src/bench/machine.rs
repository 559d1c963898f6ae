//! Where it was measured, as the first line of every result; what can't be read is absent, never guessed.

use std::path::Path;

use anyhow::{Result, bail};
use serde::Serialize;

/// The machine and the build.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// Version of this binary.
    pub(crate) version: &'static str,
    /// `release` or `debug`: figures of a debug build say nothing.
    pub(crate) build: &'static str,
    /// What the processor calls itself.
    pub(crate) cpu: Option<String>,
    /// Cores that this process may use.
    pub(crate) cores: usize,
    /// Architecture of the build.
    pub(crate) arch: &'static str,
    /// Kernel release.
    pub(crate) kernel: Option<String>,
    /// Bytes of memory.
    pub(crate) memory_bytes: Option<u64>,
    /// What regions are made of.
    pub(crate) allocator: &'static str,
    /// Huge pages for such memory: the chosen word of `shmem_enabled`.
    pub(crate) thp_shmem: Option<String>,
    /// Processes running or waiting, averaged over the last minute, at the start.
    pub(crate) load: Option<f64>,
}

impl Machine {
    /// Reads this machine.
    pub(crate) fn read() -> Self {
        let thp = text("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        Self {
            version: env!("CARGO_PKG_VERSION"),
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            cpu: text("/proc/cpuinfo").and_then(|text| field(&text, "model name")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            arch: std::env::consts::ARCH,
            kernel: text("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
            memory_bytes: meminfo("MemTotal"),
            allocator: "memfd",
            thp_shmem: thp.and_then(|text| chosen(&text)),
            load: text("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse().ok()),
        }
    }
}

/// Refuses what would leave the machine without memory: more than three quarters of what is available now.
pub(crate) fn room_for(bytes: u64) -> Result<()> {
    let Some(available) = meminfo("MemAvailable") else { return Ok(()) };
    if bytes > available / 4 * 3 {
        bail!("{bytes} bytes of memory are needed, and {available} are available: give a smaller --size");
    }
    Ok(())
}

fn text(file: &str) -> Option<String> {
    std::fs::read_to_string(Path::new(file)).ok()
}

fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Bytes of a line of `/proc/meminfo`, which counts in units of 1024.
fn meminfo(name: &str) -> Option<u64> {
    let value = field(&text("/proc/meminfo")?, name)?;
    value.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The word in brackets.
fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        assert_eq!(
            field("a : x\nmodel name\t: Some CPU @ 2\n", "model name").as_deref(),
            Some("Some CPU @ 2")
        );
        assert_eq!(chosen("always within_size advise [never] deny force\n").as_deref(), Some("never"));
        assert_eq!((field("", "a"), chosen("never")), (None, None));
    }

    #[test]
    fn memory_that_is_not_there_is_refused() {
        assert!(room_for(1).is_ok());
        assert!(meminfo("MemAvailable").is_none() || room_for(u64::MAX).is_err());
    }
}
