"""How often healthy links are called slow, or thin, by what a training estimates from its reports.

`python benchmarks/healthy_links.py`. Messages and probes of two stages, with a lognormal jitter,
single late messages and bursts (tests/unit/measure/traffic.py), go through the estimator that
runs in a training. Counted are link iterations: whose delay is out of the chart (alarms), whose
change is confirmed so that a plan would be made, and for which a plan would count with a bandwidth
(thin).
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from common import markdown

from megatron_adaptra.cli.output import Table
from megatron_adaptra.measure.estimate import Estimator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from measure.traffic import MS, Traffic, healthy

# ms: what a message takes that differs, what is always the same, and a stage.
REGIMES = ((2.0, 0.0, 2.0), (2.0, 0.0, 10.0), (0.2, 0.0, 10.0), (2.0, 40.0, 5.0))
LEARNED = 20  # iterations that are not counted


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--pairs", type=int, default=10, help="of links, in each row")
    return parser.parse_args()


def count(traffic: Traffic, iterations: int) -> tuple[int, int, int]:
    """Alarmed, confirmed and thin iterations of the two links."""
    estimator = Estimator(traffic.count, ["one"] * 2, None, traffic.nbytes)
    alarms = confirmed = thin = 0
    for i, reports in zip(range(LEARNED + iterations), traffic.reports(), strict=False):
        changed = estimator.update(reports)
        if changed:
            estimator.accept()
        if i >= LEARNED:
            alarms += len(estimator.alarms())
            confirmed += len(changed)
            conditions = estimator.conditions()
            thin += sum(conditions.wire(*link) > 0 for link in conditions.links)
    return alarms, confirmed, thin


def main() -> None:
    args = arguments()
    rows, total, seen = [], [0, 0, 0], 0
    for base, delay, stage in REGIMES:
        found = [0, 0, 0]
        for pair in range(args.pairs):
            rng = random.Random(f"{args.seed} {base} {stage} {pair}")
            each = count(healthy(rng, base * MS, stage * MS, delay * MS), args.iterations)
            found = [a + b for a, b in zip(found, each, strict=True)]
        links = 2 * args.pairs * args.iterations
        total, seen = [a + b for a, b in zip(total, found, strict=True)], seen + links
        name = f"{delay:g} + {base:g} ms" if delay else f"{base:g} ms"
        rows.append([name, f"{stage:g} ms", *(f"{1e3 * n / links:.3f}" for n in found)])
    rows.append(["all", "", *(f"{1e3 * n / seen:.3f}" for n in total)])
    columns = ["a message takes", "a stage", "alarms", "confirmed", "thin"]
    title = f"Per 1000 iterations of a healthy link, seed {args.seed}, {seen} in all"
    print(markdown(Table(title, columns, rows)))


if __name__ == "__main__":
    main()
