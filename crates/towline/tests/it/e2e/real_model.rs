//! The one job with the real model, when there is one: `TOWLINE_MODEL` names it (`make test` fetches it if it can).

use serde_json::Value;
use tempfile::TempDir;

use super::fixture::answer;
use crate::process::{finish, towline};

const QUESTION: &str = "Name the capital city of France.";

/// The model, or a line in the list of skipped checks that `make test` prints at its end.
fn model(check: &str) -> Option<String> {
    let model = std::env::var("TOWLINE_MODEL").ok().filter(|model| !model.is_empty());
    if model.is_none() {
        crate::skips::note(check, "no model: TOWLINE_MODEL is not set");
    }
    model
}

fn ask(model: &str, args: &[&str]) -> Value {
    let folder = TempDir::new().unwrap();
    let mut command = towline(&[], folder.path());
    command.args(["up", "--model", model, "--prompt", QUESTION, "--max-tokens", "24", "--format", "json"]);
    command.args(["--listen", "127.0.0.1:0"]).args(args);
    answer(&finish(command))
}

#[test]
fn real_model_knows_the_capital_over_every_path() {
    let Some(model) = model("real model end to end") else { return };
    let alone = ask(&model, &["--aggregated"]);
    assert!(alone["text"].as_str().unwrap().contains("Paris"), "{alone}");
    for transport in ["shm", "tcp"] {
        let pair = ask(&model, &["--transport", transport]);
        assert_eq!(pair["token_ids"], alone["token_ids"], "{transport}");
        assert_eq!(pair["receipt"]["transport"], transport);
        assert!(pair["prompt_tokens_computed"]["decode"].as_u64().unwrap() <= 16, "{pair}");
    }
}
