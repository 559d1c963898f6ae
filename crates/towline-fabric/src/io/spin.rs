//! How long a thread looks around before it sleeps.
//!
//! **Cost.** Waking a thread costs 5 µs where a core is awake and 50–100 µs where one must be woken first, which is most of
//! what a small transfer takes. So a thread that slept for less than that looks around for as long the next time, giving
//! way to any other thread that could run. Whoever buys after paying rent for as long as the price never pays more than
//! twice the best (Karlin, Manasse, Rudolph, Sleator: Competitive snoopy caching, 1988, section 4); and one longer sleep
//! ends the looking around, so that idle threads, woken by heartbeats and timers only, never do it.

use std::time::{Duration, Instant};

/// What being woken may cost, and so how long to look around at most.
const WAKE: Duration = Duration::from_micros(100);

/// Whether to look around, from how the last waits ended.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    worthwhile: bool,
}

impl Spin {
    /// Takes how long the thread slept.
    pub(crate) fn handle_sleep(&mut self, slept: Duration) {
        self.worthwhile = slept <= WAKE;
    }

    /// Calls `look` until it finds something (true), or sleeping is the better choice (false).
    pub(crate) fn look(&self, look: impl FnMut() -> bool) -> bool {
        look_around(if self.worthwhile { WAKE } else { Duration::ZERO }, look)
    }
}

/// Calls `look` until it finds something (true), or has not for `at_most` or what being woken costs (false).
pub(crate) fn look_around(at_most: Duration, mut look: impl FnMut() -> bool) -> bool {
    let limit = at_most.min(WAKE);
    let started = Instant::now();
    loop {
        if look() {
            return true;
        }
        if started.elapsed() >= limit {
            return false;
        }
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(spin: &Spin) -> u32 {
        let mut count = 0;
        assert!(!spin.look(|| {
            count += 1;
            false
        }));
        count
    }

    #[test]
    fn only_who_slept_shortly_looks_around() {
        let mut spin = Spin::default();
        assert_eq!(looks(&spin), 1, "nobody looks around from the start");
        spin.handle_sleep(WAKE);
        assert!(looks(&spin) > 1);
        spin.handle_sleep(WAKE + Duration::from_micros(1));
        assert_eq!(looks(&spin), 1, "a longer sleep ends it");
    }

    #[test]
    fn what_is_found_ends_the_looking_around() {
        let spin = Spin { worthwhile: true };
        let mut left = 3;
        assert!(spin.look(|| {
            left -= 1;
            left == 0
        }));
    }
}
