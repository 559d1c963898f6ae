//! What goes into the engine and what comes out: jobs, events, and why a job is refused or fails.

use thiserror::Error;

use super::progress::KvProgress;
use crate::model::ForwardError;
use crate::pool::Blocks;
use crate::sample::{SampleError, SamplingParams};

/// One request: a prompt and how to go on from it.
#[derive(Debug)]
pub struct Job {
    /// The request's name in logs.
    pub id: String,
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are picked.
    pub sampling: SamplingParams,
    /// Most tokens to generate, at least one. The end of the context ends the answer earlier.
    pub max_tokens: u32,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Goes on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Tells each token's logarithmic probability, for one more pass over the vocabulary a token.
    pub logprobs: bool,
    /// Where the prompt's KV comes from.
    pub start: Start,
    /// Hands the prompt's KV over with [`Finished`].
    pub keep_kv: bool,
    /// Hears of the prompt's KV while it is computed.
    pub progress: Option<Box<dyn KvProgress>>,
    /// Tenant or adapter: prompts share KV only under equal salts.
    pub salt: String,
}

/// Where a prompt's KV comes from.
#[derive(Debug)]
pub enum Start {
    /// The prefix cache, as far as it reaches; the rest is computed. The last token always is, for its logits.
    Fresh,
    /// Blocks that were pulled from another engine.
    Loaded {
        /// Blocks of the engine's own pool, exclusive or published.
        blocks: Blocks,
        /// Leading prompt tokens whose KV they hold, at most the prompt's length. Only full blocks before the last
        /// token are used, the others are given back: the last token is computed here, and no loaded block is
        /// written.
        tokens: usize,
    },
}

/// What a job tells while it runs. [`Finished`](Event::Finished) or [`Failed`](Event::Failed) comes last.
#[derive(Debug)]
pub enum Event {
    /// The next token; an end-of-sequence token too, so that there are as many of these events as completion tokens.
    Token {
        /// The token.
        id: u32,
        /// Text that became certain with it: whole characters, no part of a stop text. Often empty.
        text: String,
        /// Natural logarithm of its probability before temperature and top-p, when asked for.
        logprob: Option<f32>,
    },
    /// The answer is complete.
    Finished(Finished),
    /// The job ended without an answer.
    Failed(EngineError),
}

/// How a job ended, and what it cost.
#[derive(Debug)]
pub struct Finished {
    /// Why no more tokens follow.
    pub reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub completion_tokens: usize,
    /// Prompt tokens computed here, those computed again after a preemption included.
    pub computed_prompt_tokens: usize,
    /// Leading prompt tokens whose KV was there at the start: found in the prefix cache, or loaded.
    pub cached_prompt_tokens: usize,
    /// The prompt's KV, for jobs with `keep_kv`.
    pub kv: Option<FinishedKv>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop text or an end-of-sequence token.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
}

/// The KV of a prompt, alive as long as this value.
#[derive(Debug)]
pub struct FinishedKv {
    /// The blocks that hold it, the last one perhaps partly filled.
    pub blocks: Blocks,
    /// Tokens of the prompt.
    pub tokens: usize,
}

impl FinishedKv {
    /// Blocks that are full.
    pub fn full_blocks(&self) -> usize {
        self.tokens / self.blocks.pool().block_tokens()
    }

    /// The digest of full block `position`, computed when first asked for and then kept. `None` for a block that isn't
    /// full, or isn't there.
    pub fn digest(&self, position: usize) -> Option<u64> {
        let full = self.blocks.ids().get(..self.full_blocks())?;
        full.get(position).and_then(|id| self.blocks.pool().digest(*id))
    }

    /// The digests of all full blocks, in order.
    pub fn digests(&self) -> Vec<Option<u64>> {
        (0..self.full_blocks()).map(|position| self.digest(position)).collect()
    }
}

/// Why a job was not taken. Nothing ran, and what it held is given back.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SubmitError {
    /// Send a prompt.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// Ask for a token.
    #[error("at least one token must be asked for")]
    NoTokens,
    /// Shorten the prompt: it leaves no room for an answer.
    #[error("the prompt has {prompt} tokens, the context ends after {max}")]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        max: usize,
    },
    /// Ask for fewer tokens, or give the worker more KV memory: this can never run.
    #[error("prompt and answer need {needed} KV blocks, the pool has {total}")]
    PoolTooSmall {
        /// Blocks that the prompt and all tokens asked for need.
        needed: usize,
        /// Blocks of the pool.
        total: usize,
    },
    /// Not a token of this model.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: usize,
    },
    /// Ask for temperature and top-p in their range.
    #[error(transparent)]
    Sampling(#[from] SampleError),
    /// The caller's mistake: loaded blocks that can't be this prompt's.
    #[error("the loaded KV does not fit the job: {what}")]
    Loaded {
        /// What is wrong.
        what: &'static str,
    },
    /// Come back later, or go to another worker.
    #[error("{waiting} requests are waiting already")]
    Busy {
        /// Requests in the queue.
        waiting: usize,
    },
    /// The engine was shut down or died.
    #[error("the engine has stopped")]
    Stopped,
}

/// Why a job that was taken has no answer.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum EngineError {
    /// The forward pass refused a batch with this job in it. The engine runs on; submit the job again.
    #[error("the forward pass failed: {0}")]
    Forward(#[from] ForwardError),
    /// The model's arithmetic broke down: no token has a probability. Look at the model file.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The forward pass returned fewer logits than it was asked for: a mistake in the model's code.
    #[error("the forward pass returned no logits")]
    NoLogits,
    /// The engine was shut down or died.
    #[error("the engine has stopped")]
    Stopped,
}
