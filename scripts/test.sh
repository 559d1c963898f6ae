#!/usr/bin/env bash
# Everything that CI checks, in the order in which it fails soonest, and a table of what could not be checked here.
#
# A check that can't run on this machine (no network for the model, no cargo-deny) appends "check<TAB>reason" to the
# file named by TOWLINE_SKIPS; so do the tests themselves. With CI=true a skipped check of MANDATORY fails the run:
# nothing is taken for checked that was not.
set -euo pipefail
cd "$(dirname "$0")/.."

# Checks that CI may not skip.
MANDATORY=("real model end to end" "official OpenAI client")

TOWLINE_SKIPS="$(mktemp)"
export TOWLINE_SKIPS
failed=()

group() { if [ -n "${GITHUB_ACTIONS:-}" ]; then echo "::group::$1"; else printf '\n== %s\n' "$1"; fi; }
endgroup() { if [ -n "${GITHUB_ACTIONS:-}" ]; then echo "::endgroup::"; fi; }
skip() { printf '%s\t%s\n' "$1" "$2" >>"$TOWLINE_SKIPS"; }

# run NAME COMMAND...: a step; the ones after it run even if it fails, so that one run tells all.
run() {
  local name="$1" began=$SECONDS
  shift
  group "$name"
  if "$@"; then
    echo "ok: $name ($((SECONDS - began)) s)"
  else
    failed+=("$name")
    echo "FAILED: $name ($((SECONDS - began)) s)"
  fi
  endgroup
}

# The closing lines, whatever happened: what was skipped, what failed, and the exit code.
finish() {
  printf '\n== skipped\n'
  if [ -s "$TOWLINE_SKIPS" ]; then
    sort -u "$TOWLINE_SKIPS" | awk -F '\t' '{printf "  %-28s %s\n", $1, $2}'
  else
    echo "  nothing"
  fi
  if [ "${CI:-}" = "true" ]; then
    for check in "${MANDATORY[@]}"; do
      if cut -f 1 "$TOWLINE_SKIPS" | grep -qxF "$check"; then
        failed+=("$check (mandatory in CI, skipped)")
      fi
    done
  fi
  rm -f "$TOWLINE_SKIPS"
  if [ -n "${runner_line:-}" ]; then
    printf '\n%s\n' "$runner_line"
  fi
  if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
  fi
  echo "all checks passed (${SECONDS} s)"
}

fetch_model() {
  if TOWLINE_MODEL="$(python3 scripts/fetch_model.py)"; then
    export TOWLINE_MODEL
  else
    unset TOWLINE_MODEL # the tests that need it say that they were skipped
    echo "no model: the checks with the real model will be skipped"
  fi
}

# The tests, with their runner's closing line kept for the end.
tests() {
  local log status=0
  log="$(mktemp)"
  if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --locked --workspace --all-features --no-fail-fast 2>&1 | tee "$log" || status=1
    runner_line="$(grep -E '^ *Summary' "$log" | tail -n 1 | sed 's/^ *//' || true)"
    cargo test --locked --workspace --all-features --doc || status=1 # nextest runs none of these
  else
    cargo test --locked --workspace --all-features --no-fail-fast 2>&1 | tee "$log" || status=1
    runner_line="$(grep -E '^test result:' "$log" | awk '{p += $4; f += $6} END {printf "tests: %d passed, %d failed", p, f}' || true)"
  fi
  rm -f "$log"
  return $status
}

docs() { RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --all-features; }
python_files() { git ls-files --cached --others --exclude-standard '*.py'; }
python_checks() {
  python_files | xargs -r python3 scripts/check_python.py && python3 -m doctest scripts/bench_peers.py
}

# What may enter the tree, and what is known against what has. The second asks a database on GitHub.
dependencies() {
  if ! cargo deny --version >/dev/null 2>&1; then
    skip "dependencies (cargo deny)" "cargo-deny is not installed: cargo install cargo-deny"
    return
  fi
  run "dependencies (cargo deny)" cargo deny --locked check bans licenses sources
  if cargo deny --locked fetch db >/dev/null 2>&1; then
    run "advisories (cargo deny)" cargo deny --locked --offline check advisories
  else
    skip "advisories (cargo deny)" "the advisory database can't be fetched"
  fi
}

group "model"
fetch_model
endgroup
run "lint" scripts/lint.sh
run "python" python_checks
run "tests" tests
run "interleavings (loom)" scripts/sanitize.sh loom
skip "Miri, ThreadSanitizer" "minutes each, and on nightly: make sanitize"
run "documentation" docs
dependencies
run "release build" cargo build --release --locked -p towline
run "official OpenAI client" scripts/openai_client.sh
finish
