#!/usr/bin/env bash
# What tests can't show by running once: every interleaving, undefined behaviour, data races.
#
#   loom     the fabric's queues in every interleaving of a few threads (crates/towline-fabric/loom)
#   miri     what has no files and sockets: the wire, the fabric's pure parts and streamed copy; on nightly
#   thread   the fabric's tests over both transports, under ThreadSanitizer; on nightly
#
# usage: scripts/sanitize.sh [loom [WORD] | miri | thread]; all three without arguments
set -euo pipefail
cd "$(dirname "$0")/.."
# Builds of their own, with other flags than everybody's: beside those, never instead of them.
target="$(scripts/target_dir.sh)/sanitize"

# need WHAT TEST...: ends with what to install, unless the test succeeds.
need() {
  local what="$1"
  shift
  if "$@" >/dev/null 2>&1; then return; fi
  echo "sanitize: $what is missing. To install it:" >&2
  echo "  rustup toolchain install nightly --component miri,rust-src" >&2
  exit 1
}
has_source() { [ -d "$(rustc +nightly --print sysroot)/lib/rustlib/src/rust/library" ]; }

loom() {
  echo "== every interleaving of the fabric's queues (loom)"
  RUSTFLAGS="-D warnings" cargo run --quiet --locked --target-dir "$target/loom" \
    --manifest-path crates/towline-fabric/loom/Cargo.toml -- "$@"
}

# Hundreds of times slower than running: a few seeds and inputs, so that every line is run once, not every case.
miri() {
  need "Miri, on nightly," cargo +nightly miri --version
  echo "== undefined behaviour (Miri): towline-wire"
  export MIRIFLAGS="-Zmiri-disable-isolation" # environment and clock
  cargo_miri() { cargo +nightly miri test --quiet --locked --target-dir "$target/miri" "$@"; }
  export TOWLINE_SEEDS=2 TOWLINE_INPUTS=8 PROPTEST_CASES=2
  cargo_miri -p towline-wire --lib
  cargo_miri -p towline-wire --test it -- fuzz:: simulation::every
  echo "== undefined behaviour, 16 schedules (Miri): towline-fabric"
  MIRIFLAGS="$MIRIFLAGS -Zmiri-many-seeds=0..16" cargo_miri -p towline-fabric --lib -- \
    pending:: agent::plan:: io::mailbox:: io::timers:: streamed_piece
}

thread() {
  need "the nightly toolchain's source" has_source
  local host
  host="$(rustc +nightly -vV | sed -n 's/^host: //p')"
  echo "== data races in the fabric's tests (ThreadSanitizer)"
  # The standard library is built along, or its locks would be races; rustix goes through libc, or a mapping that comes
  # where another was would be taken for the old one.
  # A panic on purpose must not spend its test's patience on a backtrace. UCX, which is not instrumented and writes over the code
  # of memory functions, crashes under the sanitizer: no such file, no UCX.
  TOWLINE_UCX_LIBRARY=/none RUST_BACKTRACE=0 TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.supp" RUSTFLAGS="-Zsanitizer=thread --cfg rustix_use_libc" \
    cargo +nightly test --quiet --locked --target-dir "$target/thread" -Zbuild-std --target "$host" -p towline-fabric --test it -- \
    conformance:: drain:: streams:: --skip posting_returns_at_once
}

if [ $# -eq 0 ]; then
  loom
  miri
  thread
else
  case "$1" in
    loom | miri | thread) "$@" ;;
    *) sed -n '/^# usage/s/^# //p' "$0" >&2 && exit 2 ;;
  esac
fi
