//! The same answer, whatever else the engine does: a tiny real model against itself under other conditions.
#![allow(clippy::unwrap_used, reason = "tests; clippy exempts only the functions that are marked so")]

use towline_worker::engine::{Engine, EngineConfig, FinishReason, FinishedKv, Job, Start};
use towline_worker::pool::{BlockOrder, Blocks, KvPool, PoolConfig, PrefixCache};
use towline_worker::sample::SamplingParams;

use crate::engine_rig::{answer, job, model, pool};

const BLOCK_TOKENS: u32 = 16;
const ANSWER: u32 = 24;

/// What may not change an answer.
#[derive(Clone, Debug)]
struct Setup {
    threads: usize,
    blocks: u32,
    prefix_cache: PrefixCache,
    order: BlockOrder,
    config: EngineConfig,
}

/// One at a time, nothing shared, memory abounds.
fn alone() -> Setup {
    Setup {
        threads: 1,
        blocks: 128,
        prefix_cache: PrefixCache::Off,
        order: BlockOrder::Sequential,
        config: EngineConfig { step_tokens: 512, batch_max: 1, queue_max: 64 },
    }
}

fn start(setup: &Setup) -> (Engine, KvPool) {
    let model = model(setup.threads);
    let config =
        PoolConfig { prefix_cache: setup.prefix_cache, order: setup.order, fingerprint: "tiny".into() };
    let pool = pool(&model.layout(BLOCK_TOKENS), setup.blocks, config);
    (Engine::start(model, pool.clone(), setup.config).unwrap(), pool)
}

/// Prompts of several lengths; half of them share a long beginning. Half are sampled.
fn jobs() -> Vec<Job> {
    let prompt = |seed: u32, len: u32| -> Vec<u32> {
        (0..len).map(|at| 3 + (if at < 70 { at * 13 } else { at * 29 + seed * 17 }) % 250).collect()
    };
    (0..8)
        .map(|index| {
            let tokens =
                if index % 2 == 0 { prompt(index, 90 + index * 5) } else { prompt(index, 3 + index * 9) };
            let temperature = if index < 4 { 0.0 } else { 0.9 };
            let sampling = SamplingParams { temperature, top_p: 0.95, seed: u64::from(index) };
            Job { sampling, ignore_eos: true, logprobs: true, ..job(&tokens, ANSWER) }
        })
        .collect()
}

type Said = (Vec<u32>, String, Vec<Option<f32>>);

fn answers(engine: &Engine) -> Vec<Said> {
    let mut handles: Vec<_> = jobs().into_iter().map(|job| engine.submit(job).unwrap()).collect();
    handles.iter_mut().map(answer).map(|answer| (answer.tokens, answer.text, answer.logprobs)).collect()
}

fn check(setup: &Setup) -> Engine {
    let (reference, _) = start(&alone());
    let expected = answers(&reference);
    assert!(expected.iter().all(|(tokens, ..)| tokens.len() == ANSWER as usize));
    let (engine, pool) = start(setup);
    for round in 0..2 {
        assert!(answers(&engine) == expected, "round {round} of {setup:?} gives another answer");
    }
    assert_eq!(pool.stats().used, 0);
    engine
}

#[test]
fn a_batch_gives_the_answers_of_single_requests() {
    let config = EngineConfig { batch_max: 8, ..alone().config };
    check(&Setup { config, ..alone() });
}

#[test]
fn threads_do_not_change_answers() {
    let config = EngineConfig { batch_max: 4, ..alone().config };
    check(&Setup { threads: 3, config, ..alone() });
}

#[test]
fn small_chunks_do_not_change_answers() {
    for step_tokens in [9, 37] {
        check(&Setup { config: EngineConfig { step_tokens, batch_max: 8, queue_max: 64 }, ..alone() });
    }
}

#[test]
fn the_prefix_cache_does_not_change_answers_and_is_used() {
    let config = EngineConfig { batch_max: 8, ..alone().config };
    let engine = check(&Setup { prefix_cache: PrefixCache::On, config, ..alone() });
    assert!(engine.stats().prompt_tokens_cached > 0, "{:?}", engine.stats());
}

#[test]
fn shuffled_blocks_do_not_change_answers() {
    let config = EngineConfig { batch_max: 8, ..alone().config };
    check(&Setup { order: BlockOrder::Shuffled(7), prefix_cache: PrefixCache::On, config, ..alone() });
}

#[test]
fn preemption_and_eviction_do_not_change_answers() {
    // The longest job needs 10 blocks: 20 are far too few for all.
    let config = EngineConfig { batch_max: 8, step_tokens: 64, queue_max: 64 };
    let setup = Setup {
        blocks: 20,
        order: BlockOrder::Shuffled(3),
        prefix_cache: PrefixCache::On,
        config,
        ..alone()
    };
    check(&setup);
}

/// The full blocks of `kv` before the prompt's last token, copied as a transfer would.
fn pulled(kv: &FinishedKv, prompt: usize, into: &KvPool) -> Blocks {
    let count = (prompt - 1) / into.block_tokens();
    let reservation = into.reserve(&[], count).unwrap();
    let bytes = into.cache().block_bytes();
    for (from, to) in kv.blocks.ids().iter().zip(reservation.blocks.ids()) {
        let source = kv.blocks.pool().memory();
        into.cache()
            .memory()
            .copy_from(u64::from(*to) * bytes, source, u64::from(*from) * bytes, bytes)
            .unwrap();
    }
    reservation.blocks
}

#[test]
fn a_handed_over_prompt_continues_as_if_it_had_been_computed_here() {
    let (reference, _) = start(&alone());
    let (prefill, _) = start(&Setup { prefix_cache: PrefixCache::On, ..alone() });
    let (decode, pool) = start(&Setup { order: BlockOrder::Shuffled(5), ..alone() });
    let block = BLOCK_TOKENS as usize;
    for (whole, (first, second)) in jobs().into_iter().zip(jobs().into_iter().zip(jobs())) {
        let expected = answer(&mut reference.submit(whole).unwrap());
        let first = answer(&mut prefill.submit(Job { max_tokens: 1, keep_kv: true, ..first }).unwrap());
        let kv = first.finished.kv.unwrap();
        let prompt = second.prompt.len();
        assert_eq!((first.tokens[0], kv.tokens), (expected.tokens[0], prompt));
        assert_eq!(kv.blocks.len(), prompt.div_ceil(block));
        let tokens = (prompt - 1) / block * block;
        let start = Start::Loaded { blocks: pulled(&kv, prompt, &pool), tokens };
        let second = answer(&mut decode.submit(Job { start, ..second }).unwrap());
        assert_eq!((second.tokens, second.text), (expected.tokens, expected.text));
        let finished = second.finished;
        assert_eq!(
            (finished.cached_prompt_tokens, finished.computed_prompt_tokens),
            (tokens, prompt - tokens)
        );
        assert!(finished.computed_prompt_tokens <= block, "more than the last block was computed again");
        assert_eq!(finished.reason, FinishReason::Length);
    }
    assert_eq!(pool.stats().used, 0);
}
