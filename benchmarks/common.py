"""What the benchmarks share: jobs, repeated runs, and where the results go."""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_adaptra.cli.output import Table, show_table
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.sim.ports import Ports


def both_ways(pairs: Mapping[int, float] | Sequence[float]) -> dict[tuple[int, int], LinkState]:
    """Links with the same delay in both directions; `pairs[i]` is between stages i and i + 1."""
    items = pairs.items() if isinstance(pairs, Mapping) else enumerate(pairs)
    links = {}
    for i, delay in items:
        links[i, i + 1] = links[i + 1, i] = LinkState(delay)
    return links


def equal_ports(
    rates: Sequence[float],
    delay: float = 0.0,
    cost: float = 0.0,
    turn: float = math.inf,
    paths: Mapping[tuple[int, int], LinkState] | None = None,
) -> Ports:
    """Return Ports of `rates` both ways; `delay`, `cost`, `turn`, `paths`: as for Ports."""
    return Ports(tuple(rates), tuple(rates), delay, cost, turn, paths or {})


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


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the median, by order statistics: as many heads of a coin lie within."""
    ordered, count = sorted(ratios), len(ratios)
    outside, k = 0.0, 0
    while k < count // 2 and (outside := outside + math.comb(count, k) / 2**count) < 0.025:
        k += 1
    return ordered[max(0, k - 1)], ordered[min(count - 1, count - k)]


def markdown(table: Table) -> str:
    """The table in Markdown, with its title in a line above."""
    lines = [table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table.title}:\n\n{body}\n"


def save(path: str | Path, runs: int, rows: Sequence[dict[str, Any]]) -> None:
    """The results, with the machine they were taken on."""
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    data = {**machine, "runs": runs, "rows": rows}
    Path(path).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def main(what: str, rows: Callable[[int], Sequence[dict[str, Any]]]) -> None:
    """Print the rows, and write them to `--json FILE`."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="median of (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args()
    done = rows(args.runs)
    cells = [[f"{x:.2f}" if isinstance(x, float) else str(x) for x in r.values()] for r in done]
    show_table(Table(f"{what}, median of {args.runs}", list(done[0]), cells))
    if args.json:
        save(args.json, args.runs, done)
