"""How often a healthy worker is called slow, and how soon and rightly one that is slow is named.

`python benchmarks/slow_workers.py`. An op takes its seconds times a lognormal jitter, one of a
hundred five times as long; a worker reports the medians of the 8 ops of each kind of an iteration.
Of each worker's iterations 2 % are a burst, as a whole about 1.6 times as long (lognormal, sigma
0.5). What is decided is accepted at once. See tests/unit/measure/workers.py.
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import islice
from pathlib import Path
from statistics import mean, median

from common import markdown

from megatron_adaptra.cli.output import Table
from megatron_adaptra.measure.slow_workers import SlowWorkers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from measure.workers import BURSTS, jittery

SIGMAS = (0.05, 0.1, 0.25)
REPLICAS = (2, 3, 4)
GIVEN_UP = 60  # iterations after which a slow worker counts as missed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--iterations", type=int, default=2000, help="of each healthy job")
    parser.add_argument("--jobs", type=int, default=5, help="healthy ones, of one stage, per row")
    parser.add_argument("--runs", type=int, default=300, help="slow workers, per row")
    return parser.parse_args()


def false_alarms(args: argparse.Namespace, rng: random.Random, sigma: float) -> list[list[str]]:
    """By number of replicas: decisions and alarms per 1000 healthy worker iterations."""
    rows = []
    for replicas in REPLICAS:
        decided = alarms = 0
        for _ in range(args.jobs):
            workers = SlowWorkers(1, replicas)
            for made in islice(jittery(rng, 1, replicas, sigma), args.iterations):
                if changed := workers.update(made({})):
                    decided += len(changed)
                    workers.accept()
                alarms += len(workers.alarms())
        count = args.jobs * args.iterations * replicas
        each = [f"{1e3 * found / count:.3f}" for found in (decided, alarms)]
        rows.append([f"{sigma:g}", str(replicas), str(count), *each])
    return rows


def latency(
    args: argparse.Namespace, sigma: float, bursts: float, factor: float, healthy: int
) -> list[str]:
    """Iterations until a worker is named that is slow after so many `healthy` ones."""
    rng = random.Random(args.seed)
    at, errors, wrong = [], [], 0
    for run in range(args.runs):
        replicas = REPLICAS[run % len(REPLICAS)]
        workers, trace = SlowWorkers(1, replicas), jittery(rng, 1, replicas, sigma, bursts)
        for made in islice(trace, healthy):
            if workers.update(made({})):
                workers.accept()
        for i, made in enumerate(islice(trace, GIVEN_UP), 1):
            if changed := workers.update(made({1: factor})):
                workers.accept()
                if changed == [1]:
                    at.append(i)
                    errors.append(abs(workers.slow().get(1, 1.0) / factor - 1))
                    break
                wrong += 1
    within = sum(i <= 5 for i in at) / args.runs
    near = sum(error <= 0.1 for error in errors) / args.runs
    return [
        f"{sigma:g}", f"{bursts:.0%}", f"{factor:g}", str(healthy),
        f"{mean(at):.2f}", str(max(at)), f"{within:.1%}", f"{near:.1%}", f"{median(errors):.1%}",
        str(wrong), str(args.runs - len(at)),
    ]  # fmt: skip


def main() -> None:
    args = arguments()
    rng = random.Random(args.seed)
    print(f"Seed {args.seed}.\n")
    rows = [row for sigma in SIGMAS for row in false_alarms(args, rng, sigma)]
    columns = ["sigma of an op", "replicas", "worker iterations", "called slow", "alarms"]
    print(markdown(Table("Per 1000 iterations of a healthy worker", columns, rows)))
    rows = [
        latency(args, sigma, bursts, factor, healthy)
        for sigma in SIGMAS
        for bursts in (0.0, BURSTS)
        for factor in (1.3, 2.0)
        for healthy in (0, 100)
    ]
    columns = [
        "sigma of an op", "bursts", "times as long", "after healthy", "named after", "worst",
        "within 5", "factor within 10 %", "off by, median", "another first", "missed",
    ]  # fmt: skip
    print(markdown(Table(f"Iterations until named, {args.runs} workers each", columns, rows)))


if __name__ == "__main__":
    main()
