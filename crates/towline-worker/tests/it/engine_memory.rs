//! The engine and its blocks: prefixes found again, memory that runs short, KV that others load or keep.
#![allow(clippy::unwrap_used, reason = "tests; clippy exempts only the functions that are marked so")]

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use towline_worker::engine::{Engine, Job, Start};
use towline_worker::pool::{BlockOrder, PoolConfig};

use crate::engine_rig::{BLOCK, Controls, Fake, Rig, answer, config, expected, job, prompt, rig, small_pool};

#[test]
fn a_known_prompt_is_computed_from_its_last_full_block() {
    let rig = rig(64, config(4));
    let whole = prompt(1, 8 * BLOCK);
    rig.ask(job(&whole, 1));
    let again = rig.ask(job(&whole, 5));
    assert_eq!(again.tokens, expected(&whole, 5));
    // The last token is always computed, and with it its block.
    assert_eq!(
        (again.finished.cached_prompt_tokens, again.finished.computed_prompt_tokens),
        (7 * BLOCK, BLOCK)
    );

    // Generated blocks are found too, by a conversation that goes on.
    let mut longer = [whole.clone(), again.tokens].concat();
    longer.extend([40, 41, 42]);
    let next = rig.ask(job(&longer, 5));
    assert_eq!(next.tokens, expected(&longer, 5));
    assert_eq!(next.finished.cached_prompt_tokens, 9 * BLOCK);

    let other_tenant = rig.ask(Job { salt: "other".into(), ..job(&whole, 5) });
    assert_eq!(other_tenant.finished.cached_prompt_tokens, 0);
}

#[test]
fn kept_kv_is_the_prompts_and_lives_as_long_as_it_is_held() {
    let rig = rig(64, config(2));
    let prompt = prompt(1, 2 * BLOCK + 1);
    let finished = rig.ask(Job { keep_kv: true, ..job(&prompt, 6) }).finished;
    let kv = finished.kv.unwrap();
    assert_eq!((kv.blocks.len(), kv.tokens, kv.full_blocks(), rig.pool.stats().used), (3, 9, 2, 3));
    let digests = kv.digests();
    assert!(digests.len() == 2 && digests.iter().all(Option::is_some) && digests[0] != digests[1]);
    assert_eq!(kv.digest(2), None, "the last block isn't full");
    let cache = rig.pool.cache();
    let mut token = [0; 4];
    cache.memory().read_into(u64::from(kv.blocks.ids()[1]) * cache.block_bytes(), &mut token).unwrap();
    assert_eq!(u32::from_le_bytes(token), prompt[BLOCK]);
    drop(kv);
    rig.check_blocks_are_back();
}

#[test]
fn too_little_memory_delays_answers_but_does_not_change_them() {
    let rig = rig(12, config(4));
    rig.controls.allow(0);
    let mut handles: Vec<_> = (0..6).map(|seed| rig.submit(job(&prompt(seed, 4), 30))).collect();
    rig.controls.open();
    for (seed, handle) in (0..).zip(&mut handles) {
        assert_eq!(answer(handle).tokens, expected(&prompt(seed, 4), 30), "job {seed}");
    }
    assert!(rig.engine.stats().preemptions > 0, "{:?}", rig.engine.stats());
    rig.check_blocks_are_back();
}

#[test]
fn a_job_waits_for_blocks_that_others_hold_and_wakes_up() {
    let rig = rig(8, config(4));
    let lent = rig.pool.reserve(&[], 7).unwrap();
    let mut handle = rig.submit(job(&prompt(1, 6), 10));
    assert!(handle.wait(Duration::from_millis(50)).is_err());
    assert_eq!((rig.engine.stats().waiting, rig.engine.stats().steps), (1, 0));
    drop(lent);
    assert_eq!(answer(&mut handle).tokens, expected(&prompt(1, 6), 10));
}

