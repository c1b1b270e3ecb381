"""What `--adaptra-sync auto` takes of the remedies for slow replicas, by the simulator.

`python benchmarks/ladder.py`. Twelve patterns for each seed, see remedy_patterns.py: the
ladder is climbed by what is measured, off by 5 %, and what it chooses is simulated in what comes,
beside each single remedy that is planned for just that.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common import markdown
from remedy_patterns import Outcome, outcomes

from megatron_adaptra.cli.output import Table
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.plan.ladder import FULL, REMEDIES

NEAR, SLOWER = 1.1, 1.03
NAMES = "full", "order", "collective", "routes", "shares"
SHORT = dict(zip((FULL, *REMEDIES), NAMES, strict=True))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--seeds", type=int, default=1, help="so many, from that one on")
    parser.add_argument("--min-gain", type=float, default=AdaptraConfig().min_gain)
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    return parser.parse_args()


def patterns_table(seed: int, found: Sequence[Outcome]) -> Table:
    columns = ("pattern", "replicas x stages x microbatches", *SHORT.values(), "auto", "takes",
               "of full", "of the best")  # fmt: skip
    rows = []
    for one in found:
        c = one.pattern.comes.conditions
        shape = f"{c.replicas} x {c.stages} x {c.microbatches}"
        each = [f"{1e3 * one.each[name]:.0f}" if name in one.each else "–" for name in SHORT]
        rows.append((one.pattern.kind, shape, *each, f"{1e3 * one.auto:.0f}",
                     SHORT[one.chosen], f"{one.of_full:.2f}", f"{one.of_best:.2f}"))  # fmt: skip
    return Table(f"Seed {seed}, ms of an iteration", columns, rows)


def seeds_table(rows: dict[int, list[Outcome]], min_gain: float) -> Table:
    columns = ("seed", "within 10 % of the best", "worst of full", "worst of the best", "takes")
    cells = []
    for seed, found in rows.items():
        near = sum(one.of_best <= NEAR for one in found)
        takes = Counter(SHORT[one.chosen] for one in found)
        words = ", ".join(f"{name} {takes[name]}" for name in SHORT.values() if takes[name])
        full, best = (max(map(of, found)) for of in (_of_full, _of_best))
        cells.append((str(seed), f"{near} of {len(found)}", f"{full:.2f}", f"{best:.2f}", words))
    return Table(f"min_gain {min_gain:g}", columns, cells)


def _of_full(one: Outcome) -> float:
    return one.of_full


def _of_best(one: Outcome) -> float:
    return one.of_best


def main() -> None:
    args = arguments()
    rows = {
        seed: list(outcomes(seed, args.min_gain))
        for seed in range(args.seed, args.seed + args.seeds)
    }
    print(markdown(patterns_table(args.seed, rows[args.seed])))
    print(markdown(seeds_table(rows, args.min_gain)))
    if args.json:
        data = [
            {"seed": seed, "kind": one.pattern.kind, "chosen": one.chosen, "auto": one.auto,
             "full": one.full, "each": one.each}
            for seed, found in rows.items() for one in found
        ]  # fmt: skip
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")
    bad = [seed for seed, found in rows.items() if max(map(_of_full, found)) > SLOWER]
    if bad:
        sys.exit(f"above {SLOWER} x full with seeds {bad}")


if __name__ == "__main__":
    main()
