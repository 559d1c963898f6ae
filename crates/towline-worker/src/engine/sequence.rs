//! One request inside the engine: its tokens, how far their KV is computed, the blocks that hold it, and its output.
//!
//! Invariants: the KV of `tokens[..computed]` lies in `blocks`, in order; at least one token is uncomputed, since its
//! logits give the next one; blocks before `published` are full and never written again.

use towline_wire::prefix::{PrefixHasher, PrefixKey};

use super::events::Sink;
use super::job::{EngineError, Event, FinishReason, Finished, FinishedKv};
use super::output::Output;
use super::progress::KvProgress;
use super::schedule::{Row, Work};
use super::stats::Counters;
use crate::model::{Logits, Sequence};
use crate::pool::{Blocks, KvPool, PoolFull};
use crate::sample::SampleError;

/// What a sequence starts with.
pub(super) struct Origin {
    /// The prompt's tokens.
    pub(super) prompt: Vec<u32>,
    /// Tokens, the prompt's included, after which it ends.
    pub(super) end: usize,
    /// Full blocks of the prompt's beginning that were loaded.
    pub(super) loaded: Option<Blocks>,
    /// Whether the prompt's KV is wanted at the end.
    pub(super) keep_kv: bool,
    /// Who hears of the prompt's KV.
    pub(super) progress: Option<Box<dyn KvProgress>>,
    /// Tenant or adapter.
    pub(super) salt: String,
}

/// A request from its arrival to its end.
pub(super) struct SequenceState {
    tokens: Vec<u32>,
    prompt: usize,
    end: usize,
    computed: usize,
    blocks: Blocks,
    loaded: Option<Blocks>,
    hasher: PrefixHasher,
    /// Of the full blocks of `tokens`, as far as they were needed.
    keys: Vec<PrefixKey>,
    published: usize,
    /// Whether what it computes may be published: not on top of loaded blocks that nobody verified.
    shareable: bool,
    keep_kv: bool,
    progress: Option<Box<dyn KvProgress>>,
    /// Prompt tokens that were there at the first start.
    found: Option<usize>,
    computed_prompt: usize,
    output: Output,
    sink: Sink,
}

impl SequenceState {
    pub(super) fn new(origin: Origin, pool: &KvPool, output: Output, sink: Sink) -> Self {
        let Origin { prompt: tokens, end, loaded, keep_kv, progress, salt } = origin;
        let hasher = pool.hasher(&salt);
        Self {
            prompt: tokens.len(),
            end,
            computed: 0,
            blocks: pool.empty(),
            loaded,
            keys: hasher.keys(&tokens, pool.block_tokens()),
            hasher,
            published: 0,
            shareable: true,
            keep_kv,
            progress,
            found: None,
            computed_prompt: 0,
            output,
            sink,
            tokens,
        }
    }

    /// Whether nobody waits for it any more.
    pub(super) fn is_cancelled(&self) -> bool {
        self.sink.is_cancelled()
    }

    /// The prefix it may reuse and the blocks it needs for all its known tokens, those of the prefix included.
    pub(super) fn needs(&self, pool: &KvPool) -> (&[PrefixKey], usize) {
        let blocks = pool.blocks_for(self.tokens.len());
        match &self.loaded {
            Some(loaded) => (&[], blocks.saturating_sub(loaded.len())),
            None => {
                let reusable = (self.tokens.len() - 1) / pool.block_tokens();
                (&self.keys[..reusable.min(self.keys.len())], blocks)
            }
        }
    }

    /// Takes the blocks for all known tokens.
    pub(super) fn start(&mut self, pool: &KvPool, counters: &Counters) -> Result<(), PoolFull> {
        let (keys, needed) = self.needs(pool);
        let reservation = pool.reserve(keys, needed)?;
        let (cached, loaded) = (reservation.cached, self.loaded.as_ref().map_or(0, Blocks::len));
        (self.blocks, self.shareable) = match self.loaded.take() {
            None => (reservation.blocks, true),
            Some(mut blocks) => {
                let verified = blocks.ids().iter().all(|id| pool.is_verified(*id));
                blocks.append(reservation.blocks);
                (blocks, verified)
            }
        };
        self.published = cached + loaded;
        self.computed = self.published * pool.block_tokens();
        if self.found.is_none() {
            let of_prompt = |blocks: usize| (blocks * pool.block_tokens()).min(self.prompt);
            self.found = Some(of_prompt(cached + loaded));
            counters.found(of_prompt(cached), of_prompt(loaded));
        }
        if let Some(progress) = &mut self.progress {
            let mut blocks = self.blocks.share();
            blocks.truncate(pool.blocks_for(self.prompt));
            progress.handle_started(blocks);
        }
        Ok(())
    }

