//! How fast the engine prefills and decodes on this machine.
//!
//! `TOWLINE_MODEL=model.gguf cargo bench -p towline-worker --bench engine -- [--threads N] [--level
//! scalar|avx2|avx512] [--decode CONTEXT]`
//!
//! Prints one JSON object a line: prefill at 128 and 512 tokens, decode at contexts of 128, 512 and 2048, each as the
//! median and the best of several runs, so that a busy neighbour shows as a gap between the two. The contexts of decode
//! take turns, and `decode ratio` compares neighbours in time: the median, and the quartiles beside it. Without
//! `TOWLINE_MODEL` it says so and does nothing. `--decode` runs only that context's decode, long enough for a profiler.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints its results and may fail loudly"
)]

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use towline_fabric::Memory;
use towline_worker::kernel::Level;
use towline_worker::model::{KvCache, LoadOptions, Model, Sequence};
use towline_worker::sample::greedy;

const BLOCK_TOKENS: u32 = 16;
const CONTEXT: u32 = 2304;

fn main() {
    let Some(path) = std::env::var_os("TOWLINE_MODEL") else {
        println!("{}", serde_json::json!({"bench": "engine", "skipped": "TOWLINE_MODEL is not set"}));
        return;
    };
    let argument = |name: &str| {
        let mut arguments = std::env::args().skip_while(|argument| argument != name);
        arguments.nth(1)
    };
    let threads = argument("--threads").and_then(|threads| threads.parse().ok()).unwrap_or(2);
    let level = match argument("--level").as_deref() {
        Some("scalar") => Level::Scalar,
        Some("avx2") => Level::Avx2,
        Some("avx512") => Level::Avx512,
        _ => Level::best(),
    };
    let start = Instant::now();
    let options = LoadOptions { threads, level: Some(level), ..LoadOptions::default() };
    let mut bench = Bench::load(Path::new(&path), &options);
    let machine = format!("{threads} threads, {level:?}");
    println!(
        "{}",
        serde_json::json!({"bench": "load", "machine": machine, "seconds": start.elapsed().as_secs_f64()})
    );
    let only: Option<usize> = argument("--decode").and_then(|context| context.parse().ok());
    for (tokens, runs) in [(128, 9), (512, 5)] {
        if only.is_some() {
            break;
        }
        let times = (0..runs).map(|_| bench.prefill(tokens)).collect();
        report("prefill", &machine, tokens, tokens, times);
    }
    let (contexts, rounds) = only.map_or((vec![128, 512, 2048], 25), |context| (vec![context], 50));
    for start in (0..*contexts.last().unwrap()).step_by(128) {
        bench.run(start, 128);
    }
    let mut times = vec![Vec::new(); contexts.len()];
    for _ in 0..rounds {
        for (context, times) in contexts.iter().zip(&mut times) {
            times.push(bench.decode(*context, 8));
        }
    }
    for (context, of) in contexts.iter().zip(&times).skip(1) {
        let mut ratios: Vec<f64> = times[0].iter().zip(of).map(|(first, other)| first / other).collect();
        ratios.sort_by(f64::total_cmp);
        let [low, median, high] =
            [1, 2, 3].map(|quarter| (ratios[ratios.len() * quarter / 4] * 1000.0).round() / 1000.0);
        println!(
            "{}",
            serde_json::json!({"bench": "decode ratio", "machine": machine, "context_tokens": context,
                "against": contexts[0], "ratio": median, "quartiles": [low, high]})
        );
    }
    for (context, times) in contexts.into_iter().zip(times) {
        report("decode", &machine, context, 8, times);
    }
}

fn report(what: &str, machine: &str, context: usize, tokens: usize, mut seconds: Vec<f64>) {
    seconds.sort_by(f64::total_cmp);
    let rate = |seconds: f64| (tokens as f64 / seconds * 10.0).round() / 10.0;
    let line = serde_json::json!({
        "bench": what, "machine": machine, "context_tokens": context,
        "tokens_per_s": rate(seconds[seconds.len() / 2]), "tokens_per_s_best": rate(seconds[0]),
    });
    println!("{line}");
}

struct Bench {
    model: Model,
    cache: KvCache,
    blocks: Vec<u32>,
}

impl Bench {
    fn load(path: &Path, options: &LoadOptions<'_>) -> Self {
        let model = Model::load(path, options).unwrap();
        let layout = model.layout(BLOCK_TOKENS);
        let blocks: Vec<u32> = (0..CONTEXT / BLOCK_TOKENS).rev().collect();
        let memory = Memory::allocate("bench", layout.groups[0].block_bytes() * blocks.len() as u64).unwrap();
        let cache = KvCache::new(Arc::new(memory), &layout).unwrap();
        Self { model, cache, blocks }
    }

    /// Runs `count` tokens from `position`; returns the likeliest next one.
    fn run(&mut self, position: usize, count: usize) -> u32 {
        let tokens: Vec<u32> =
            (0..count).map(|i| u32::try_from(1000 + (position + i) * 7919 % 40_000).unwrap()).collect();
        let sequence = Sequence { tokens: &tokens, position, blocks: &self.blocks, want_logits: true };
        let logits = self.model.forward(&self.cache, &[sequence]).unwrap().pop().flatten().unwrap();
        greedy(&logits.0).unwrap().0
    }

    fn prefill(&mut self, count: usize) -> f64 {
        let start = Instant::now();
        self.run(0, count);
        start.elapsed().as_secs_f64()
    }

    fn decode(&mut self, context: usize, count: usize) -> f64 {
        let start = Instant::now();
        let mut token = 1;
        for position in context..context + count {
            let sequence = Sequence { tokens: &[token], position, blocks: &self.blocks, want_logits: true };
            let logits = self.model.forward(&self.cache, &[sequence]).unwrap().pop().flatten().unwrap();
            token = greedy(&logits.0).unwrap().0;
        }
        start.elapsed().as_secs_f64()
    }
}
