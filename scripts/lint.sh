#!/usr/bin/env bash
# Formatting and clippy over everything, warnings as errors. scripts/test.sh runs it first: it fails soonest.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "lint: cargo fmt --check"
cargo fmt --all -- --check
echo "lint: cargo clippy"
cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