    /// Whoever is to be told of each layer, when the next `tokens` tokens complete the prompt's KV. Put it back with
    /// [`SequenceState::heard`].
    pub(super) fn completing(&mut self, tokens: usize) -> Option<Box<dyn KvProgress>> {
        let completes = self.computed < self.prompt && self.computed + tokens >= self.prompt;
        if completes { self.progress.take() } else { None }
    }

    /// Takes back what [`SequenceState::completing`] gave.
    pub(super) fn heard(&mut self, progress: Box<dyn KvProgress>) {
        self.progress = Some(progress);
    }

    /// Gives all computed KV back; [`SequenceState::start`] begins again, with the tokens generated so far.
    pub(super) fn stop(&mut self, pool: &KvPool) {
        if let Some(progress) = &mut self.progress {
            progress.handle_stopped();
        }
        self.blocks = pool.empty();
        (self.computed, self.published) = (0, 0);
    }

    /// Gives loaded blocks back before the start, to be computed here instead; false when there are none.
    pub(super) fn unload(&mut self) -> bool {
        self.loaded.take().is_some_and(|blocks| !blocks.is_empty())
    }

    /// What the scheduler needs to know.
    pub(super) fn row(&self) -> Row {
        Row { computed: self.computed, known: self.tokens.len(), blocks: self.blocks.len() }
    }

    /// Takes `more` blocks.
    pub(super) fn grow(&mut self, pool: &KvPool, more: usize) -> Result<(), PoolFull> {
        pool.grow(&mut self.blocks, more)
    }

    /// Its part of a step.
    pub(super) fn slice(&self, work: &Work) -> Sequence<'_> {
        let end = self.computed + work.tokens;
        Sequence {
            tokens: &self.tokens[self.computed..end],
            position: self.computed,
            blocks: self.blocks.ids(),
            want_logits: end == self.tokens.len(),
        }
    }

    /// Prompt tokens among its next `tokens`.
    pub(super) fn prompt_share(&self, tokens: usize) -> usize {
        self.prompt.min(self.computed + tokens) - self.prompt.min(self.computed)
    }

    /// Takes note of computed tokens and publishes the blocks they filled.
    pub(super) fn advance(&mut self, pool: &KvPool, tokens: usize) {
        self.computed_prompt += self.prompt_share(tokens);
        self.computed += tokens;
        let size = pool.block_tokens();
        while (self.published + 1) * size <= self.computed {
            let block = self.published;
            if self.keys.len() == block {
                let filled = &self.tokens[block * size..(block + 1) * size];
                self.keys.push(self.hasher.next(self.keys.last().copied(), filled));
            }
            if self.shareable {
                pool.publish(self.blocks.ids()[block], self.keys[block], None);
            }
            self.published += 1;
        }
    }

    /// Picks the next token, tells it, and says whether it was the last one.
    pub(super) fn pick(&mut self, logits: &Logits) -> Result<Option<FinishReason>, SampleError> {
        let last = self.tokens.len() + 1 >= self.end;
        let next = self.output.pick(logits, last)?;
        self.tokens.push(next.token);
        self.sink.send(Event::Token { id: next.token, text: next.text, logprob: next.logprob });
        Ok(match (next.stops, last) {
            (true, _) => Some(FinishReason::Stop),
            (false, true) => Some(FinishReason::Length),
            (false, false) => None,
        })
    }

    /// Ends it with an answer: first the blocks go where they belong, then the reader hears of it.
    pub(super) fn finish(self, reason: FinishReason, pool: &KvPool) {
        let Self { mut blocks, sink, prompt, tokens, .. } = self;
        let kv = self.keep_kv.then(|| {
            blocks.truncate(pool.blocks_for(prompt));
            FinishedKv { blocks: std::mem::replace(&mut blocks, pool.empty()), tokens: prompt }
        });
        drop(blocks);
        sink.send(Event::Finished(Finished {
            reason,
            prompt_tokens: prompt,
            completion_tokens: tokens.len() - prompt,
            computed_prompt_tokens: self.computed_prompt,
            cached_prompt_tokens: self.found.unwrap_or(0),
            kv,
        }));
    }

    /// Ends it without an answer.
    pub(super) fn fail(self, error: EngineError) {
        let Self { blocks, sink, .. } = self;
        drop(blocks);
        sink.send(Event::Failed(error));
    }
}
