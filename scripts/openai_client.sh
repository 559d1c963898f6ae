#!/usr/bin/env bash
# The official OpenAI Python client against `towline up` with the real model: the release binary, as users run it.
#
# The client is installed into target/openai-client, once. Without the model or without a way to install the client
# the check is skipped, and says so in TOWLINE_SKIPS.
set -euo pipefail
cd "$(dirname "$0")/.."

check="official OpenAI client"
skip() {
  echo "skipped: $check: $1"
  if [ -n "${TOWLINE_SKIPS:-}" ]; then printf '%s\t%s\n' "$check" "$1" >>"$TOWLINE_SKIPS"; fi
  exit 0
}

if [ -z "${TOWLINE_MODEL:-}" ]; then skip "no model: TOWLINE_MODEL is not set"; fi
target="$(scripts/target_dir.sh)"
venv="$target/openai-client"
if ! "$venv/bin/python" -c 'import openai' >/dev/null 2>&1; then
  rm -rf "$venv"
  python3 -m venv "$venv" || skip "python3 has no working venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'openai>=1,<4' || skip "pip could not install openai"
fi
exec "$venv/bin/python" tests/openai_client/check.py "$target/release/towline" "$TOWLINE_MODEL"
