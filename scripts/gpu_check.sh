#!/usr/bin/env bash
# What to run first on a machine with GPUs: nine parts, a result each, in the folder gpu_check. See --help.
# ADAPTRA_PYTHON names a python with torch and megatron-core, used as it is, but for the engine, which is built in place if need be; else .venv-cuda is set up, or .venv where there is no Python 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
python=${ADAPTRA_PYTHON:-}
if [ -n "$python" ]; then
  build_engine "$python" || exit 2
else
  venv=${ADAPTRA_VENV:-$PWD/.venv}
  # Only the newest megatron-core has Megatron's training program in its wheel.
  if newest=$(find_python 3.12 2>/dev/null); then
    venv=$venv-cuda
    make_venv --cuda "$venv" demo "$newest"
  else
    make_venv "$venv" demo
  fi
  python=$venv/bin/python
fi
export PYTHONPATH=$PWD:$PWD/scripts:$PWD/tests/support:$PWD/tests/train/ranks:$PWD/tests/network${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m gpu_check "$@"
