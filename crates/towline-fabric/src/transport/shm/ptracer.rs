//! Lets peers copy out of this process where Yama forbids it to strangers.
//!
//! With `kernel.yama.ptrace_scope` 1, the default of several distributions, a process is reached by its ancestors only and
//! by the one process that it named with `prctl(PR_SET_PTRACER)`. It can name one, or all. So: while one peer process has
//! been told addresses, that one is named; while several have, or one that has no number here, all are (every process
//! that could reach this one with the scope at 0: same user, same capabilities); when none is left, nobody. What
//! the application named before is overwritten: one setting, of the whole process. Without Yama, or with another
//! scope, the call changes nothing.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{PTracer, Pid, RawPid, set_ptracer};

/// A peer's process, by its number here; 0 when it has none.
type Number = RawPid;

/// How many permits each process has, in the whole of this one.
static ADMITTED: Mutex<BTreeMap<Number, usize>> = Mutex::new(BTreeMap::new());

/// While it lives, the process may reach this one.
pub(super) struct Permit(Option<Number>);

/// Lets a peer's process reach this one; `None` is one without a number here.
pub(super) fn admit(peer: Option<Pid>) -> Permit {
    let number = peer.map_or(0, Pid::as_raw_pid);
    if peer == Some(rustix::process::getpid()) {
        return Permit(None);
    }
    let mut admitted = lock();
    *admitted.entry(number).or_default() += 1;
    apply(&admitted);
    Permit(Some(number))
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(number) = self.0 else { return };
        let mut admitted = lock();
        if let Some(count) = admitted.get_mut(&number) {
            *count -= 1;
            if *count == 0 {
                admitted.remove(&number);
            }
        }
        apply(&admitted);
    }
}

fn lock() -> MutexGuard<'static, BTreeMap<Number, usize>> {
    ADMITTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Under the lock, so that the last word is about the last state.
fn apply(admitted: &BTreeMap<Number, usize>) {
    if let Err(errno) = set_ptracer(tracer(admitted)) {
        // EINVAL: a kernel without Yama.
        tracing::debug!(%errno, "PR_SET_PTRACER");
    }
}

fn tracer(admitted: &BTreeMap<Number, usize>) -> PTracer {
    let mut numbers = admitted.keys();
    match (numbers.next(), numbers.next()) {
        (None, _) => PTracer::None,
        (Some(number), None) => Pid::from_raw(*number).map_or(PTracer::Any, PTracer::ProcessID),
        (Some(_), Some(_)) => PTracer::Any,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_is_named_and_several_need_all() {
        let of = |numbers: &[Number]| tracer(&numbers.iter().map(|number| (*number, 1)).collect());
        assert_eq!(of(&[]), PTracer::None);
        assert_eq!(of(&[7]), PTracer::ProcessID(Pid::from_raw(7).unwrap()));
        assert_eq!(of(&[7, 8]), PTracer::Any);
        assert_eq!(of(&[0]), PTracer::Any, "it has no number to name it by");
    }

    #[test]
    fn permits_are_counted_and_come_back() {
        let peer = Pid::from_raw(0x3fff_fff0).unwrap();
        let count = || lock().get(&peer.as_raw_pid()).copied();
        let (first, second) = (admit(Some(peer)), admit(Some(peer)));
        assert_eq!(count(), Some(2));
        drop(first);
        assert_eq!(count(), Some(1));
        drop(second);
        assert_eq!(count(), None);
        assert!(admit(Some(rustix::process::getpid())).0.is_none(), "a process reaches itself");
    }
}
