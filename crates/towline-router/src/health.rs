//! Whether one worker may be asked: a small state machine, with time as an argument.
//!
//! Two sources feed it. Requests are the honest ones: consecutive failures start a cool-down, after which the
//! worker is tried again and one more failure starts the next. Probes see what requests can't (a worker that
//! nobody asks): failing ones take the worker out until one succeeds.

use std::time::{Duration, Instant};

/// Bounds of the state machine; see [`crate::Limits`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    pub(crate) failures_max: u32,
    pub(crate) cool_down: Duration,
}

/// What is known of one worker's health. A new worker is given the benefit of the doubt.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health {
    request_failures: u32,
    probe_failures: u32,
    cooling_until: Option<Instant>,
}

impl Health {
    /// A request was answered.
    pub(crate) fn handle_success(&mut self) {
        self.request_failures = 0;
        self.cooling_until = None;
    }

    /// A request failed for a reason that is the worker's.
    pub(crate) fn handle_failure(&mut self, tolerance: Tolerance, now: Instant) {
        self.request_failures = self.request_failures.saturating_add(1);
        if self.request_failures >= tolerance.failures_max {
            self.cooling_until = Some(now + tolerance.cool_down);
        }
    }

    /// A probe was answered.
    pub(crate) fn handle_probe_success(&mut self) {
        self.probe_failures = 0;
    }

    /// A probe failed.
    pub(crate) fn handle_probe_failure(&mut self) {
        self.probe_failures = self.probe_failures.saturating_add(1);
    }

    /// Whether a request may go to the worker now.
    pub(crate) fn is_usable(&self, tolerance: Tolerance, now: Instant) -> bool {
        self.probe_failures < tolerance.failures_max && self.cooling_until.is_none_or(|until| now >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: Tolerance = Tolerance { failures_max: 2, cool_down: Duration::from_secs(5) };

    #[test]
    fn consecutive_failures_cool_a_worker_down_for_a_while() {
        let (mut health, start) = (Health::default(), Instant::now());
        health.handle_failure(TOLERANCE, start);
        assert!(health.is_usable(TOLERANCE, start));
        health.handle_failure(TOLERANCE, start);
        assert!(!health.is_usable(TOLERANCE, start + Duration::from_millis(4999)));
        assert!(health.is_usable(TOLERANCE, start + Duration::from_secs(5)));
    }

    #[test]
    fn one_failure_after_a_cool_down_starts_the_next() {
        let (mut health, start) = (Health::default(), Instant::now());
        health.handle_failure(TOLERANCE, start);
        health.handle_failure(TOLERANCE, start);
        let later = start + Duration::from_secs(6);
        health.handle_failure(TOLERANCE, later);
        assert!(!health.is_usable(TOLERANCE, later + Duration::from_secs(4)));
    }

    #[test]
    fn success_forgets_failures() {
        let (mut health, start) = (Health::default(), Instant::now());
        health.handle_failure(TOLERANCE, start);
        health.handle_success();
        health.handle_failure(TOLERANCE, start);
        assert!(health.is_usable(TOLERANCE, start));
    }

    #[test]
    fn failing_probes_take_a_worker_out_until_one_succeeds() {
        let (mut health, now) = (Health::default(), Instant::now());
        health.handle_probe_failure();
        assert!(health.is_usable(TOLERANCE, now));
        health.handle_probe_failure();
        assert!(!health.is_usable(TOLERANCE, now));
        health.handle_probe_success();
        assert!(health.is_usable(TOLERANCE, now));
    }
}
