#!/usr/bin/env bash
# What to run first on a machine with GPUs: six parts, a verdict each. See --help.
# ADAPTRA_PYTHON names a python with torch and megatron-core, used as it is; else .venv is set up.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
python=${ADAPTRA_PYTHON:-}
if [ -z "$python" ]; then
  venv=${ADAPTRA_VENV:-$PWD/.venv}
  make_venv "$venv" demo
  python=$venv/bin/python
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" benchmarks/gpu_check "$@"
