#!/usr/bin/env bash
# Prints where cargo builds: target/, unless the user's configuration says otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo metadata --format-version 1 --no-deps --locked |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])'
