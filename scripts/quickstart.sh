#!/usr/bin/env bash
# Set everything up in .venv and run the demo: scripts/quickstart.sh [options of `adaptra demo`]
# A GPU is not needed. ADAPTRA_VENV, ADAPTRA_PYTHON and ADAPTRA_TORCH choose other than the defaults.
set -euo pipefail
here=$(pwd)
cd "$(dirname "$0")/.."
. scripts/lib.sh
venv=${ADAPTRA_VENV:-$PWD/.venv}
make_venv "$venv" demo
cd "$here"
exec "$venv/bin/adaptra" demo "$@"
