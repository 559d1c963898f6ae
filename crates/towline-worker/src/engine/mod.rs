//! The engine: one thread that computes all requests of a worker together.
//!
//! [`Engine::submit`] takes a [`Job`] and gives a [`JobHandle`], whose events are the answer. Every step of the thread is
//! one forward pass over a mix of sequences: those that decode, one token each, and chunks of prompts (continuous
//! batching with chunked prefill). Prompts begin with what the prefix cache of the [`KvPool`] has, or with blocks that
//! were pulled from another engine.
//!
//! An answer depends on its job alone: not on the batch, the chunks, the blocks' places, the cache or preemptions. The
//! model promises that for each forward pass; the engine adds a sampler for each job.
//!
//! Bounded: tokens a step, sequences a batch, waiting jobs, events a job. Idle: asleep, without a timeout.
//!
//! | file       | what it does                                              |
//! |------------|-----------------------------------------------------------|
//! | `job`      | what goes in, what comes out, why not                     |
//! | `progress` | who is told of a prompt's KV while it is computed         |
//! | `events`   | the way back to the reader                                |
//! | `inbox`    | the way into the thread                                   |
//! | `sequence` | one request's tokens and blocks                           |
//! | `output`   | one request's sampler, text and stop conditions           |
//! | `schedule` | what a step computes; pure                                |
//! | `thread`   | the loop                                                  |
//! | `stats`    | counters                                                  |

mod events;
mod inbox;
mod job;
mod output;
mod progress;
mod schedule;
mod sequence;
mod stats;
mod thread;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use thiserror::Error;

pub use events::{JobHandle, NoEvent};
pub use job::{EngineError, Event, FinishReason, Finished, FinishedKv, Job, Start, SubmitError};
pub use progress::KvProgress;
pub use stats::EngineStats;

use crate::model::{ForwardError, KvCache, Logits, Model, STEP_TOKENS_DEFAULT, Sequence};
use crate::pool::{Blocks, KvPool};
use crate::text::Tokenizer;
use inbox::Inbox;
use output::Output;
use schedule::Bounds;
use sequence::{Origin, SequenceState};
use stats::Counters;
use thread::Worker;

/// What the engine needs of a model; [`Model`] has it, and tests have smaller ones.
pub trait Forward: Send + 'static {
    /// Most tokens of a sequence.
    fn context_tokens(&self) -> usize;
    /// Tokens in the vocabulary.
    fn vocab(&self) -> usize;
    /// Most tokens of one forward pass.
    fn step_tokens(&self) -> usize;
    /// Turns tokens into text.
    fn tokenizer(&self) -> &Arc<Tokenizer>;
    /// Computes the tokens of a batch into the cache and returns the logits that were asked for, in the batch's order.
    /// `stored` is called with each layer's number, in order, once the layer's KV of the whole batch is in the cache.
    ///
    /// # Errors
    /// [`ForwardError`] when the batch breaks a bound; nothing was computed then.
    fn forward(
        &mut self,
        cache: &KvCache,
        batch: &[Sequence<'_>],
        stored: &mut dyn FnMut(usize),
    ) -> Result<Vec<Option<Logits>>, ForwardError>;
}

impl Forward for Model {
    fn context_tokens(&self) -> usize {
        self.config().context
    }

    fn vocab(&self) -> usize {
        self.config().vocab
    }

    fn step_tokens(&self) -> usize {
        Model::step_tokens(self)
    }

    fn tokenizer(&self) -> &Arc<Tokenizer> {
        Model::tokenizer(self)
    }

    fn forward(
        &mut self,
        cache: &KvCache,
        batch: &[Sequence<'_>],
        stored: &mut dyn FnMut(usize),
    ) -> Result<Vec<Option<Logits>>, ForwardError> {
        self.forward_by_layer(cache, batch, stored)
    }
}

/// The engine's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Most tokens of one step; at most what the model was loaded for, at least one more than `batch_max`.
    pub step_tokens: usize,
    /// Most sequences that run at once.
    pub batch_max: usize,
    /// Most jobs that wait; more are refused as [`SubmitError::Busy`].
    pub queue_max: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { step_tokens: STEP_TOKENS_DEFAULT, batch_max: 16, queue_max: 256 }
    }
}

