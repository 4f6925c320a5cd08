#!/usr/bin/env bash
# Set up, then every check. Arguments go to pytest: scripts/test.sh tests/unit -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
setup

say "ruff check"
ruff check .
say "ruff format --check"
ruff format --check .
say "mypy --strict"
mypy
say "lint-imports"
lint-imports
say "pytest $*"
# As many files at once as there are processors; -n 0 runs one test after the other.
processors=$(nproc)
workers=$((processors < 8 ? processors : 8))  # a worker takes half a gigabyte and more
python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
