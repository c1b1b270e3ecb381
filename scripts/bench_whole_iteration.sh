#!/usr/bin/env bash
# Whole iterations over a really slow network, part by part of the plugin. See --help. Needs root.
# ADAPTRA_PYTHON names a python with torch and megatron-core 0.17 or newer, used as it is; else
# .venv is set up with Python 3.12.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/lib.sh"
python=${ADAPTRA_PYTHON:-}
if [ -z "$python" ]; then
  venv=${ADAPTRA_VENV:-$root/.venv}
  python=$(find_python 3.12)
  make_venv "$venv" demo "$python"
  python=$venv/bin/python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/benchmarks/whole_iteration.py" "$@"
