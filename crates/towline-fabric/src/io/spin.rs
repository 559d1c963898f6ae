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

    /// How long to look around before sleeping.
    fn limit(&self) -> Duration {
        if self.worthwhile { WAKE } else { Duration::ZERO }
    }

    /// Calls `look` until it finds something (true), or sleeping is the better choice (false).
    pub(crate) fn look(&self, look: impl FnMut() -> bool) -> bool {
        look_around(self.limit(), look)
    }
}

/// Calls `look` until it finds something (true), or has not for `at_most` or what being woken costs (false).
pub(crate) fn look_around(at_most: Duration, look: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    look_until(at_most.min(WAKE), || started.elapsed(), look)
}

fn look_until(
    limit: Duration,
    mut elapsed: impl FnMut() -> Duration,
    mut look: impl FnMut() -> bool,
) -> bool {
    loop {
        if look() {
            return true;
        }
        if elapsed() >= limit {
            return false;
        }
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks in vain until `limit`, where each look takes 30 µs: how many there were.
    fn looks(limit: Duration) -> u32 {
        let (mut now, mut count) = (Duration::ZERO, 0);
        let elapsed = || {
            now += Duration::from_micros(30);
            now
        };
        assert!(!look_until(limit, elapsed, || {
            count += 1;
            false
        }));
        count
    }

    #[test]
    fn only_who_slept_shortly_looks_around() {
        let mut spin = Spin::default();
        assert_eq!(looks(spin.limit()), 1, "nobody looks around from the start");
        spin.handle_sleep(WAKE);
        assert_eq!(looks(spin.limit()), 4);
        spin.handle_sleep(WAKE + Duration::from_micros(1));
        assert_eq!(looks(spin.limit()), 1, "a longer sleep ends it");
    }

    #[test]
    fn what_is_found_ends_the_looking_around() {
        let mut left = 3;
        assert!(look_until(WAKE, Duration::default, || {
            left -= 1;
            left == 0
        }));
    }
}
