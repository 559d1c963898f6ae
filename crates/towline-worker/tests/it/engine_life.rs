//! The life of jobs: bounds, ends, cancellation, failures, and an engine that sleeps when nothing runs.
#![allow(clippy::unwrap_used, reason = "tests; clippy exempts only the functions that are marked so")]

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use towline_worker::engine::{
    EngineConfig, EngineError, Event, FinishReason, Job, JobHandle, Start, SubmitError,
};
use towline_worker::model::ForwardError;
use towline_worker::pool::PoolConfig;
use towline_worker::sample::SamplingParams;

use crate::engine_rig::{
    CONTEXT, PATIENCE, Rig, answer, config, expected, job, prompt, rig, small_pool, text,
};

fn first_token(handle: &mut JobHandle) {
    assert!(matches!(handle.wait(PATIENCE).unwrap(), Some(Event::Token { .. })));
}

fn failure(handle: &mut JobHandle) -> EngineError {
    loop {
        match handle.wait(PATIENCE).unwrap() {
            Some(Event::Token { .. }) => {}
            Some(Event::Failed(error)) => return error,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_answer_is_the_models_and_counted() {
    let rig = rig(64, config(4));
    let prompt = prompt(1, 30);
    let said = rig.ask(job(&prompt, 10));
    assert_eq!(said.tokens, expected(&prompt, 10));
    assert_eq!(said.text, text(&said.tokens));
    let finished = said.finished;
    assert_eq!((finished.prompt_tokens, finished.completion_tokens), (30, 10));
    assert_eq!((finished.computed_prompt_tokens, finished.cached_prompt_tokens), (30, 0));
    assert_eq!(finished.reason, FinishReason::Length);
    assert!(finished.kv.is_none());
    let stats = rig.engine.stats();
    assert_eq!(
        (stats.prompt_tokens_computed, stats.tokens_generated, stats.running, stats.waiting),
        (30, 10, 0, 0)
    );
    // 30 tokens in steps of 16, the second of which gives the first token.
    assert_eq!(stats.steps, 11);
    rig.check_blocks_are_back();
}

#[test]
fn an_async_reader_is_woken_for_each_event() {
    let rig = rig(64, config(4));
    let mut handle = rig.submit(job(&prompt(1, 5), 20));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let tokens = runtime.block_on(async {
        let mut tokens = Vec::new();
        while let Some(event) = handle.next().await {
            match event {
                Event::Token { id, .. } => tokens.push(id),
                Event::Finished(finished) => assert_eq!(finished.completion_tokens, tokens.len()),
                Event::Failed(error) => panic!("{error}"),
            }
        }
        tokens
    });
    assert_eq!(tokens, expected(&prompt(1, 5), 20));
}

#[test]
fn jobs_that_cannot_run_are_refused_with_the_reason() {
    let rig = rig(8, config(4));
    let refused = |job: Job| rig.engine.submit(job).unwrap_err();
    assert_eq!(refused(job(&[], 1)), SubmitError::EmptyPrompt);
    assert_eq!(refused(job(&[5], 0)), SubmitError::NoTokens);
    let long = prompt(1, CONTEXT);
    assert_eq!(refused(job(&long, 1)), SubmitError::ContextLength { prompt: CONTEXT, max: CONTEXT });
    assert_eq!(refused(job(&[5, 999], 1)), SubmitError::Token { token: 999, vocab: 275 });
    assert_eq!(refused(job(&prompt(1, 30), 4)), SubmitError::PoolTooSmall { needed: 9, total: 8 });
    assert_eq!(
        rig.ask(job(&prompt(1, 30), 3)).tokens.len(),
        3,
        "just fits: the last token's KV is never computed"
    );
    let sampling = SamplingParams { temperature: -1.0, ..SamplingParams::default() };
    assert!(matches!(refused(Job { sampling, ..job(&[5], 1) }), SubmitError::Sampling(_)));

    let loaded = |blocks, tokens| Job { start: Start::Loaded { blocks, tokens }, ..job(&prompt(1, 6), 1) };
    let own = || rig.pool.reserve(&[], 1).unwrap().blocks;
    assert!(matches!(refused(loaded(own(), 7)), SubmitError::Loaded { .. }));
    assert!(matches!(refused(loaded(own(), 5)), SubmitError::Loaded { .. }));
    let foreign = small_pool(4, PoolConfig::default()).reserve(&[], 1).unwrap().blocks;
    assert!(matches!(refused(loaded(foreign, 4)), SubmitError::Loaded { .. }));
    rig.check_blocks_are_back();
}

#[test]
fn the_context_ends_an_answer() {
    let rig = rig(64, config(4));
    let prompt = prompt(1, CONTEXT - 3);
    let said = rig.ask(job(&prompt, 50));
    assert_eq!((said.tokens, said.finished.reason), (expected(&prompt, 3), FinishReason::Length));
}

#[test]
fn a_full_queue_refuses_more() {
    let rig = rig(64, EngineConfig { queue_max: 2, ..config(1) });
    rig.controls.allow(0);
    let mut handles = vec![rig.submit(job(&prompt(0, 5), 2))];
    rig.controls.await_engine();
    handles.extend((1..3).map(|seed| rig.submit(job(&prompt(seed, 5), 2))));
    assert_eq!(rig.engine.submit(job(&prompt(3, 5), 2)).unwrap_err(), SubmitError::Busy { waiting: 2 });
    rig.controls.open();
    for (seed, handle) in (0..).zip(&mut handles) {
        assert_eq!(answer(handle).tokens, expected(&prompt(seed, 5), 2));
    }
}

#[test]
fn a_stop_text_ends_the_answer_before_it() {
    let rig = rig(64, config(4));
    let prompt = prompt(2, 9);
    let all = expected(&prompt, 20);
    let whole = text(&all);
    let stop = whole.get(7..10).unwrap().to_owned();
    let at = whole.find(&stop).unwrap();
    let said = rig.ask(Job { stop: vec!["\u{1}never".into(), stop], ..job(&prompt, 20) });
    assert_eq!((said.text.as_str(), said.finished.reason), (whole.get(..at).unwrap(), FinishReason::Stop));
    assert_eq!(said.tokens, all[..at + 3]);

    // Held back as the beginning of a stop text, then let go with the last token.
    let end = whole.get(18..).unwrap().to_owned() + "\u{1}";
    let said = rig.ask(Job { stop: vec![end], ..job(&prompt, 20) });
    assert_eq!((said.text, said.finished.reason), (whole, FinishReason::Length));
    rig.check_blocks_are_back();
}

#[test]
fn an_end_token_ends_the_answer_unless_ignored() {
    let rig = rig(64, config(4));
    rig.controls.eos_at.store(12, Ordering::Relaxed);
    let prompt = prompt(2, 9);
    let said = rig.ask(job(&prompt, 20));
    assert_eq!((said.tokens.len(), said.finished.completion_tokens), (4, 4), "three tokens and the end");
    assert_eq!((said.text, said.finished.reason), (text(&expected(&prompt, 3)), FinishReason::Stop));
    let on = rig.ask(Job { ignore_eos: true, ..job(&prompt, 20) });
    assert_eq!((on.tokens.len(), on.finished.reason), (20, FinishReason::Length));
}

#[test]
fn equal_seeds_give_equal_answers_in_any_batch() {
    let rig = rig(256, config(8));
    let sampled = |seed| Job {
        sampling: SamplingParams { temperature: 1.0, top_p: 0.95, seed },
        logprobs: true,
        ..job(&prompt(4, 11), 30)
    };
    let alone = rig.ask(sampled(1));
    let mut handles: Vec<_> = [1, 2, 1, 3].map(|seed| rig.submit(sampled(seed))).into();
    let together: Vec<_> = handles.iter_mut().map(answer).collect();
    assert_eq!((&together[0].tokens, &together[2].tokens), (&alone.tokens, &alone.tokens));
    assert!(together[1].tokens != alone.tokens && together[3].tokens != alone.tokens);
    assert!(alone.logprobs.iter().all(|logprob| logprob.is_some_and(|logprob| logprob <= 0.0)));
}

#[test]
fn dropping_the_handle_gives_everything_back() {
    let rig = rig(64, config(2));
    rig.controls.allow(2); // one for each half of the prompt
    let mut running = rig.submit(job(&prompt(1, 20), 100));
    first_token(&mut running);
    let waiting: Vec<_> = (2..6).map(|seed| rig.submit(job(&prompt(seed, 20), 100))).collect();
    rig.controls.await_engine();
    drop((running, waiting));
    rig.controls.open();
    assert_eq!(rig.ask(job(&prompt(9, 5), 2)).tokens, expected(&prompt(9, 5), 2));
    rig.check_blocks_are_back();
    let stats = rig.engine.stats();
    assert_eq!((stats.cancellations, stats.running, stats.waiting), (5, 0, 0));
}

#[test]
fn a_failed_step_fails_its_jobs_alone() {
    let rig = rig(64, config(2));
    rig.controls.allow(1);
    let mut running = rig.submit(job(&prompt(1, 5), 100));
    first_token(&mut running);
    rig.controls.fail.store(true, Ordering::Relaxed);
    rig.controls.open();
    assert_eq!(failure(&mut running), EngineError::Forward(ForwardError::Layout));
    assert_eq!(rig.ask(job(&prompt(1, 5), 9)).tokens, expected(&prompt(1, 5), 9), "the engine goes on");
    assert_eq!(rig.engine.stats().failures, 1);
    rig.check_blocks_are_back();
}

#[test]
fn jobs_hear_of_an_engine_that_dies_or_stops() {
    let dying = rig(64, config(1));
    dying.controls.allow(0);
    let mut jobs = [1, 2].map(|seed| dying.submit(job(&prompt(seed, 5), 100)));
    dying.controls.panic.store(true, Ordering::Relaxed);
    dying.controls.open();
    assert!(jobs.iter_mut().all(|job| failure(job) == EngineError::Stopped));
    dying.engine.shutdown();
    assert_eq!(dying.engine.submit(job(&[5], 1)).unwrap_err(), SubmitError::Stopped);
    dying.check_blocks_are_back();

    let stopping = rig(64, config(1));
    stopping.controls.allow(1);
    let mut jobs = [1, 2].map(|seed| stopping.submit(job(&prompt(seed, 5), 190)));
    first_token(&mut jobs[0]);
    std::thread::scope(|scope| {
        scope.spawn(|| stopping.engine.shutdown());
        while !matches!(stopping.engine.submit(job(&[5], 1)), Err(SubmitError::Stopped)) {
            std::thread::yield_now();
        }
        stopping.controls.open();
    });
    assert!(jobs.iter_mut().all(|job| failure(job) == EngineError::Stopped));
    stopping.check_blocks_are_back();
}

#[test]
fn an_idle_engine_sleeps() {
    let rig = rig(8, config(2));
    rig.ask(job(&prompt(1, 4), 3));
    check_sleeps(&rig);
    // Also while a request waits for memory.
    let _lent = rig.pool.reserve(&[], 8).unwrap();
    let _waiting = rig.submit(job(&prompt(2, 4), 3));
    check_sleeps(&rig);
    assert_eq!(rig.engine.stats().waiting, 1);
}

/// The engine may still be on its way to sleep, but must then sleep through a whole window.
fn check_sleeps(rig: &Rig) {
    let task = rig.controls.task.lock().unwrap().clone();
    let slept = (0..100).any(|_| {
        let before = activity(&task);
        std::thread::park_timeout(Duration::from_millis(100));
        before == activity(&task)
    });
    assert!(slept, "an engine with nothing to do wakes up: {:?}", activity(&task));
}

/// Context switches and CPU ticks of a thread.
fn activity(task: &Path) -> (Vec<String>, Vec<String>) {
    let status = std::fs::read_to_string(task.join("status")).unwrap();
    let stat = std::fs::read_to_string(task.join("stat")).unwrap();
    let switches = status.lines().filter(|line| line.contains("ctxt_switches")).map(str::to_owned).collect();
    // utime and stime: fields 14 and 15, counted from the command's name on (proc(5)).
    let ticks =
        stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2).map(str::to_owned).collect();
    (switches, ticks)
}
