//! Keeps what signals do in this process while a library loads.
//!
//! UCX installs handlers for `SIGSEGV` and its kin when it is loaded (`UCX_HANDLE_ERRORS`), which print, and may wait for a debugger.
//! What a process does when it crashes is its own decision. So handlers are noted before and put back after.

use std::mem::MaybeUninit;

use libc::{c_int, sigaction};

/// Signals that a library may want to hear of.
const SIGNALS: [c_int; 8] = [
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGHUP,
    libc::SIGUSR1,
];

/// What the signals did; put back when dropped.
pub(crate) struct Dispositions(Vec<(c_int, sigaction)>);

impl Dispositions {
    pub(crate) fn keep() -> Self {
        Self(SIGNALS.into_iter().filter_map(|signal| Some((signal, exchange(signal, None)?))).collect())
    }
}

impl Drop for Dispositions {
    fn drop(&mut self) {
        for (signal, action) in &self.0 {
            exchange(*signal, Some(action));
        }
    }
}

/// Sets what a signal does, if asked to; gives what it did.
fn exchange(signal: c_int, new: Option<&sigaction>) -> Option<sigaction> {
    let mut old = MaybeUninit::uninit();
    let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `new` is null or an action that the kernel gave for this signal; `old` has room for one.
    let status = unsafe { sigaction(signal, new, old.as_mut_ptr()) };
    // SAFETY: the kernel has filled it.
    (status == 0).then(|| unsafe { old.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn nothing(_: c_int) {}

    #[test]
    fn a_handler_that_was_installed_meanwhile_is_gone_again() {
        let before = exchange(libc::SIGTRAP, None).unwrap().sa_sigaction;
        let kept = Dispositions::keep();
        // SAFETY: an action of zeros has no flags and an empty mask.
        let mut action: sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as *const () as usize;
        exchange(libc::SIGTRAP, Some(&action));
        assert_ne!(exchange(libc::SIGTRAP, None).unwrap().sa_sigaction, before);
        drop(kept);
        assert_eq!(exchange(libc::SIGTRAP, None).unwrap().sa_sigaction, before);
    }
}
