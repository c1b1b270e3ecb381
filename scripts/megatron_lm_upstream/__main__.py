"""Run Megatron-LM's own tests of pipelines, and print what came of them.

python scripts/megatron_lm_upstream CHECKOUT LENDER FOLDER

FOLDER is made; it keeps the logs of all ranks. LENDER: a checkout of 0.19 or newer, see ranks.py.
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
from outcomes import Outcomes, by_whom, differences, outcome_of  # noqa: E402
from ranks import STOCK, arms_for, run_all, with_loan  # noqa: E402


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


def main() -> None:
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
    print(f"\n{named.name}: {took}. Differences from stock:")
    for arm, outcomes in arms.items():
        print("\n".join(f"- {arm}: {line}" for line in differences(arms[STOCK], outcomes)) or "")


if __name__ == "__main__":
    main()
