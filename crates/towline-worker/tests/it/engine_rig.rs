//! What the engine's tests share: jobs, answers, pools, and a model whose answers are known.
//!
//! The [`Fake`] model writes tokens where a real one writes KV, and computes logits from the tokens that it reads back
//! through the block table. An answer is right exactly when every token lay in the right place at every step.
#![allow(clippy::unwrap_used, reason = "tests; clippy exempts only the functions that are marked so")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use towline_fabric::Memory;
use towline_wire::layout::{Gqa, KvLayout};
use towline_worker::engine::{Engine, EngineConfig, Event, Finished, Forward, Job, JobHandle, Start};
use towline_worker::model::{ForwardError, KvCache, LoadOptions, Logits, Model, Sequence};
use towline_worker::pool::{KvPool, PoolConfig};
use towline_worker::sample::SamplingParams;
use towline_worker::testing::{EOS, TinyModel};
use towline_worker::text::Tokenizer;

/// Longer than any test's wait should ever be.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Tokens in a block of the fake's pool.
pub(crate) const BLOCK: usize = 4;
/// Tokens of the fake's context.
pub(crate) const CONTEXT: usize = 200;

/// A greedy job.
pub(crate) fn job(prompt: &[u32], max_tokens: u32) -> Job {
    Job {
        id: "test".into(),
        prompt: prompt.to_vec(),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens,
        stop: Vec::new(),
        ignore_eos: false,
        logprobs: false,
        start: Start::Fresh,
        keep_kv: false,
        progress: None,
        salt: String::new(),
    }
}

/// All that a job told.
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    pub(crate) logprobs: Vec<Option<f32>>,
    pub(crate) finished: Finished,
}

