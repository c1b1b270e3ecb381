#!/usr/bin/env bash
# The tests, with their set-up; docs/testing.md says how they are built.
#   scripts/test.sh          in five minutes: every promise of the README, on this machine
#   scripts/test.sh --ci     all but what takes hours: newest and oldest megatron-core, style, types
#   scripts/test.sh --full   before a release: all combinations and the large sizes, in hours
#   scripts/test.sh [options of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
mode=""
case "${1:-}" in
  --ci | --full) mode=$1 && shift ;;
esac
venv=${ADAPTRA_VENV:-$PWD/.venv} notes=() failed=() results=${ADAPTRA_TEST_RESULTS:-$PWD/.test-results}
export OMP_NUM_THREADS=1

# What the short run proves. Nothing of it is cold, crowded or compared by the clock.
short=(
  # Orders of ops, their check and their bounds; the simulator; the planners against known optima.
  tests/unit/ir tests/unit/model/test_bounds.py tests/unit/sim/test_clock.py tests/unit/sim/test_jitter.py
  tests/unit/plan/test_warmup.py tests/unit/plan/test_adaptive.py tests/unit/plan/test_baselines.py
  tests/unit/plan/test_fixed.py tests/unit/plan/test_dispatch.py
  # What links take, estimated from what a training sees.
  tests/unit/measure/test_link_fit.py tests/unit/measure/test_link_estimates.py tests/unit/measure/test_estimate.py
  tests/unit/measure/test_probe.py tests/unit/measure/test_chart.py tests/unit/diagnose/test_book.py
  tests/unit/agree/test_job_log.py
  # The engine over real sockets and shared memory; who is let in.
  tests/network/transport/test_contract.py tests/network/transport/test_contract_endings.py
  tests/network/transport/test_engine_paths.py tests/network/transport/test_engine_handshake.py
  # All stages change in one iteration or none does; what is slow is found, hidden and forgotten.
  tests/unit/agree/test_agreement.py tests/unit/agree/test_ballot.py tests/unit/agree/test_controller.py
  tests/unit/agree/test_refusal.py tests/unit/execute/test_mailbox.py tests/unit/adapt/test_trial.py
  tests/unit/execute/test_watchdog.py tests/unit/agree/test_guard.py tests/unit/adapt/test_there_and_back.py
  # Trainings: stock Megatron's bits under every schedule, in Megatron's own program, with a slow
  # link that is hidden, whatever of ours fails; and all is taken back.
  tests/train/test_pretrain.py tests/train/test_schedules.py tests/train/test_law.py
  tests/train/test_demo.py tests/train/test_registry.py tests/train/test_flags.py
  tests/train/test_features.py
  # The command line, settings, files.
  tests/unit/cli/test_plan_command.py tests/unit/cli/test_bad_input.py tests/unit/cli/test_main.py
  tests/unit/test_config.py tests/unit/test_units.py tests/repo/test_files.py tests/unit/test_log.py tests/repo/test_docs.py
)
# What the oldest megatron-core is trained for: every schedule, patches, replicas' reductions, the
# ends of a job. What else depends on it is read by scripts/drift.py.
oldest=(
  tests/train/test_schedules.py tests/train/test_registry.py tests/train/test_gradients.py
  tests/train/test_life_cycles.py tests/train/test_law.py
  tests/train/test_demo.py tests/train/test_closed_groups.py
)

check_style() {
  echo "== style, spelling, types, layers"
  ruff check . && ruff format --check . && codespell && mypy && lint-imports
}

# run_tests NAME PYTHON OPTIONS...: results as junit's XML; what failed is listed again at the end.
run_tests() {
  local name=$1 python=$2 status=0 output=$results/$1.log
  shift 2
  echo "== $name: $("$python" -c 'import platform; from importlib.metadata import version as v; print("megatron-core", v("megatron-core"), "on Python", platform.python_version())')"
  mkdir -p "$results"
  PATH="$(dirname "$python"):$PATH" "$python" -m pytest ${mode:+$([ "$mode" = --ci ] || echo --full)} \
    --junitxml="$results/$name.xml" "$@" 2>&1 | tee "$output" || status=$?
  # 5: none was chosen.
  [ $status = 0 ] || [ $status = 5 ] || {
    failed+=("adaptra: tests failed, $name:")
    while IFS= read -r line; do failed+=("  ${line:0:300}"); done < <(grep -E '^(FAILED|ERROR) ' "$output")
  }
}

end() {
  echo "== in short"
  for note in ${notes[@]+"${notes[@]}"}; do echo "adaptra: $note"; done
  if [ ${#failed[@]} -gt 0 ]; then
    printf '%s\n' "${failed[@]}"
    exit 1
  fi
  echo "adaptra: all tests passed in $((SECONDS / 60)) min $((SECONDS % 60)) s with set-up"
}

if [ $# -gt 0 ]; then # options of pytest
  make_venv "$venv" demo,test,dev
  export PATH="$venv/bin:$PATH"
  check_style
  exec python -m pytest ${mode:+$([ "$mode" = --ci ] || echo --full)} "$@"
fi

if [ -z "$mode" ]; then
  make_venv "$venv" demo,test
  export ADAPTRA_TEST_PATIENCE=${ADAPTRA_TEST_PATIENCE:-120}
  run_tests short "$venv/bin/python" --quick -n 4 --timeout 600 "${short[@]}"
  "$venv/bin/python" -c 'import sys; from importlib.util import find_spec as find; sys.exit(find("megatron.training") is None)' ||
    notes+=("Megatron's own training program was NOT trained: its wheel needs Python 3.12, and $venv has $("$venv/bin/python" -V)")
  end
  exit
fi

# All else needs both ends of what we support: the newest megatron-core, with torch's build for CUDA,
# which the fake GPU stands in for; and the oldest.
newest=$(find_python 3.12) || exit 1
oldest_python=$(find_python 3.11 3.10) || exit 1
make_venv --cuda "$venv-cuda" demo,test,dev "$newest"
export PATH="$venv-cuda/bin:$PATH"
mkdir -p "$results"
check_style >"$results/style.log" 2>&1 & # mypy takes a core for a minute
style=$!
python -c 'import torch; assert torch.version.cuda' ||
  failed+=("adaptra: the fake CUDA was NOT tested: torch in $venv-cuda is no build for CUDA")
# The second environment is made while the first one's tests run.
ADAPTRA_MEGATRON="==0.14.*" make_venv "$venv-oldest" demo,test "$oldest_python" &
making=$!
trap 'kill "$making" "$style" 2>/dev/null || true' EXIT
run_tests newest "$venv-cuda/bin/python" -n 4 --again -m "not quiet"
wait "$style" || failed+=("adaptra: style, spelling, types or layers are wrong: $results/style.log")
cat "$results/style.log"
wait "$making" || { echo "adaptra: no environment for the oldest megatron-core" >&2 && exit 1; }
trap - EXIT
run_tests newest-alone "$venv-cuda/bin/python" --again -m quiet
run_tests oldest "$venv-oldest/bin/python" -n 4 --again -m "not quiet" "${oldest[@]}"
python tests/budget.py "$results" || failed+=("adaptra: a folder takes more than its share")
end
