"""How long planning takes, and how near to the lower bound: `python benchmarks/planner.py`."""

from __future__ import annotations

from typing import Any

from common import job, main, median_ms

from megatron_adaptra.plan import make_plan

SIZES = ((4, 12), (8, 24), (16, 128), (64, 512))


def rows(runs: int) -> list[dict[str, Any]]:
    out = []
    for stages, count in SIZES:
        one = {stages // 2: 60.0}
        cases = {
            "one": (job(stages, count, one), "eager"),
            "one, rendezvous": (job(stages, count, one), "rendezvous"),
            "one, budget p + 1": (
                job(stages, count, one, activation_budget=(stages + 1,) * stages),
                "eager",
            ),
            "all": (
                job(stages, count, dict.fromkeys(range(stages - 1), 30.0)),
                "eager",
            ),
        }
        for name, (c, sends) in cases.items():
            plan = make_plan(c, sends=sends)
            stock = make_plan(c, "1f1b", sends)
            out.append(
                {
                    "p x m": f"{stages} x {count}",
                    "slow links": name,
                    "planning ms": median_ms(lambda c=c, s=sends: make_plan(c, sends=s), runs),
                    "1F1B / plan": stock.predicted / plan.predicted,
                    "plan / bound": plan.predicted / plan.lower_bound,
                    "deepest": plan.schedule.warmup[0],
                }
            )
    return out


if __name__ == "__main__":
    main("Planner", rows)
