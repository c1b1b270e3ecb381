#!/usr/bin/env bash
# The test suite, with its own set-up; docs/testing.md says how it is built.
#   scripts/test.sh          what CI runs: both lines of megatron-core, a covering selection of trainings
#   scripts/test.sh --quick  for every commit: one line, nothing cold, crowded or timed
#   scripts/test.sh --full   before a release: all combinations and the large sizes
#   scripts/test.sh [options of pytest]
# ADAPTRA_TEST_NEWEST=0 leaves out the newest megatron-core (Python 3.12, its own environment);
# ADAPTRA_TEST_MINUTES=M does so where the first release has taken M minutes, on a busy machine.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
mode=()
case "${1:-}" in
  --quick | --full) mode=("$1") && shift ;;
esac
venv=${ADAPTRA_VENV:-$PWD/.venv} newest="" making="" notes=() output=$(mktemp) chance=$(mktemp)
trap 'rm -f "$output" "$chance"; [ -z "$making" ] || kill "$making" 2>/dev/null || true' EXIT
make_venv "$venv" demo,dev
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1

# The second environment is made while the first one's tests run.
if [ $# = 0 ] && [ "${mode[0]:-}" != --quick ]; then
  if [ "${ADAPTRA_TEST_NEWEST:-1}" != 1 ]; then
    notes+=("the newest megatron-core was NOT tested: ADAPTRA_TEST_NEWEST=$ADAPTRA_TEST_NEWEST")
  elif newest=$(find_python 3.12); then
    make_venv --cuda "$venv-newest" demo,dev "$newest" &
    making=$!
  else
    notes+=("the newest megatron-core was NOT tested: it needs Python 3.12, and there is none with venv")
  fi
fi

echo "== style, spelling, types, layers"
ruff check .
ruff format --check .
codespell
mypy
lint-imports

run=(-m pytest ${mode[@]+"${mode[@]}"})
jobs=3 # on two cores: tests wait more than they compute
[ "${mode[0]:-}" != --quick ] || jobs=4 # hardly any starts a dozen processes
if [ $# -gt 0 ]; then rm -f "$output" "$chance" && exec python "${run[@]}" "$@"; fi

say_line() { echo "== $("$1" -c 'import platform; from importlib.metadata import version as v; print("megatron-core", v("megatron-core"), "on Python", platform.python_version())')"; }
failed=()
# run_tests NAME PYTHON OPTIONS...: what failed is listed again at the end.
run_tests() {
  local name=$1 status=0
  say_line "$2"
  "$2" "${run[@]}" --chance="$chance" --durations=25 "${@:3}" 2>&1 | tee "$output" || status=$?
  [ $status != 0 ] || return 0
  # 5: none was chosen, which is right where no test needs a quiet machine.
  [[ $status != 5 || " $* " != *" -m quiet "* ]] || return 0
  failed+=("adaptra: tests failed on $name:")
  while IFS= read -r line; do failed+=("  ${line:0:300}"); done < <(grep -E '^(FAILED|ERROR) ' "$output")
}
# What shows the same under either release is tested once, but for --full: demos with the one that
# users get, others with the first.
later=() once=()
if [ "${mode[0]:-}" != --full ]; then
  [ -z "$newest" ] || later=(--ignore tests/adapter/test_demo.py
    --ignore tests/adapter/test_demo_replicas.py --ignore tests/adapter/test_demo_slow_replica.py)
  once=(--ignore tests/adapter/test_faulty_counts.py --ignore tests/adapter/test_found_counts.py
    --ignore tests/adapter/test_cheapest_remedy.py --ignore tests/adapter/test_demo_late_rank.py)
fi
run_tests "the first line" python -n "$jobs" -m "not quiet" ${later[@]+"${later[@]}"}
if [ -n "$newest" ]; then
  wait "$making" || { echo "adaptra: no environment for the newest megatron-core" >&2 && exit 1; }
  making=""
fi
# With nothing beside it, the other environment's installation neither; --quick has left it out.
[ "${mode[0]:-}" = --quick ] || run_tests "the first line, alone" python -m quiet
if [ -n "$newest" ] && ((SECONDS > 60 * ${ADAPTRA_TEST_MINUTES:-1000000})); then
  notes+=("the newest megatron-core was NOT tested, nor were most demos: the first had taken $((SECONDS / 60)) minutes, of ADAPTRA_TEST_MINUTES=$ADAPTRA_TEST_MINUTES")
  newest=""
fi
if [ -n "$newest" ]; then
  "$venv-newest/bin/python" -c 'import torch; assert torch.version.cuda' ||
    failed+=("adaptra: the fake CUDA was NOT tested: torch in $venv-newest is no build for CUDA")
  # What does not depend on Megatron's release, or on torch's build, has been tested.
  again=(tests/adapter tests/launch/test_models.py tests/fake_cuda/test_fake_*.py
    tests/launch/test_documented_commands.py::test_it_trains
    --ignore tests/adapter/test_failures.py --ignore tests/adapter/test_flags.py
    --ignore tests/adapter/test_demo_report.py --ignore tests/adapter/test_life_cycles.py
    ${once[@]+"${once[@]}"})
  run_tests "the newest line" "$venv-newest/bin/python" -n "$jobs" -m "not quiet" "${again[@]}"
  run_tests "the newest line, alone" "$venv-newest/bin/python" -m quiet "${again[@]}"
fi
echo "== in short"
for note in ${notes[@]+"${notes[@]}"}; do echo "adaptra: $note"; done
# --quick runs none of the tests that can fail by chance, and is no run of theirs.
if [ "${mode[0]:-}" != --quick ]; then
  python tests/chance.py "$chance" || failed+=("adaptra: too much failed by chance")
fi
if [ ${#failed[@]} -gt 0 ]; then
  printf '%s\n' "${failed[@]}"
  exit 1
fi
echo "adaptra: all tests passed in $((SECONDS / 60)) min $((SECONDS % 60)) s with set-up"
