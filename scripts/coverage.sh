#!/usr/bin/env bash
# Which lines of the package the fast tests run, child processes included: a table of modules, and
# the total. Options go to pytest; without any those that are neither cold, crowded nor timed run.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
venv=${ADAPTRA_VENV:-$PWD/.venv} status=0
make_venv "$venv" demo,test,dev
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 1777 "$folder" # some tests become other users
# A sitecustomize measures every Python process below, and leaves nothing in the environment.
cat >"$folder/sitecustomize.py" <<'EOF'
try:
    import coverage
except ImportError:  # another environment's Python
    pass
else:
    coverage.process_startup()
EOF
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1 PYTHONPATH="$folder:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export COVERAGE_FILE=$folder/data COVERAGE_PROCESS_START=$PWD/pyproject.toml
# Left out: where no file may grow no measurement can be kept, either.
[ $# -gt 0 ] || set -- --quick -n 2 -q -k "not takes_nothing and not half_a_line"
python -m pytest "$@" || status=$?
env -u COVERAGE_PROCESS_START python -m coverage combine -q
env -u COVERAGE_PROCESS_START python -m coverage report
exit "$status"