/// Waits for the whole answer.
pub(crate) fn answer(handle: &mut JobHandle) -> Answer {
    let (mut tokens, mut text, mut logprobs) = (Vec::new(), String::new(), Vec::new());
    loop {
        match handle.wait(PATIENCE).unwrap() {
            Some(Event::Token { id, text: more, logprob }) => {
                tokens.push(id);
                text += &more;
                logprobs.push(logprob);
            }
            Some(Event::Finished(finished)) => {
                assert!(handle.wait(PATIENCE).unwrap().is_none(), "nothing follows the end");
                return Answer { tokens, text, logprobs, finished };
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A pool of `blocks` blocks for `layout`.
pub(crate) fn pool(layout: &KvLayout, blocks: u32, config: PoolConfig) -> KvPool {
    let bytes = layout.groups[0].block_bytes() * u64::from(blocks);
    let memory = Arc::new(Memory::allocate("engine-test", bytes).unwrap());
    KvPool::new(KvCache::new(memory, layout).unwrap(), config)
}

/// A pool for the [`Fake`].
pub(crate) fn small_pool(blocks: u32, config: PoolConfig) -> KvPool {
    let gqa = Gqa {
        layers: 1,
        kv_heads: 1,
        head_dim: 16,
        element_bytes: 1,
        block_tokens: u32::try_from(BLOCK).unwrap(),
    };
    pool(&KvLayout::gqa(gqa), blocks, config)
}

/// A tiny real model.
pub(crate) fn model(threads: usize) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    TinyModel::default().write(&path).unwrap();
    Model::load(&path, &LoadOptions { threads, ..LoadOptions::default() }).unwrap()
}

/// How a test meddles with a [`Fake`].
#[derive(Default)]
pub(crate) struct Controls {
    gate: Mutex<Gate>,
    changed: Condvar,
    /// The next pass fails.
    pub(crate) fail: AtomicBool,
    /// The next pass panics.
    pub(crate) panic: AtomicBool,
    /// Ends an answer at this many tokens, prompt included; 0: never.
    pub(crate) eos_at: AtomicU32,
    /// The engine's thread in `/proc`, once it has computed something.
    pub(crate) task: Mutex<PathBuf>,
}

#[derive(Default)]
struct Gate {
    /// Passes that may still come through; `None`: all.
    passes: Option<usize>,
    at_gate: bool,
}

impl Controls {
    /// Closes the gate after `passes` more passes.
    pub(crate) fn allow(&self, passes: usize) {
        self.gate.lock().unwrap().passes = Some(passes);
        self.changed.notify_all();
    }

    pub(crate) fn open(&self) {
        self.gate.lock().unwrap().passes = None;
        self.changed.notify_all();
    }

    /// Waits until the engine stands at the closed gate.
    pub(crate) fn await_engine(&self) {
        let waiting = |gate: &mut Gate| !gate.at_gate;
        let waited = self.changed.wait_timeout_while(self.gate.lock().unwrap(), PATIENCE, waiting).unwrap();
        assert!(!waited.1.timed_out(), "the engine computes nothing");
    }

    fn pass(&self) {
        let mut gate = self.gate.lock().unwrap();
        gate.at_gate = true;
        self.changed.notify_all();
        let (mut gate, timeout) =
            self.changed.wait_timeout_while(gate, PATIENCE, |gate| gate.passes == Some(0)).unwrap();
        assert!(!timeout.timed_out(), "the test never opened the gate");
        gate.passes = gate.passes.map(|passes| passes - 1);
        gate.at_gate = false;
    }
}

/// A model that computes nothing but what its block tables say.
pub(crate) struct Fake {
    tokenizer: Arc<Tokenizer>,
    controls: Arc<Controls>,
    pub(crate) step_tokens: usize,
}

impl Fake {
    pub(crate) fn new(controls: &Arc<Controls>) -> Self {
        let tokenizer = Arc::clone(model(1).tokenizer());
        Self { tokenizer, controls: Arc::clone(controls), step_tokens: 64 }
    }

    fn run(&self, cache: &KvCache, sequence: &Sequence<'_>) -> Option<Logits> {
        let place = |at: usize| {
            u64::from(sequence.blocks[at / BLOCK]) * cache.block_bytes() + 4 * (at % BLOCK) as u64
        };
        for (at, token) in (sequence.position..).zip(sequence.tokens) {
            cache.memory().write_from(place(at), &token.to_le_bytes()).unwrap();
        }
        let end = sequence.position + sequence.tokens.len();
        let read = (0..end).map(|at| {
            let mut token = [0; 4];
            cache.memory().read_into(place(at), &mut token).unwrap();
            u32::from_le_bytes(token)
        });
        let read: Vec<u32> = read.collect();
        sequence.want_logits.then(|| logits(&read, self.controls.eos_at.load(Ordering::Relaxed)))
    }
}

impl Forward for Fake {
    fn context_tokens(&self) -> usize {
        CONTEXT
    }

    fn vocab(&self) -> usize {
        self.tokenizer.vocab()
    }

    fn step_tokens(&self) -> usize {
        self.step_tokens
    }

    fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    fn forward(
        &mut self,
        cache: &KvCache,
        batch: &[Sequence<'_>],
        stored: &mut dyn FnMut(usize),
    ) -> Result<Vec<Option<Logits>>, ForwardError> {
        self.controls.pass();
        *self.controls.task.lock().unwrap() = std::fs::canonicalize("/proc/thread-self").unwrap();
        if self.controls.fail.swap(false, Ordering::Relaxed) {
            return Err(ForwardError::Layout);
        }
        assert!(
            !self.controls.panic.swap(false, Ordering::Relaxed),
            "a model that panics, as the test wants"
        );
        let tokens: usize = batch.iter().map(|sequence| sequence.tokens.len()).sum();
        assert!(tokens <= self.step_tokens && batch.iter().all(|sequence| !sequence.tokens.is_empty()));
        let logits = batch.iter().map(|sequence| self.run(cache, sequence)).collect();
        stored(0);
        Ok(logits)
    }
}

/// Some logits for the token after `tokens`; the likeliest is a printable character, or the end at `eos_at` tokens.
fn logits(tokens: &[u32], eos_at: u32) -> Logits {
    let hash = tokens.iter().fold(17u64, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    let mut values = vec![-10.0; 3 + 256 + 16];
    for (index, value) in values[3 + 32..3 + 127].iter_mut().enumerate() {
        *value = (hash.rotate_left(u32::try_from(index % 64).unwrap()) % 1000) as f32 / 500.0;
    }
    values[3 + 32 + usize::try_from(hash % 95).unwrap()] = 5.0;
    if tokens.len() == eos_at as usize {
        values[EOS as usize] = 9.0;
    }
    Logits(values)
}

/// The fake's greedy answer.
pub(crate) fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + count {
        let next = towline_worker::sample::greedy(&logits(&tokens, 0).0).unwrap().0;
        tokens.push(next);
    }
    tokens.split_off(prompt.len())
}

/// The text of printable tokens.
pub(crate) fn text(tokens: &[u32]) -> String {
    tokens.iter().map(|token| char::from(u8::try_from(token - 3).unwrap())).collect()
}

/// A prompt of printable characters that begins differently for each `seed`.
pub(crate) fn prompt(seed: u32, tokens: usize) -> Vec<u32> {
    (0..).map(|at: u32| 3 + 32 + (seed * 31 + at * 7) % 95).take(tokens).collect()
}

/// Small steps, so that prompts come in chunks.
pub(crate) fn config(batch_max: usize) -> EngineConfig {
    EngineConfig { step_tokens: 16, batch_max, queue_max: 64 }
}

/// An engine over a [`Fake`].
pub(crate) struct Rig {
    pub(crate) controls: Arc<Controls>,
    pub(crate) pool: KvPool,
    pub(crate) engine: Engine,
}

pub(crate) fn rig(blocks: u32, config: EngineConfig) -> Rig {
    let controls = Arc::<Controls>::default();
    let pool = small_pool(blocks, PoolConfig::default());
    let engine = Engine::start(Fake::new(&controls), pool.clone(), config).unwrap();
    Rig { controls, pool, engine }
}

impl Rig {
    pub(crate) fn submit(&self, job: Job) -> JobHandle {
        self.engine.submit(job).unwrap()
    }

    /// Runs a job to its end; whatever was dropped before has then been noticed.
    pub(crate) fn ask(&self, job: Job) -> Answer {
        answer(&mut self.submit(job))
    }

    pub(crate) fn check_blocks_are_back(&self) {
        let stats = self.pool.stats();
        assert_eq!((stats.used, stats.free + stats.cached), (0, stats.total));
    }
}
