//! Picking the next token.
//!
//! **Determinism.** A sampler belongs to one request and owns its generator: the same seed, parameters and logits
//! give the same tokens, whatever else the engine runs. Ties go to the lower id. Logits that are NaN count as
//! impossible.
//!
//! **Cost.** Greedy and plain temperature are passes over the vocabulary. Top-p sorts, but only tokens within e^-18
//! of the best one's probability: 49,152 tokens at temperature 1 leave some hundreds. A flat distribution sorts all,
//! about 2 ms.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use thiserror::Error;

/// Tokens less likely than e^-18 (1.5e-8) times the best are never drawn under top-p: together they weigh under 0.1 % even
/// over 49,152 tokens, and sorting them is what costs.
const TAIL: f64 = 18.0;

/// How to pick.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0: always the likeliest. Up to 2 in the OpenAI API.
    pub temperature: f32,
    /// Draw from the smallest set of likeliest tokens whose probabilities reach this; 1: from all.
    pub top_p: f32,
    /// Seed of the request's generator.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, seed: 0 }
    }
}

/// One request's picker.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    generator: StdRng,
    /// Kept between tokens.
    candidates: Vec<(f64, u32)>,
}

impl Sampler {
    /// A sampler for one request.
    ///
    /// # Errors
    /// [`SampleError::Temperature`] or [`SampleError::TopP`] for numbers outside their range.
    pub fn new(params: SamplingParams) -> Result<Self, SampleError> {
        if !(params.temperature.is_finite() && params.temperature >= 0.0) {
            return Err(SampleError::Temperature { found: params.temperature });
        }
        if !(params.top_p > 0.0 && params.top_p <= 1.0) {
            return Err(SampleError::TopP { found: params.top_p });
        }
        Ok(Self { params, generator: StdRng::seed_from_u64(params.seed), candidates: Vec::new() })
    }

    /// The next token.
    ///
    /// # Errors
    /// [`SampleError::NoToken`] when every logit is NaN or minus infinity: the model's arithmetic has broken down.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let (best, largest) = greedy(logits).ok_or(SampleError::NoToken)?;
        // So small a temperature would only overflow the division.
        if self.params.temperature < 1e-4 || largest.is_infinite() {
            return Ok(best);
        }
        let draw: f64 = self.generator.random();
        self.weigh(logits, f64::from(largest));
        if self.params.top_p < 1.0 {
            self.cut();
        }
        let total: f64 = self.candidates.iter().map(|(weight, _)| weight).sum();
        let mut left = draw * total;
        for (weight, id) in &self.candidates {
            left -= weight;
            if left < 0.0 {
                return Ok(*id);
            }
        }
        // Rounding may leave a little: the last candidate's.
        Ok(self.candidates.last().map_or(best, |(_, id)| *id))
    }

    /// Fills the candidates: weight relative to the best, and id, in order of id.
    fn weigh(&mut self, logits: &[f32], largest: f64) {
        let (temperature, nucleus) = (f64::from(self.params.temperature), self.params.top_p < 1.0);
        self.candidates.clear();
        for (id, logit) in (0..).zip(logits) {
            let below = (largest - f64::from(*logit)) / temperature;
            if !below.is_nan() && (!nucleus || below <= TAIL) {
                self.candidates.push(((-below).exp(), id));
            }
        }
    }

    /// Keeps the likeliest candidates up to top-p, likeliest first.
    fn cut(&mut self) {
        self.candidates.sort_unstable_by(|(a, left), (b, right)| b.total_cmp(a).then(left.cmp(right)));
        let total: f64 = self.candidates.iter().map(|(weight, _)| weight).sum();
        let (wanted, mut sum) = (total * f64::from(self.params.top_p), 0.0);
        let reached = self.candidates.iter().position(|(weight, _)| {
            sum += weight;
            sum >= wanted
        });
        self.candidates.truncate(reached.map_or(self.candidates.len(), |index| index + 1));
    }
}

/// The likeliest token and its logit, the lowest id among equals; `None` if there is none above minus infinity.
pub fn greedy(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best = None;
    for (id, logit) in (0..).zip(logits) {
        // False for NaN on the left; the start has no right side.
        if *logit > best.map_or(f32::NEG_INFINITY, |(_, largest)| largest) {
            best = Some((id, *logit));
        }
    }
    best
}

/// Why no token can be picked.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SampleError {
    /// Ask for 0 or more.
    #[error("the temperature is {found}, not 0 or more")]
    Temperature {
        /// What was asked.
        found: f32,
    },
    /// Ask for more than 0 and at most 1.
    #[error("top-p is {found}, not within 0 (excluded) and 1")]
    TopP {
        /// What was asked.
        found: f32,
    },
    /// The engine's fault: end the request.
    #[error("no token has a probability: the logits are not numbers")]
    NoToken,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_p: f32, seed: u64) -> Sampler {
        Sampler::new(SamplingParams { temperature, top_p, seed }).unwrap()
    }

    fn draws(mut sampler: Sampler, logits: &[f32], count: usize) -> Vec<u32> {
        (0..count).map(|_| sampler.sample(logits).unwrap()).collect()
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_likeliest() {
        assert_eq!(draws(sampler(0.0, 1.0, 1), &[1.0, 3.0, f32::NAN, 3.0, -1.0], 3), [1, 1, 1]);
    }

    #[test]
    fn a_seed_decides_all_draws() {
        let logits: Vec<f32> = (0..500).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        for top_p in [1.0, 0.9] {
            let once = draws(sampler(1.0, top_p, 7), &logits, 50);
            assert_eq!(once, draws(sampler(1.0, top_p, 7), &logits, 50));
            assert_ne!(once, draws(sampler(1.0, top_p, 8), &logits, 50));
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.0, 2.0f32.ln(), 1.0f32.ln() - f32::INFINITY, 5.0f32.ln()];
        let seen = draws(sampler(1.0, 1.0, 3), &logits, 8000);
        let share = |id| seen.iter().filter(|seen| **seen == id).count() as f64 / 8000.0;
        assert!(
            (share(0) - 0.125).abs() < 0.02
                && (share(1) - 0.25).abs() < 0.02
                && (share(3) - 0.625).abs() < 0.02
        );
        assert_eq!(share(2), 0.0, "minus infinity is never drawn");
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let kinds = |top_p| {
            let mut seen = draws(sampler(1.0, top_p, 5), &logits, 400);
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(kinds(1e-6), [0], "the likeliest is always kept");
        assert_eq!(kinds(0.49), [0]);
        assert_eq!(kinds(0.6), [0, 1]);
        assert_eq!(kinds(0.9), [0, 1, 2]);
    }

    #[test]
    fn numbers_outside_their_range_and_broken_logits_are_errors() {
        for temperature in [-1.0, f32::NAN, f32::INFINITY] {
            assert!(Sampler::new(SamplingParams { temperature, ..Default::default() }).is_err());
        }
        for top_p in [0.0, -1.0, 1.1, f32::NAN] {
            assert!(Sampler::new(SamplingParams { top_p, ..Default::default() }).is_err());
        }
        for logits in [&[][..], &[f32::NAN; 3], &[f32::NEG_INFINITY; 2]] {
            assert_eq!(sampler(1.0, 0.9, 0).sample(logits), Err(SampleError::NoToken));
        }
        assert_eq!(sampler(1.0, 0.9, 0).sample(&[0.0, f32::INFINITY, f32::NAN]), Ok(1));
    }
}
