"""How long each folder's tests take, and whether one takes more than its share: budget.toml.

    python tests/budget.py FOLDER    of the results (junit's XML) of a run of scripts/test.sh

Seconds depend on the machine and on what else it does, so shares of the sum are compared.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import tomllib

OVER = 2.0  # times its share a folder may take
SMALL = 0.05  # of the sum: shares below it are not compared


def taken(results: Path) -> tuple[Counter[str], Counter[str]]:
    """Seconds and cases by folder, such as tests/train, of all runs."""
    seconds, cases = Counter[str](), Counter[str]()
    for path in sorted(results.glob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            parts = case.get("classname", "").split(".")
            folder = "/".join(parts[1:-1][:2]) or "tests"
            seconds[folder] += float(case.get("time", 0.0))
            cases[folder] += 1
    return seconds, cases


def main(results: Path) -> int:
    seconds, cases = taken(results)
    budget = tomllib.loads(Path(__file__).with_name("budget.toml").read_text())["seconds"]
    whole, planned = sum(seconds.values()), sum(budget.values())
    print(f"{'folder':16s} {'cases':>6s} {'seconds':>8s} {'share':>6s} {'budget':>6s}")
    status = 0
    for folder, took in seconds.most_common():
        share, most = took / whole, budget.get(folder, 0.0) / planned
        print(f"{folder:16s} {cases[folder]:6d} {took:8.0f} {share:6.1%} {most:6.1%}")
        if share > max(OVER * most, SMALL):
            status = 1
            print(f"adaptra: tests/{folder} takes {share:.1%} of all seconds, and has {most:.1%}: "
                  "make it quicker, or change tests/budget.toml and say why")  # fmt: skip
    print(f"{'sum':16s} {cases.total():6d} {whole:8.0f}")
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
