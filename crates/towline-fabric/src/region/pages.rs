//! Which pages own memory is made of.
//!
//! **Why huge ones.** A KV pool of tens of GB in pages of 4 KiB has millions of entries in the page tables of its owner
//! and of each peer that maps it, and a copy of scattered blocks waits for one walk a page. Pages of 2 MiB have 512 times
//! fewer. Expected of copies of 4 KiB in random order: what plain copies of such pages gain here, 5.1 GB/s instead of 4.5.
//!
//! **Two sorts.** *Reserved* ones come out of the host's pool (`vm.nr_hugepages`), which the administrator fills; they are
//! there at once, stay, and count for nothing else. *Transparent* ones are normal memory that the kernel gathers where it
//! finds 2 MiB together, if `/sys/kernel/mm/transparent_hugepage/shmem_enabled` lets it; nothing is promised.

use std::fs::read_to_string;

use rustix::fs::MemfdFlags;

/// Bytes of a reserved huge page: what x86-64 and aarch64 with base pages of 4 KiB have, and the least to reserve.
pub(super) const HUGE_BYTES: u64 = 2 << 20;

const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Which pages own memory is to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// The system's, 4 KiB mostly.
    #[default]
    Normal,
    /// Reserved huge ones of 2 MiB, or none: for a pool whose speed was planned with them.
    Huge,
    /// Reserved huge ones where the host has enough left; else normal ones, and
    /// [`Memory::why_normal_pages`](super::Memory::why_normal_pages) says why. Of normal ones the kernel is then asked to
    /// gather transparent huge ones.
    HugeIfGranted,
}

/// Of what a file is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stock {
    Normal,
    /// Normal pages, of which the kernel is asked to gather huge ones.
    Gathered,
    Reserved,
}

impl Stock {
    /// Flags of the file beside those that all have.
    pub(super) fn flags(self) -> MemfdFlags {
        match self {
            Self::Normal | Self::Gathered => MemfdFlags::empty(),
            Self::Reserved => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        }
    }

    /// The unit in which the file has its size.
    pub(super) fn page_bytes(self) -> u64 {
        if self == Self::Reserved { HUGE_BYTES } else { system_bytes() }
    }

    /// What to take when no huge pages are reserved.
    pub(super) fn second_best() -> Self {
        let gathers = read_to_string(SHMEM_ENABLED).is_ok_and(|words| gathers(&words));
        if gathers { Self::Gathered } else { Self::Normal }
    }
}

/// Bytes of the system's own pages.
pub(super) fn system_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// Whether the kernel may gather huge pages of shared memory: `words` are its choices, the chosen one in brackets.
fn gathers(words: &str) -> bool {
    ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|chosen| words.contains(chosen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_choice_is_the_word_in_brackets() {
        assert!(gathers("always within_size [advise] never deny force\n"));
        assert!(!gathers("always within_size advise [never] deny force\n"));
        assert!(!gathers("always within_size advise never [deny] force\n"));
        assert!(!gathers(""));
    }
}
