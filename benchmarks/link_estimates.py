"""How exactly delay and bandwidth of a link are known ten iterations after it has changed.

`python benchmarks/link_estimates.py`. The traffic of healthy_links.py, through the estimator that
runs in a training; after thirty healthy iterations one direction gets slow, thin, or both. Each
row's last columns are shares of links that are named rightly, and whose delay and bandwidth are
within a tenth of what they are.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

from common import markdown

from megatron_adaptra.cli.output import Table
from megatron_adaptra.measure.estimate import Estimator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from measure.traffic import MS, Link, Traffic

BASE, HEALTHY, AFTER = 1 * MS, 30, 10
ROWS = {"20 MB/s": (0.0, 20e6), "40 ms": (40 * MS, math.inf), "both": (40 * MS, 20e6)}


class Found(NamedTuple):
    """Relative errors of delay and bandwidth; infinite where the link is not named rightly."""

    delay: float
    bandwidth: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--runs", type=int, default=200, help="links in each row")
    parser.add_argument("--stage-ms", type=float, default=10.0)
    parser.add_argument("--together", action="store_true", help="half of the messages at once")
    return parser.parse_args()


def estimate(
    rng: random.Random, delay: float, bandwidth: float, stage: float, together: bool = False
) -> Found:
    """Of one link that takes `delay` seconds more, and so many bytes per second."""
    link = Link(rng, BASE)
    traffic = Traffic(link, Link(rng, BASE), stage, together=together)
    estimator = Estimator(traffic.count, ["one"] * 2, None, traffic.nbytes)
    for i, reports in zip(range(HEALTHY + AFTER), traffic.reports(), strict=False):
        if estimator.update(reports):
            estimator.accept()
        if i == HEALTHY - 1:
            link.delay, link.bandwidth = delay, bandwidth
    found = estimator.conditions().link(0, 1)
    late = abs(found.delay / (delay + BASE) - 1) if delay else found.delay
    if math.isinf(bandwidth) != math.isinf(found.bandwidth):
        return Found(late, math.inf)
    return Found(late, 0.0 if math.isinf(bandwidth) else abs(found.bandwidth / bandwidth - 1))


def main() -> None:
    args = arguments()
    rows = []
    for name, (delay, bandwidth) in ROWS.items():
        rng = random.Random(f"{args.seed} {name}")
        found = [
            estimate(rng, delay, bandwidth, args.stage_ms * MS, args.together)
            for _ in range(args.runs)
        ]
        cells = [f"{sum(not math.isinf(f.bandwidth) for f in found) / len(found):.1%}"]
        for key, is_set in (("delay", delay > 0), ("bandwidth", math.isfinite(bandwidth))):
            errors = sorted(getattr(f, key) for f in found)
            within = sum(e <= 0.1 for e in errors) / len(errors)
            text = f"{within:.1%} (median {median(errors):.1%} off)"
            cells.append(text if is_set else "")
        rows.append([name, *cells])
    columns = ["one way", "named rightly", "delay within 10 %", "bandwidth within 10 %"]
    print(markdown(Table(f"{AFTER} iterations later, seed {args.seed}", columns, rows)))


if __name__ == "__main__":
    main()
