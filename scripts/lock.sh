#!/usr/bin/env bash
# Writes the hashed locks from pyproject.toml. No lock names a package index.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
command -v uv >/dev/null && uv=uv
flags=(--quiet --universal --generate-hashes --python-version 3.12 --no-header)
"$uv" pip compile "${flags[@]}" pyproject.toml --extra operator -o requirements/operator.txt
"$uv" pip compile "${flags[@]}" pyproject.toml --extra trainer -o requirements/trainer.txt
"$uv" pip compile "${flags[@]}" pyproject.toml --extra trainer --extra tpu \
  -o requirements/trainer-tpu.txt
"$uv" pip compile "${flags[@]}" pyproject.toml --extra operator --extra trainer --extra plot \
  --group dev -o requirements/dev.txt
"$uv" pip compile "${flags[@]}" --group image -o requirements/image.txt
