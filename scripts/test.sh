#!/usr/bin/env bash
# The whole test suite, with its own set-up: scripts/test.sh [options of pytest]
# ADAPTRA_TEST_NEWEST=0 leaves out the second megatron-core line (Python 3.12, a download of 3 GB).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
venv=${ADAPTRA_VENV:-$PWD/.venv}
make_venv "$venv" demo,dev
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1

echo "== style, types, layers"
ruff check .
ruff format --check .
mypy
lint-imports

if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi

echo "== tests"
python -m pytest -n 2 -m "not slow"
echo "== tests that train a model in several processes ($(python -c 'from importlib.metadata import version; print("megatron-core", version("megatron-core"))'))"
python -m pytest -m slow

# The newest megatron-core needs Python 3.12; its torch brings CUDA libraries, which go unused.
if [ "${ADAPTRA_TEST_NEWEST:-1}" = 1 ]; then
  newest=""
  for candidate in python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python; do
    if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      newest=$candidate
      break
    fi
  done
  if [ -n "$newest" ]; then
    echo "== the newest megatron-core, with Megatron's own training program ($("$newest" --version))"
    make_venv "$venv-newest" demo,dev "$newest"
    ADAPTRA_LAYOUTS=pp4 "$venv-newest/bin/python" -m pytest tests/adapter/test_schedules.py \
      tests/adapter/test_pretrain.py tests/adapter/test_executor_training.py \
      tests/adapter/test_iteration_end.py \
      tests/adapter/test_step_operations.py \
      tests/launch/test_models.py \
      tests/adapter/test_demo.py tests/adapter/test_seams.py
  else
    echo "adaptra: no Python 3.12 here: the newest megatron-core line was NOT tested" >&2
  fi
fi
