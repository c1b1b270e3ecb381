"""What the benchmarks share: repeated runs, a table, and a JSON file."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_adaptra.ir.conditions import Conditions, both_ways


def job(stages: int, count: int, delays_ms: dict[int, float], **more: Any) -> Conditions:
    """Equal stages (F 9 ms, B 16 ms); `delays_ms[i]` is of the link below stage i, both ways."""
    links = both_ways({i: ms / 1e3 for i, ms in delays_ms.items()})
    return Conditions(count, (9e-3,) * stages, (10e-3,) * stages, (6e-3,) * stages, links, **more)


def median_ms(function: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def main(what: str, rows: Callable[[int], Sequence[dict[str, Any]]]) -> None:
    """Print the rows, and write them to `--json FILE` with the machine they were taken on."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="median of (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args()
    done = rows(args.runs)
    table = Table(title=f"{what}, median of {args.runs}")
    for name in done[0]:
        table.add_column(name)
    for row in done:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    Console().print(table)
    if args.json:
        data = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "runs": args.runs,
            "rows": done,
        }
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")