/// Why an engine could not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The system gave no thread: raise its limits.
    #[error("cannot start the engine's thread: {source}")]
    Thread {
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A running engine. Dropping it shuts it down.
pub struct Engine {
    pool: KvPool,
    tokenizer: Arc<Tokenizer>,
    context_tokens: usize,
    vocab: usize,
    queue_max: usize,
    inbox: Arc<Inbox>,
    counters: Arc<Counters>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the thread `towline-engine`, which owns `model` and computes into `pool`. One engine a pool.
    ///
    /// # Errors
    /// [`StartError`] when the system gives no thread.
    pub fn start(model: impl Forward, pool: KvPool, config: EngineConfig) -> Result<Self, StartError> {
        let (inbox, counters) = (Arc::<Inbox>::default(), Arc::<Counters>::default());
        let (context_tokens, vocab, tokenizer) =
            (model.context_tokens(), model.vocab(), Arc::clone(model.tokenizer()));
        let bounds = Bounds::new(config.step_tokens, config.batch_max, pool.block_tokens())
            .within(model.step_tokens());
        let worker = Worker {
            model,
            pool: pool.clone(),
            inbox: Arc::clone(&inbox),
            counters: Arc::clone(&counters),
            bounds,
            running: Vec::new(),
            waiting: VecDeque::new(),
        };
        let thread = std::thread::Builder::new().name("towline-engine".into()).spawn(move || worker.run());
        let thread = Mutex::new(Some(thread.map_err(|source| StartError::Thread { source })?));
        Ok(Self {
            pool,
            tokenizer,
            context_tokens,
            vocab,
            queue_max: config.queue_max,
            inbox,
            counters,
            thread,
        })
    }

    /// Queues a job. Returns at once; hashing the prompt's blocks is the only work done here.
    ///
    /// # Errors
    /// [`SubmitError`] when the job can't run, or not now.
    pub fn submit(&self, job: Job) -> Result<JobHandle, SubmitError> {
        let end = self.check(&job)?;
        let output = Output::new(&self.tokenizer, &job)?;
        let Job { id, prompt, start, keep_kv, progress, salt, .. } = job;
        let loaded = self.usable(start, prompt.len())?;
        let (sink, handle) = events::channel(id, Arc::clone(&self.inbox));
        let origin = Origin { prompt, end, loaded, keep_kv, progress, salt };
        let sequence = SequenceState::new(origin, &self.pool, output, sink);
        self.inbox.submit(sequence, self.queue_max, &self.counters)?;
        Ok(handle)
    }

    /// The tokens after which the job ends, prompt included, if it can run at all.
    fn check(&self, job: &Job) -> Result<usize, SubmitError> {
        let (prompt, max) = (job.prompt.len(), self.context_tokens);
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if job.max_tokens == 0 {
            return Err(SubmitError::NoTokens);
        }
        if prompt >= max {
            return Err(SubmitError::ContextLength { prompt, max });
        }
        if let Some(token) = job.prompt.iter().find(|token| **token as usize >= self.vocab) {
            return Err(SubmitError::Token { token: *token, vocab: self.vocab });
        }
        let end = prompt.saturating_add(job.max_tokens as usize).min(max);
        // The last token's KV is never computed.
        let (needed, total) = (self.pool.blocks_for(end - 1), self.pool.stats().total);
        if needed > total { Err(SubmitError::PoolTooSmall { needed, total }) } else { Ok(end) }
    }

    /// The full loaded blocks before the prompt's last token.
    fn usable(&self, start: Start, prompt: usize) -> Result<Option<Blocks>, SubmitError> {
        let Start::Loaded { mut blocks, tokens } = start else { return Ok(None) };
        let size = self.pool.block_tokens();
        if !blocks.pool().is_same(&self.pool) {
            return Err(SubmitError::Loaded { what: "its blocks belong to another pool" });
        }
        if tokens > prompt {
            return Err(SubmitError::Loaded { what: "it has more tokens than the prompt" });
        }
        if blocks.len() * size < tokens {
            return Err(SubmitError::Loaded { what: "it has fewer blocks than its tokens fill" });
        }
        blocks.truncate(tokens.min(prompt - 1) / size);
        Ok(Some(blocks).filter(|blocks| !blocks.is_empty()))
    }

    /// The pool that it computes into.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// The engine's counters now.
    pub fn stats(&self) -> EngineStats {
        self.counters.snapshot()
    }

    /// Whether it takes jobs: it was not shut down, and its thread has not died of a bug.
    pub fn is_running(&self) -> bool {
        !self.inbox.is_closed()
    }

    /// Stops the thread after the step it is in and waits for that. Jobs that run or wait fail with
    /// [`EngineError::Stopped`].
    pub fn shutdown(&self) {
        self.inbox.close();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the thread was reported when it happened, and its jobs have failed.
            _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("pool", &self.pool)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown();
    }
}
