"""How soon a slow link is noticed, and how often a healthy one is called slow, on synthetic traces.

`python benchmarks/detector.py`. A message takes 2 ms times a lognormal jitter, one of a hundred
five times as long; a link's sample is the median of an iteration's messages. Each trace is given
to the chart that runs in a training, with `--stage-ms` as what a microbatch takes: a delay below a
fifth of that is no reason to act. False alarms are alarmed iterations.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import markdown

from megatron_adaptra.cli.output import Table
from megatron_adaptra.measure.detect import DelayChart

SHIFTS_MS = (0.2, 0.5, 1.0, 5.0, 20.0)
CLEAN = 100  # iterations before a link gets slow
GIVEN_UP = 60  # iterations after which a slow link counts as missed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--base-ms", type=float, default=2.0)
    parser.add_argument("--sigma", type=float, default=0.25, help="of the lognormal jitter")
    parser.add_argument("--spikes", type=float, default=0.01, help="share of messages")
    parser.add_argument("--messages", type=int, default=16, help="of an iteration")
    parser.add_argument("--stage-ms", type=float, default=2.0, help="what a microbatch takes")
    parser.add_argument("--healthy", type=int, default=40, help="traces of 3000 iterations")
    parser.add_argument("--runs", type=int, default=200, help="traces per shift")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    return parser.parse_args()


def samples(args: argparse.Namespace, rng: random.Random) -> Iterator[float]:
    """Seconds, one per iteration, of a healthy link."""
    base = args.base_ms / 1e3
    while True:
        yield median(
            base * math.exp(rng.gauss(0, args.sigma)) * (5 if rng.random() < args.spikes else 1)
            for _ in range(args.messages)
        )


def false_alarms(args: argparse.Namespace, rng: random.Random) -> dict[str, float]:
    """Alarmed and confirmed iterations per thousand of healthy links, after the first level."""
    alarms = confirmed = seen = 0
    for _ in range(args.healthy):
        chart, trace = begun(args, samples(args, rng))
        for _ in range(3000):
            seen += 1
            if chart.update(next(trace), args.stage_ms / 1e3):
                confirmed += 1
                chart.accept(args.stage_ms / 1e3)
            alarms += chart.alarm
    return {"alarms": 1e3 * alarms / seen, "confirmed": 1e3 * confirmed / seen}


def latency(args: argparse.Namespace, rng: random.Random, shift_ms: float) -> dict[str, Any]:
    """Iterations until a link that is so much slower is noticed; the missed are left out."""
    found: dict[str, list[int]] = {"alarm": [], "confirmed": []}
    for _ in range(args.runs):
        chart, trace = begun(args, samples(args, rng))
        for _ in range(CLEAN - 20):
            if chart.update(next(trace), args.stage_ms / 1e3):
                chart.accept(args.stage_ms / 1e3)
        seen: dict[str, int] = {}
        for i in range(1, GIVEN_UP + 1):
            if chart.update(next(trace) + shift_ms / 1e3, args.stage_ms / 1e3):
                seen.setdefault("confirmed", i)
            if chart.alarm:
                seen.setdefault("alarm", i)
            if len(seen) == 2:
                break
        for what, i in seen.items():
            found[what].append(i)
    return {what: summary(at, args.runs) for what, at in found.items()}


def summary(at: Sequence[int], runs: int) -> dict[str, Any]:
    """Of the iterations `at` which a change was noticed."""
    found = {"mean": mean(at), "worst": max(at)} if at else {"mean": None, "worst": None}
    return {**found, "missed": runs - len(at)}


def begun(args: argparse.Namespace, trace: Iterator[float]) -> tuple[DelayChart, Iterator[float]]:
    """A chart that knows 20 iterations of a link. One slow from its start is planned for."""
    chart = DelayChart()
    for _ in range(20):
        if chart.update(next(trace), args.stage_ms / 1e3):
            chart.accept(args.stage_ms / 1e3)
    return chart, trace


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def main() -> None:
    args = arguments()
    rng = random.Random(args.seed)
    healthy = false_alarms(args, rng)
    print(
        f"Seed {args.seed}. {args.healthy} healthy links of 3000 iterations: "
        f"{healthy['alarms']:.3f} alarms and {healthy['confirmed']:.3f} confirmed changes per "
        f"1000 iterations.\n"
    )
    shifts = {shift: latency(args, rng, shift) for shift in SHIFTS_MS}
    rows = [
        [f"+{shift:g} ms", *(number(value) for what in row.values() for value in what.values())]
        for shift, row in shifts.items()
    ]
    columns = ["slower by", "alarm after", "worst", "missed", "confirmed after", "worst", "missed"]
    print(markdown(Table(f"Iterations until noticed, {args.runs} links each", columns, rows)))
    if args.json:
        data = {"arguments": vars(args), "healthy": healthy, "shifts": shifts}
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
