#!/usr/bin/env bash
# Coverage-guided fuzzing of every decoder, each for SECONDS (60): cargo-fuzz, on nightly. What CI runs is the stable form of the
# same harnesses, `cargo test -p towline-wire --test it fuzz`; this looks further.
# usage: scripts/fuzz.sh [SECONDS [TARGET...]]
set -euo pipefail
cd "$(dirname "$0")/../crates/towline-wire"
seconds="${1:-60}"
shift || true
if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
  echo "fuzz: cargo-fuzz or the nightly toolchain is missing. To install them:" >&2
  echo "  rustup toolchain install nightly && cargo install cargo-fuzz" >&2
  echo "Without them: cargo test -p towline-wire --test it fuzz" >&2
  exit 1
fi
# Sealed messages can't be found by chance: valid encodings are where it starts.
TOWLINE_FUZZ_CORPUS="$PWD/fuzz/corpus" cargo test --quiet --locked -p towline-wire --test it seeds_are_written >/dev/null
if [ $# -eq 0 ]; then
  read -r -d '' -a targets < <(cargo +nightly fuzz list && printf '\0')
else
  targets=("$@")
fi
for target in "${targets[@]}"; do
  echo "== $target, $seconds s"
  cargo +nightly fuzz run "$target" -- -max_total_time="$seconds" -max_len=65536
done