#[test]
fn requests_that_wait_for_each_others_loaded_blocks_still_run() {
    let rig = rig(7, config(4));
    let lent = rig.pool.reserve(&[], 3).unwrap();
    // Together they hold all the rest, and each lacks one block more.
    let loaded = [1, 2].map(|seed| load(&rig, &prompt(seed, 2 * BLOCK + 1), 2));
    let mut handles = loaded.map(|job| rig.submit(job));
    let [first, second] = handles.each_mut().map(answer);
    assert_eq!((first.tokens, second.tokens), (expected(&prompt(1, 9), 4), expected(&prompt(2, 9), 4)));
    // The older one kept what it had loaded; the younger one was computed here.
    let found = [first.finished, second.finished].map(|finished| finished.cached_prompt_tokens);
    assert_eq!(found, [2 * BLOCK, 0]);
    drop(lent);
    rig.check_blocks_are_back();
}

/// A job with the first `count` blocks of its prompt loaded, as a transfer would leave them.
fn load(rig: &Rig, prompt: &[u32], count: usize) -> Job {
    let blocks = rig.pool.reserve(&[], count).unwrap().blocks;
    let cache = rig.pool.cache();
    for (at, token) in (0..).zip(&prompt[..count * BLOCK]) {
        let block = u64::from(blocks.ids()[at / BLOCK]);
        let offset = block * cache.block_bytes() + 4 * (at % BLOCK) as u64;
        cache.memory().write_from(offset, &token.to_le_bytes()).unwrap();
    }
    Job { start: Start::Loaded { blocks, tokens: count * BLOCK }, ..job(prompt, 4) }
}

#[test]
fn what_was_computed_on_unverified_blocks_is_not_shared() {
    for verified in [false, true] {
        let rig = rig(64, config(4));
        let prompt = prompt(1, 3 * BLOCK + 1);
        let keys = rig.pool.hasher("").keys(&prompt, BLOCK);
        let job = load(&rig, &prompt, 2);
        if let (true, Start::Loaded { blocks, .. }) = (verified, &job.start) {
            blocks.ids().iter().zip(&keys).for_each(|(id, key)| rig.pool.publish(*id, *key, None));
        }
        let said = rig.ask(job);
        assert_eq!((said.tokens, said.finished.cached_prompt_tokens), (expected(&prompt, 4), 2 * BLOCK));
        let found = rig.pool.reserve(&keys, 3).unwrap().cached;
        assert_eq!(found, if verified { 3 } else { 0 });
    }
}

#[test]
fn a_loaded_prompt_keeps_its_last_token_to_be_computed() {
    let rig = rig(64, config(4));
    let prompt = prompt(1, 2 * BLOCK);
    let said = rig.ask(load(&rig, &prompt, 2));
    assert_eq!((said.tokens, said.finished.cached_prompt_tokens), (expected(&prompt, 4), BLOCK));
    rig.check_blocks_are_back();
}

#[test]
fn random_jobs_under_pressure_are_answered_right() {
    for seed in 0..6 {
        let mut random = StdRng::seed_from_u64(seed);
        let controls = Arc::<Controls>::default();
        let pool = small_pool(40, PoolConfig { order: BlockOrder::Shuffled(seed), ..PoolConfig::default() });
        let engine = Engine::start(Fake::new(&controls), pool.clone(), config(6)).unwrap();
        let rig = Rig { controls, pool, engine };
        let mut kept = Vec::new();
        for _ in 0..60 {
            let prompt = prompt(random.random_range(0..4), random.random_range(1..60));
            let count = random.random_range(1..40);
            let mut handle = rig.submit(job(&prompt, count));
            match random.random_range(0..4) {
                0 => drop(handle),
                1 => assert_eq!(answer(&mut handle).tokens, expected(&prompt, count as usize), "seed {seed}"),
                _ => kept.push((handle, prompt, count as usize)),
            }
        }
        for (mut handle, prompt, count) in kept {
            assert_eq!(answer(&mut handle).tokens, expected(&prompt, count), "seed {seed}");
        }
        rig.ask(job(&prompt(0, 1), 1));
        rig.check_blocks_are_back();
    }
}
