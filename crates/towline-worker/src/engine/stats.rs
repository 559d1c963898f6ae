//! What the engine counts. Plain atomics, written by the engine's thread, read by metrics.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The engine's counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Prompt tokens computed here.
    pub prompt_tokens_computed: u64,
    /// Prompt tokens whose KV was found in the prefix cache.
    pub prompt_tokens_cached: u64,
    /// Prompt tokens whose KV was loaded from another engine.
    pub prompt_tokens_loaded: u64,
    /// Tokens generated.
    pub tokens_generated: u64,
    /// Forward passes.
    pub steps: u64,
    /// Sequences whose blocks were taken away for an older one.
    pub preemptions: u64,
    /// Jobs that failed in a forward pass.
    pub failures: u64,
    /// Jobs that were cancelled before their end.
    pub cancellations: u64,
    /// Sequences that run now.
    pub running: usize,
    /// Jobs that wait now.
    pub waiting: usize,
}

/// The counters themselves. Each stands alone, so relaxed order is enough.
#[derive(Debug, Default)]
pub(super) struct Counters {
    prompt_tokens_computed: AtomicU64,
    prompt_tokens_cached: AtomicU64,
    prompt_tokens_loaded: AtomicU64,
    tokens_generated: AtomicU64,
    steps: AtomicU64,
    preemptions: AtomicU64,
    failures: AtomicU64,
    cancellations: AtomicU64,
    running: AtomicUsize,
    waiting: AtomicUsize,
}

fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}

impl Counters {
    /// A forward pass over some prompt tokens.
    pub(super) fn stepped(&self, prompt_tokens: usize) {
        add(&self.steps, 1);
        add(&self.prompt_tokens_computed, prompt_tokens);
    }

    pub(super) fn generated(&self) {
        add(&self.tokens_generated, 1);
    }

    pub(super) fn found(&self, cached: usize, loaded: usize) {
        add(&self.prompt_tokens_cached, cached);
        add(&self.prompt_tokens_loaded, loaded);
    }

    pub(super) fn preempted(&self) {
        add(&self.preemptions, 1);
    }

    pub(super) fn failed(&self) {
        add(&self.failures, 1);
    }

    pub(super) fn cancelled(&self, count: usize) {
        add(&self.cancellations, count);
    }

    pub(super) fn runs(&self, running: usize) {
        self.running.store(running, Ordering::Relaxed);
    }

    /// One more job waits.
    pub(super) fn waits(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// `count` jobs wait no longer.
    pub(super) fn left_queue(&self, count: usize) {
        self.waiting.fetch_sub(count, Ordering::Relaxed);
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(super) fn snapshot(&self) -> EngineStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EngineStats {
            prompt_tokens_computed: read(&self.prompt_tokens_computed),
            prompt_tokens_cached: read(&self.prompt_tokens_cached),
            prompt_tokens_loaded: read(&self.prompt_tokens_loaded),
            tokens_generated: read(&self.tokens_generated),
            steps: read(&self.steps),
            preemptions: read(&self.preemptions),
            failures: read(&self.failures),
            cancellations: read(&self.cancellations),
            running: self.running.load(Ordering::Relaxed),
            waiting: self.waiting(),
        }
    }
}
