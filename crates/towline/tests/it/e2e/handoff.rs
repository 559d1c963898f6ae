//! The main promise, on real processes: the answer through a handoff is the answer without one, and the handoff is real.

use serde_json::Value;

use super::fixture::Bench;
use crate::process::finish;

const SHORT: &str = "Why is the sky blue?";
const UNICODE: &str = "naïve 北京 🌊🚢 ½ été — 12345";
/// Tokens in a block of the fixture's deployments: the default.
const BLOCK_TOKENS: u64 = 16;

fn long() -> String {
    "The tide lifts every boat in the harbour. ".repeat(12)
}

/// The answer of a prefill and decode pair, checked against its own receipt.
fn through_a_handoff(
    bench: &Bench,
    prompt: &str,
    args: &[&str],
    transport: &str,
    verified_by: &str,
) -> Value {
    let answer = bench.ask(prompt, &[args, &["--transport", transport, "--max-tokens", "12"]].concat());
    let receipt = &answer["receipt"];
    assert_eq!(receipt["transport"], transport, "{answer}");
    assert_eq!(receipt["verified_by"], verified_by, "{answer}");
    let (bytes, blocks) = (receipt["bytes"].as_u64().unwrap(), receipt["blocks"].as_u64().unwrap());
    assert!(blocks > 0 && bytes % blocks == 0, "{bytes} bytes are not {blocks} whole blocks");
    assert!(receipt["lease"].is_u64() && receipt["seconds"].as_f64().unwrap() > 0.0, "{answer}");
    let rate = 1e-9 * f64::from(u32::try_from(bytes).unwrap()) / receipt["seconds"].as_f64().unwrap();
    assert!((receipt["gb_per_s"].as_f64().unwrap() / rate - 1.0).abs() < 0.01, "{answer}");
    let (prefill, decode) = computed(&answer);
    assert!((1..=BLOCK_TOKENS).contains(&decode), "decode computed {decode} prompt tokens itself");
    assert_eq!(blocks, (prefill - 1) / BLOCK_TOKENS, "all full blocks but the last token's travel");
    answer
}

fn computed(answer: &Value) -> (u64, u64) {
    let computed = &answer["prompt_tokens_computed"];
    (computed["prefill"].as_u64().unwrap(), computed["decode"].as_u64().unwrap())
}

fn same_answer(prompt: &str, args: &[&str]) {
    let bench = Bench::new();
    let alone = bench.ask(prompt, &[args, &["--aggregated", "--max-tokens", "12"]].concat());
    assert!(alone["receipt"].is_null(), "{alone}");
    let shm = through_a_handoff(&bench, prompt, args, "shm", "mapping");
    let tcp = through_a_handoff(&bench, prompt, args, "tcp", "socket");
    for other in [&shm, &tcp] {
        assert_eq!(other["token_ids"], alone["token_ids"]);
        assert_eq!(other["text"], alone["text"]);
    }
    assert!(!alone["token_ids"].as_array().unwrap().is_empty());
}

#[test]
fn short_chat_has_the_same_answer_over_every_path() {
    same_answer(SHORT, &[]);
}

#[test]
fn unicode_has_the_same_answer_over_every_path() {
    same_answer(UNICODE, &[]);
}

#[test]
fn long_plain_prompt_has_the_same_answer_over_every_path() {
    same_answer(&long(), &["--raw"]);
}

#[test]
fn answer_does_not_depend_on_prefix_cache_or_threads() {
    let bench = Bench::new();
    let plain = bench.ask(SHORT, &["--max-tokens=12"]);
    let other = bench.ask(SHORT, &["--max-tokens=12", "--prefix-cache=off", "--threads=2", "--digest=off"]);
    assert_eq!(plain["token_ids"], other["token_ids"]);
}

#[test]
fn answer_json_has_exactly_the_promised_fields() {
    let answer = Bench::new().ask(SHORT, &["--max-tokens", "4"]);
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let mut top = keys(&answer);
    top.sort();
    assert_eq!(top, ["itl_ms", "prompt_tokens_computed", "receipt", "text", "token_ids", "ttft_ms"]);
    let mut receipt = keys(&answer["receipt"]);
    receipt.sort();
    assert_eq!(receipt, ["blocks", "bytes", "gb_per_s", "lease", "seconds", "transport", "verified_by"]);
    assert!(answer["ttft_ms"].as_f64().unwrap() > 0.0);
    assert!(answer["token_ids"].as_array().unwrap().len() <= 4);
}

#[test]
fn human_answer_is_the_text_and_a_line_of_receipt() {
    let bench = Bench::new();
    let output = finish(bench.up_command(&["--prompt", SHORT, "--max-tokens", "4"]));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("kv over shm: ") && last.contains("verified by mapping"), "{text}");
}

#[test]
fn prompt_longer_than_the_context_is_a_clear_failure() {
    let bench = Bench::new();
    let endless = "word ".repeat(20_000);
    let output = finish(bench.up_command(&["--prompt", &endless]));
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("400") && said.contains("context"), "{said}");
}
