"""Which forecast of a replica's seconds is off the least, and how soon a slow one is named.

`python benchmarks/replica_speed.py`. A forecast is made at each iteration from the 20th on, and at
those at which the set of slow replicas counts as another one; it is off by how far it is from the
mean of the HORIZON iterations after it, as a share of that. Runs are drawn by seed, see
tests/unit/measure/replica_runs.py; `--record FILE ...` adds real ones, written by
--adaptra-record: of one by routes a microbatch takes what the ops of the slowest stage take.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import markdown

from megatron_adaptra.cli.output import Table
from megatron_adaptra.measure.replica_speed import WINDOW, ReplicaSpeeds

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from measure.replica_runs import KINDS, Run, Samples, made

FIRST = 20  # iterations before the first forecast
REPLICAS = (2, 4, 8)
HORIZON = 10  # iterations after a decision for which its plan is judged
LAMBDA = 0.3  # weight of the newest of an EWMA's samples, as in measure/detect.py
LEVEL, TREND = 0.3, 0.1  # Holt's alpha and beta
LEAST = 0.1  # of the level: a trend that leads below is not believed


def last_value() -> Callable[[float], float]:
    """Takes the next seconds of a line, and says what is expected of the next HORIZON iterations.

    So do the other three.
    """
    return lambda seconds: seconds


def ewma() -> Callable[[float], float]:
    """An exponentially weighted moving average (Roberts 1959, see measure/detect.py)."""
    average: list[float] = []

    def add(seconds: float) -> float:
        before = average[0] if average else seconds
        average[:] = [LAMBDA * seconds + (1 - LAMBDA) * before]
        return average[0]

    return add


def running_median() -> Callable[[float], float]:
    """The median, as in ReplicaSpeeds: a few of WINDOW samples that are far off do not move it."""
    samples: deque[float] = deque(maxlen=WINDOW)

    def add(seconds: float) -> float:
        samples.append(seconds)
        return median(samples)

    return add


def holt() -> Callable[[float], float]:
    """A level and a trend, both exponentially weighted; half of the HORIZON ahead.

    Source: Holt, "Forecasting Seasonals and Trends by Exponentially Weighted Moving Averages"
    (1957; International Journal of Forecasting 20, 2004), sections 2 and 3.
    """
    line: list[float] = []

    def add(seconds: float) -> float:
        level, trend = seconds, 0.0
        if line:
            level = LEVEL * seconds + (1 - LEVEL) * sum(line)
            trend = TREND * (level - line[0]) + (1 - TREND) * line[1]
        line[:] = [level, trend]
        return max(level + trend * (HORIZON + 1) / 2, LEAST * level)

    return add


FORECASTS = {"ewma": ewma, "last": last_value, "median": running_median, "holt": holt}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--runs", type=int, default=20, help="of each kind and number of replicas")
    parser.add_argument("--iterations", type=int, default=300, help="of each run")
    parser.add_argument("--record", nargs="*", default=[], metavar="FILE", help="of real runs")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    return parser.parse_args()


def recorded(path: str) -> Iterator[Run]:
    """The starts of a recorded run of several replicas, also one by another version."""
    starts: list[tuple[int, list[Samples]]] = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "run":
            starts.append((row.get("replicas", 1), []))
        elif row["kind"] == "iteration" and starts:
            replicas, rows = starts[-1]
            sample = _replicas(row, replicas)
            if len(sample) == replicas:
                rows.append(sample)
    for replicas, rows in starts:
        if replicas > 1 and len(rows) > FIRST + HORIZON:
            yield Run("recorded", rows, ())


def _replicas(row: Mapping[str, Any], replicas: int) -> Samples:
    """What an iteration shows of each replica: itself, or by the ops of its slowest stage."""
    if "reports" not in row:
        return dict(enumerate(zip(row["seconds"], row["microbatches"], strict=True)))
    stages = len(row["reports"]) // replicas
    each = [row["reports"][r * stages : (r + 1) * stages] for r in range(replicas)]
    seconds = [max((_seconds(one["wall"]) for one in some), default=0.0) for some in each]
    return {replica: (took, 1) for replica, took in enumerate(seconds) if took}


def _seconds(wall: Mapping[str, float]) -> float:
    backward = wall["B"] if "B" in wall else wall.get("I", 0.0) + wall.get("W", 0.0)
    return wall.get("F", 0.0) + backward


def errors(run: Run) -> dict[str, tuple[list[float], list[float]]]:
    """By forecast, how far it is off: at every iteration, and where a decision is made."""
    rows, found = run.rows, {name: ([], []) for name in FORECASTS}
    lines = {name: [make() for _ in rows[0]] for name, make in FORECASTS.items()}
    speeds = ReplicaSpeeds(len(rows[0]))
    for i, row in enumerate(rows[: -HORIZON or None]):
        decided = speeds.update(row)
        if decided:
            speeds.accept()
        for replica, (seconds, count) in row.items():
            after = mean(s / m for s, m in (r[replica] for r in rows[i + 1 : i + 1 + HORIZON]))
            for name, line in lines.items():
                expected = line[replica](seconds / count)
                if i >= FIRST:
                    error = abs(expected / after - 1)
                    found[name][0].append(error)
                    if decided:
                        found[name][1].append(error)
    return found


def named(run: Run) -> tuple[int, list[int], int]:
    """How many decisions there are, iterations until each change led to one, and notes."""
    speeds, at, notes = ReplicaSpeeds(len(run.rows[0])), [], 0
    for i, row in enumerate(run.rows):
        if speeds.update(row):
            at.append(i)
            speeds.accept()
        notes += speeds.note() is not None
    late = [next((i for i in at if i >= change), len(run.rows)) + 1 - change
            for change in run.changes]  # fmt: skip
    return len(at), late, notes


def table(kinds: Mapping[str, Sequence[Run]]) -> tuple[Table, dict[str, Any]]:
    rows, data, sums = [], {}, {name: [] for name in FORECASTS}
    for kind, runs in kinds.items():
        found = [errors(run) for run in runs]
        cells, data[kind] = [kind, str(len(runs))], {}
        for part, what in enumerate(("always", "decided")):
            means = {}
            for name in FORECASTS:
                values = [x for one in found for x in one[name][part]]
                means[name] = mean(values) if values else None
                if part == 0:
                    sums[name].append(means[name])
            known = [value for value in means.values() if value is not None]
            for value in means.values():
                text = "–" if value is None else f"{value:.2%}"
                cells.append(f"**{text}**" if known and value == min(known) else text)
            data[kind][what] = means
        rows.append(cells)
    all_of_it = {name: mean(values) for name, values in sums.items()}
    least = min(all_of_it.values())
    cells = [f"**{v:.2%}**" if v == least else f"{v:.2%}" for v in all_of_it.values()]
    rows.append(["mean of kinds", "", *cells, *[""] * len(FORECASTS)])
    columns = ["kind", "runs", *FORECASTS, *(f"{name}, decided" for name in FORECASTS)]
    title = f"Off by, over the next {HORIZON} iterations: at any iteration, and at decisions"
    return Table(title, columns, rows), {**data, "mean": all_of_it}


def decisions(kinds: Mapping[str, Sequence[Run]]) -> tuple[Table, dict[str, Any]]:
    rows, data = [], {}
    for kind, runs in kinds.items():
        found = [named(run) for run in runs]
        late = [i for one in found for i in one[1]]
        data[kind] = {
            "decisions": mean(one[0] for one in found),
            "most": max(one[0] for one in found),
            "after": median(late) if late else None,
            "worst": max(late) if late else None,
            "notes": mean(one[2] for one in found),
        }
        after, worst = data[kind]["after"], data[kind]["worst"]
        rows.append([
            kind, f"{mean(len(run.changes) for run in runs):g}", f"{data[kind]['decisions']:.2f}",
            str(data[kind]["most"]), "–" if after is None else f"{after:g}",
            "–" if worst is None else str(worst), f"{data[kind]['notes']:.2f}",
        ])  # fmt: skip
    columns = ["kind", "changes", "decisions", "most", "first after", "worst", "notes"]
    return Table("Decisions of a run", columns, rows), data


def main() -> None:
    args = arguments()
    seeds = range(args.seed, args.seed + args.runs)
    kinds: dict[str, list[Run]] = {
        kind: [made(kind, seed, n, args.iterations) for seed in seeds for n in REPLICAS]
        for kind in KINDS
    }
    real = [run for path in args.record for run in recorded(path)]
    if real:
        kinds["recorded"] = real
    print(f"Seed {args.seed}.\n")
    first, errors_of = table(kinds)
    second, decisions_of = decisions(kinds)
    print(markdown(first))
    print(markdown(second))
    if args.json:
        data = {"arguments": vars(args), "errors": errors_of, "decisions": decisions_of}
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
