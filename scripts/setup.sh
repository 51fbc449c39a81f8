#!/usr/bin/env bash
# Makes .venv from the hashed locks. Run by `make setup`; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
missing() {
  printf 'error: %s is missing. Install it with:\n    %s\n' "$1" "$2" >&2
  exit 1
}

command -v git >/dev/null || missing "git" "apt-get install -y git"
if ldd --version 2>&1 | grep -qi musl; then
  missing "the GNU C library (this is a musl system, and jaxlib has no wheels for it)" \
    "use a Debian, Ubuntu or Fedora machine or image"
fi

python=""
for candidate in python3.12 python3.13 python3; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    python=$candidate
    break
  fi
done

if [[ ! -x .venv/bin/python ]]; then
  say "creating .venv"
  if command -v uv >/dev/null; then
    uv venv --quiet --python 3.12 .venv
  else
    [[ -n $python ]] || missing "Python 3.12 or newer" "apt-get install -y python3.12 python3.12-venv   (or: pyenv install 3.12)"
    "$python" -m venv .venv 2>/dev/null ||
      missing "Python's venv module" "apt-get install -y python3-venv"
  fi
fi

if command -v uv >/dev/null; then
  uv=uv
else
  if [[ ! -x .venv/bin/uv ]]; then
    say "installing uv into .venv"
    .venv/bin/python -m pip install --quiet --require-hashes -r requirements/uv.txt
  fi
  uv=.venv/bin/uv
fi

say "installing the locked packages (about 1.2 GB the first time)"
"$uv" pip install --quiet --python .venv/bin/python --require-hashes -r requirements/dev.txt
"$uv" pip install --quiet --python .venv/bin/python --no-deps --editable .
touch .venv/.installed
say "ready: .venv/bin/ling, .venv/bin/ling-train, .venv/bin/ling-operator"
