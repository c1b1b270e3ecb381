"""Run Megatron-LM's own tests of pipelines, and print what came of them.

python scripts/megatron_lm_upstream CHECKOUT LENDER FOLDER

FOLDER is made; it keeps the logs of all ranks. LENDER: a checkout of 0.19 or newer, see ranks.py.
Exit status 1: a test ended otherwise than with stock Megatron, or our engines did not run.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from make_patches import release  # noqa: E402
from outcomes import (  # noqa: E402
    Outcomes,
    by_whom,
    differences,
    iterations,
    outcome_of,
    passed,
)
from ranks import STOCK, arms_for, run_all, with_loan  # noqa: E402

SCHEDULES = "pipeline_parallel/test_schedules.py::test_"
EVERY_RELEASE = {
    f"{SCHEDULES}{name}"
    for name in (
        "get_forward_backward_func",
        "forward_backward_func_without_pipeline_parallel",
        "forward_backward_func_with_pipeline_parallel",
        "forward_backward_func_with_interleaving",
        "forward_backward_func_with_uneven_interleaving",
        "forward_backward_pipelining_without_interleaving_with_custom_pgs",
        "forward_backward_pipelining_with_interleaving_with_custom_pgs",
        "forward_backward_no_pipelining_with_custom_pgs",
    )
}
LEAST = 12  # iterations of ours: pp2, pp4 and tp2-pp2, two models, two each


def rows(arms: dict[str, Outcomes]) -> list[str]:
    """One per test; those with parameters, or of a file that calls no schedule, share one."""
    stock = arms[STOCK][0]
    calling = {_file(name) for name, test in stock.items() if test.calls}

    def title(name: str) -> str:
        test = name.partition("[")[0].rpartition("::")[2]
        return f"{Path(_file(name)).name} | {test if _file(name) in calling else 'all'}"

    found = []
    for first, group in groupby(stock, title):
        names = list(group)
        found.append(" | ".join([first, *(_cell(outcomes, names) for outcomes in arms.values())]))
    return [f"| {row} |" for row in found]


def _file(name: str) -> str:
    return name.partition("::")[0]


def _cell(outcomes: Outcomes, names: list[str]) -> str:
    names = [name for name in names if name in outcomes[0]]
    counted = Counter(outcome_of(outcomes, name) for name in names)
    printed = ", ".join(f"{count} {word}" for word, count in counted.items())
    return "; ".join(filter(None, [printed, by_whom(outcomes[0][name] for name in names)])) or "-"


def faults(arms: dict[str, Outcomes]) -> list[str]:
    """What is not as with stock Megatron, or shows nothing."""
    stock, found = arms[STOCK], []
    for rank, tests in enumerate(stock):
        found += [f"{name}, rank {rank}: not passed" for name in EVERY_RELEASE - passed(tests)]
    for arm in ("native", "executor"):
        if [set(tests) for tests in arms[arm]] != [set(tests) for tests in stock]:
            found.append(f"{arm}: other tests than with stock")
    for arm, outcomes in arms.items():
        found += [f"{arm}: {line}" for line in differences(stock, outcomes)]
        if arm != STOCK and iterations(outcomes) < LEAST:
            found.append(f"{arm}: {iterations(outcomes)} iterations, which is less than {LEAST}")
    return found


def main() -> int:
    named, lender, folder = (Path(name).resolve() for name in sys.argv[1:])
    checkout = with_loan(named, lender, folder / "checkout")
    arms, seconds = {}, {}
    for arm in arms_for(release(named)[:2]):
        begin = time.monotonic()
        arms[arm] = run_all(checkout, arm, folder)
        seconds[arm] = time.monotonic() - begin
    print(f"| file | test | {' | '.join(arms)} |\n|---|---|{'---|' * len(arms)}")
    print("\n".join(rows(arms)))
    took = ", ".join(f"{arm} {round(value)} s" for arm, value in seconds.items())
    found = faults(arms)
    print(f"\n{named.name}: {took}. {'What is wrong:' if found else 'No difference from stock.'}")
    for line in found:
        print(f"- {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
