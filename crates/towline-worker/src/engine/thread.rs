//! The engine's thread: hears what arrived, lets waiting requests in, computes a step, passes tokens on, again and again;
//! sleeps when nothing can run.
//!
//! Requests run in order of arrival: `waiting` is a queue, `running` is sorted by arrival, and a preempted request (always
//! the youngest that runs) goes back to the queue's head. What a step does is decided in [`schedule`].
//!
//! Cost of a step beside the forward pass, measured with an empty one: 4 µs for one sequence, 17 µs for eight, and each
//! token's sampling (a pass over the vocabulary: up to 0.2 ms for 49,152 tokens). A decode step takes 8 ms or more.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Forward;
use super::inbox::{Inbox, Patience};
use super::job::{EngineError, FinishReason};
use super::schedule::{self, Bounds, Plan, Row, Work};
use super::sequence::SequenceState;
use super::stats::Counters;
use crate::model::{ForwardError, Logits, Sequence};
use crate::pool::KvPool;

/// All that the thread owns.
pub(super) struct Worker<F> {
    pub(super) model: F,
    pub(super) pool: KvPool,
    pub(super) inbox: Arc<Inbox>,
    pub(super) counters: Arc<Counters>,
    pub(super) bounds: Bounds,
    pub(super) running: Vec<SequenceState>,
    pub(super) waiting: VecDeque<SequenceState>,
}

/// Closes the inbox however the thread ends, so that nobody submits to, or waits for, an engine that is gone.
struct Closing {
    inbox: Arc<Inbox>,
    pool: KvPool,
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.pool.unwatch();
        self.inbox.close();
    }
}

impl<F: Forward> Worker<F> {
    /// Runs until the inbox is closed. Jobs that still run or wait then fail with [`EngineError::Stopped`].
    pub(super) fn run(mut self) {
        let _closing = Closing { inbox: Arc::clone(&self.inbox), pool: self.pool.clone() };
        let inbox = Arc::clone(&self.inbox);
        self.pool.watch(Arc::new(move || inbox.ring()));
        let mut patience = Patience::Sleep;
        while let Some(arrived) = self.inbox.take(patience) {
            self.waiting.extend(arrived);
            self.forget_cancelled();
            self.admit();
            self.counters.runs(self.running.len());
            patience = if self.step() { Patience::Look } else { Patience::Sleep };
        }
    }

    fn forget_cancelled(&mut self) {
        let (running, waiting) = (self.running.len(), self.waiting.len());
        self.running.retain(|sequence| !sequence.is_cancelled());
        self.waiting.retain(|sequence| !sequence.is_cancelled());
        self.counters.left_queue(waiting - self.waiting.len());
        self.counters.cancelled(running - self.running.len() + waiting - self.waiting.len());
    }

    /// Lets requests in from the queue's head while there is room.
    fn admit(&mut self) {
        while let Some(head) = self.waiting.front_mut() {
            let (keys, blocks) = head.needs(&self.pool);
            let headroom = self.pool.headroom(keys, blocks).ok();
            if !schedule::admits(self.bounds, self.running.len(), headroom) {
                if self.running.is_empty() && self.reclaim() {
                    continue;
                }
                break;
            }
            // The handoff may have been faster; the bell rings when blocks come back.
            if head.start(&self.pool, &self.counters).is_err() {
                break;
            }
            self.counters.left_queue(1);
            self.running.extend(self.waiting.pop_front());
        }
    }

    /// Nothing runs, and the queue's head lacks blocks: takes those that the youngest waiting request had loaded, else
    /// requests could wait for each other's for ever. False when there are none: then others, like leases, hold them.
    fn reclaim(&mut self) -> bool {
        self.waiting.iter_mut().skip(1).rev().any(SequenceState::unload)
    }

    /// Computes one step; false when nothing runs.
    fn step(&mut self) -> bool {
        let works = self.plan();
        if works.is_empty() {
            return false;
        }
        match self.forward(&works) {
            Ok(logits) => self.tell(&works, logits),
            Err(error) => self.fail(&works, &error),
        }
        true
    }

    /// Decides what to compute, and takes the blocks for it. Ends: every turn takes blocks, preempts a sequence, or
    /// lost a race for blocks that someone else then holds.
    fn plan(&mut self) -> Vec<Work> {
        loop {
            let rows: Vec<Row> = self.running.iter().map(SequenceState::row).collect();
            match schedule::plan(&rows, self.bounds, self.pool.stats().available()) {
                Plan::Run(works) if self.grow(&works) => return works,
                Plan::Run(_) => {}
                Plan::Preempt(index) => self.preempt(index),
            }
        }
    }

    fn grow(&mut self, works: &[Work]) -> bool {
        let (running, pool) = (&mut self.running, &self.pool);
        works.iter().filter(|work| work.grow > 0).all(|work| running[work.row].grow(pool, work.grow).is_ok())
    }

    fn preempt(&mut self, index: usize) {
        let mut sequence = self.running.remove(index);
        sequence.stop(&self.pool);
        self.waiting.push_front(sequence);
        self.counters.waits();
        self.counters.preempted();
        self.counters.runs(self.running.len());
    }

    fn forward(&mut self, works: &[Work]) -> Result<Vec<Option<Logits>>, ForwardError> {
        let running = &mut self.running;
        let completing = |work: &Work| Some((work.row, running[work.row].completing(work.tokens)?));
        let mut told: Vec<_> = works.iter().filter_map(completing).collect();
        let batch: Vec<Sequence<'_>> = works.iter().map(|work| self.running[work.row].slice(work)).collect();
        let stored = &mut |layer| told.iter_mut().for_each(|(_, progress)| progress.handle_layers(layer + 1));
        let logits = self.model.forward(self.pool.cache(), &batch, stored);
        told.into_iter().for_each(|(row, progress)| self.running[row].heard(progress));
        let logits = logits?;
        let prompt_tokens = works.iter().map(|work| self.running[work.row].prompt_share(work.tokens)).sum();
        self.counters.stepped(prompt_tokens);
        Ok(logits)
    }

    /// Passes the step's tokens on and takes out what is finished.
    fn tell(&mut self, works: &[Work], logits: Vec<Option<Logits>>) {
        let mut logits = logits.into_iter();
        let mut ended = Vec::new();
        for work in works {
            let sequence = &mut self.running[work.row];
            let wanted = sequence.slice(work).want_logits;
            sequence.advance(&self.pool, work.tokens);
            let outcome = match logits.next().flatten() {
                _ if !wanted => Ok(None),
                Some(logits) => sequence.pick(&logits).map_err(EngineError::from),
                None => Err(EngineError::NoLogits),
            };
            if wanted && outcome.is_ok() {
                self.counters.generated();
            }
            ended.extend(outcome.transpose().map(|outcome| (work.row, outcome)));
        }
        self.end(ended);
    }

    fn fail(&mut self, works: &[Work], error: &ForwardError) {
        self.end(works.iter().map(|work| (work.row, Err(error.clone().into()))).collect());
    }

    fn end(&mut self, mut ended: Vec<(usize, Result<FinishReason, EngineError>)>) {
        // From the back, so that the other indices stay right.
        ended.sort_by_key(|(row, _)| std::cmp::Reverse(*row));
        for (row, outcome) in ended {
            let sequence = self.running.remove(row);
            self.counters.runs(self.running.len());
            match outcome {
                Ok(reason) => sequence.finish(reason, &self.pool),
                Err(error) => {
                    self.counters.failed();
                    sequence.fail(error);
                }
            }
        }
    }
}
