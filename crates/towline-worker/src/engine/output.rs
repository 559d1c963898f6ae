//! One request's way from logits to text: picks a token, turns it into whole characters, and stops where it must.

use std::sync::Arc;

use super::job::Job;
use crate::model::Logits;
use crate::sample::{SampleError, Sampler};
use crate::text::{Decoder, StopStrings, Stopped, Tokenizer};

/// Sampler, decoder and stop conditions of one request.
pub(super) struct Output {
    tokenizer: Arc<Tokenizer>,
    sampler: Sampler,
    decoder: Decoder,
    stops: StopStrings,
    ignore_eos: bool,
    logprobs: bool,
}

/// A picked token and what became certain with it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Next {
    pub(super) token: u32,
    pub(super) text: String,
    pub(super) logprob: Option<f32>,
    /// Whether a stop text or an end-of-sequence token ends the answer.
    pub(super) stops: bool,
}

impl Output {
    /// # Errors
    /// [`SampleError`] for sampling numbers outside their range.
    pub(super) fn new(tokenizer: &Arc<Tokenizer>, job: &Job) -> Result<Self, SampleError> {
        Ok(Self {
            tokenizer: Arc::clone(tokenizer),
            sampler: Sampler::new(job.sampling)?,
            decoder: Decoder::new(),
            stops: StopStrings::new(job.stop.iter().cloned()),
            ignore_eos: job.ignore_eos,
            logprobs: job.logprobs,
        })
    }

    /// The next token. With `last`, no other follows, and text that was held back is let go.
    ///
    /// # Errors
    /// [`SampleError::NoToken`] when the logits are no numbers.
    pub(super) fn pick(&mut self, logits: &Logits, last: bool) -> Result<Next, SampleError> {
        let token = self.sampler.sample(&logits.0)?;
        let logprob = self.logprobs.then(|| log_probability(&logits.0, token));
        let eos = !self.ignore_eos && self.tokenizer.is_eos(token);
        let mut certain = self.decoder.push(&self.tokenizer, token);
        if eos || last {
            certain += &self.decoder.finish();
        }
        let (mut text, stopped) = self.stops.push(&certain);
        if eos || last {
            text += &self.stops.finish();
        }
        Ok(Next { token, text, logprob, stops: eos || stopped == Stopped::Yes })
    }
}

/// The natural logarithm of a token's probability, before temperature and top-p: one pass over the vocabulary.
fn log_probability(logits: &[f32], token: u32) -> f32 {
    let numbers = || logits.iter().copied().filter(|logit| !logit.is_nan());
    let largest = numbers().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = numbers().map(|logit| f64::from(logit - largest).exp()).sum();
    let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    #[expect(clippy::cast_possible_truncation, reason = "a logarithm near zero; f32 is what logits have")]
    let log_sum = sum.ln() as f32;
    logit - largest - log_sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [1.0f32.ln(), 3.0f32.ln(), f32::NAN, f32::NEG_INFINITY];
        assert!((log_probability(&logits, 0) - 0.25f32.ln()).abs() < 1e-6);
        assert!((log_probability(&logits, 1) - 0.75f32.ln()).abs() < 1e-6);
        assert_eq!(log_probability(&logits, 3), f32::NEG_INFINITY);
        assert_eq!(log_probability(&logits, 99), f32::NEG_INFINITY);
    }
}
