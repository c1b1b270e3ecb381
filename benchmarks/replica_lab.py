"""Routes round a really slow path of a laboratory, which gets slow and heals three times.

`python benchmarks/replica_lab.py`, as root: a run of `adaptra demo --netlab` with 2 replicas of 3
stages, one host each. Both arms take turns in the same processes. All workers wait about ten times
as long as they compute, for a machine with fewer cores than workers (see replica_routes.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import markdown
from replica_routes import workers

from megatron_adaptra.cli.output import Table

REPLICAS, STAGES, MICROBATCHES = 2, 3, 8
HEALTHY, SLOW = 25, 20  # iterations of a period
SETTLED = 2  # iterations after a change that do not count: some still run under the plan before


def train(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The summary of the demo's run."""
    spans = [(HEALTHY + i * (HEALTHY + SLOW), (i + 1) * (HEALTHY + SLOW)) for i in range(3)]
    rules = [f"{arguments.path}:{arguments.delay}@{a}..{b}" for a, b in spans]
    command = [
        sys.executable, "-m", "megatron_adaptra", "demo", "--json", "--netlab",
        "--out", str(folder), "--reroute", "swap", "--replicas", str(REPLICAS),
        "--stages", str(STAGES), "--microbatches", str(MICROBATCHES), "--hidden-size", "32",
        "--seq-length", "32", "--iterations", str(spans[-1][1] + HEALTHY),
        *(word for rule in rules for word in ("--slow", rule)),
        *workers(REPLICAS, STAGES),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, timeout=arguments.timeout
    )
    if done.returncode:
        raise SystemExit(f"the demo has ended with status {done.returncode}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return {**summary, "spans": spans}


def row(number: int, span: tuple[int, int], done: dict[str, Any]) -> list[str]:
    """What one slow period has cost, untreated and treated, and when plans changed."""
    first, end = span
    arms = {name: arm["iteration_ms"] for name, arm in done["arms"].items()}
    swaps = [one["iteration"] for one in done["replans"] if first <= one["iteration"] < end]
    back = [one["iteration"] for one in done["replans"] if end <= one["iteration"] < end + HEALTHY]
    before, after = arms["stock"][first - HEALTHY + SETTLED : first], arms["stock"][end:]
    healthy = median([*before, *after[SETTLED:HEALTHY]])
    untreated = median(arms["stock"][first:end])
    if not swaps:
        return [f"{number}", f"{healthy:.0f}", f"{untreated:.0f}", "no plan", "", "", ""]
    treated = median(arms["adaptra"][swaps[0] + SETTLED : end])
    return [
        f"{number}", f"{healthy:.0f}", f"{untreated:.0f}", f"{treated:.0f}",
        f"{treated / healthy:.2f}", f"{swaps[0] - first}", f"{back[0] - end}" if back else "never",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="0.1-0.2", help="between two workers")
    parser.add_argument("--delay", default="40ms", help="each way")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="of the run")
    parser.add_argument("--json", metavar="FILE", help="write the demo's summary there, too")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="adaptra-") as folder:
        done = train(arguments, Path(folder))
    rows = [row(i, span, done) for i, span in enumerate(done["spans"], start=1)]
    columns = [
        "period", "healthy, ms", "untreated, ms", "ours, ms", "of healthy",
        "in force after", "back after",
    ]  # fmt: skip
    print(markdown(Table(f"Path {arguments.path}, {arguments.delay} each way", columns, rows)))
    equal = done["losses_identical"] and done["parameters_identical"]
    print(f"\nlosses and parameters are {'' if equal else 'NOT '}those of stock to the last bit")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
