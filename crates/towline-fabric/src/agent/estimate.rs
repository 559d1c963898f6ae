//! How long a transfer will take, from those that the pair has made. Pure.
//!
//! The model is the usual one of two terms, `latency + bytes / rate` (Hockney: The communication challenge for MPP, 1994),
//! each a moving average. A cost model for routing wants what the path does now, under its present load, so recent
//! transfers weigh most.

use std::time::Duration;

use super::book::Stretch;

/// Stretches below are all latency, those from here on tell the rate.
const LARGE_BYTES: u64 = 1 << 20;

/// Weight of the newest stretch: after five that are different, little is left of what was before.
const NEWEST: f64 = 0.4;

/// What the pair's stretches have in common.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Estimate {
    latency_s: Option<f64>,
    bytes_per_s: Option<f64>,
}

impl Estimate {
    /// Takes a stretch in which nothing failed.
    pub(super) fn observe(&mut self, stretch: &Stretch) {
        #[expect(clippy::cast_precision_loss, reason = "a rate; 2^53 bytes are exact")]
        let bytes = stretch.bytes as f64;
        if stretch.bytes >= LARGE_BYTES {
            // What is left after the latency, but no less than half: one long wait must not make the rate infinite.
            let moving = (stretch.seconds - self.latency_s.unwrap_or(0.0)).max(stretch.seconds / 2.0);
            if moving > 0.0 {
                blend(&mut self.bytes_per_s, bytes / moving);
            }
        } else if stretch.transfers == 1 {
            blend(&mut self.latency_s, stretch.seconds);
        }
    }

    /// Time for a transfer of `bytes`; `None` before the first that tells.
    pub(super) fn of(&self, bytes: u64) -> Option<Duration> {
        let small = bytes < LARGE_BYTES && self.latency_s.is_some();
        #[expect(clippy::cast_precision_loss, reason = "an estimate; 2^53 bytes are exact")]
        let moving = match self.bytes_per_s {
            Some(rate) => bytes as f64 / rate,
            None if small => 0.0,
            None => return None,
        };
        Duration::try_from_secs_f64(self.latency_s.unwrap_or(0.0) + moving).ok()
    }
}

fn blend(average: &mut Option<f64>, newest: f64) {
    *average = Some(average.map_or(newest, |before| before + NEWEST * (newest - before)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(bytes: u64, seconds: f64, transfers: u64) -> Stretch {
        Stretch { bytes, seconds, transfers }
    }

    fn seconds(estimate: &Estimate, bytes: u64) -> f64 {
        estimate.of(bytes).unwrap().as_secs_f64()
    }

    #[test]
    fn nothing_is_said_before_anything_was_seen() {
        let mut estimate = Estimate::default();
        assert_eq!(estimate.of(1), None);
        estimate.observe(&stretch(4096, 0.001, 1));
        assert_eq!(estimate.of(1), Some(Duration::from_millis(1)));
        assert_eq!(estimate.of(LARGE_BYTES), None, "the rate is not known");
    }

    #[test]
    fn latency_and_rate_add_up() {
        let mut estimate = Estimate::default();
        estimate.observe(&stretch(4096, 0.001, 1));
        estimate.observe(&stretch(4096, 0.9, 7));
        estimate.observe(&stretch(100 << 20, 0.101, 1));
        let rate = f64::from(100 << 20) / 0.1;
        assert!((seconds(&estimate, 10 << 20) - 0.011).abs() < 1e-6, "{estimate:?}, {rate}");
    }

    #[test]
    fn the_newest_weigh_most() {
        let mut estimate = Estimate::default();
        estimate.observe(&stretch(100 << 20, 0.1, 1));
        for _ in 0..6 {
            estimate.observe(&stretch(100 << 20, 1.0, 1));
        }
        let now = seconds(&estimate, 100 << 20);
        assert!((0.6..=1.0).contains(&now), "{now}");
    }

    #[test]
    fn one_long_wait_does_not_make_the_rate_infinite() {
        let mut estimate = Estimate::default();
        estimate.observe(&stretch(1, 5.0, 1));
        estimate.observe(&stretch(LARGE_BYTES, 0.001, 1));
        assert!(seconds(&estimate, LARGE_BYTES) > 5.0);
    }
}
