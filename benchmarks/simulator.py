"""How long lowering, checking and simulating 1F1B takes: `python benchmarks/simulator.py`."""

from __future__ import annotations

from typing import Any

from common import job, main, median_ms

from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan import make_plan
from megatron_adaptra.sim.clock import simulate

SIZES = ((4, 12), (8, 24), (16, 128), (64, 512))


def rows(runs: int) -> list[dict[str, Any]]:
    out = []
    for stages, count in SIZES:
        c = job(stages, count, {stages // 2: 60.0})
        schedule = make_plan(c, "1f1b").schedule
        program = lower(schedule)
        row: dict[str, Any] = {
            "p x m": f"{stages} x {count}",
            "ops": sum(map(len, schedule.order)),
            "lower ms": median_ms(lambda s=schedule: lower(s), runs),
            "check ms": median_ms(lambda p=program: check(p), runs),
        }
        for sends in SENDS:
            row[f"{sends} ms"] = median_ms(
                lambda p=program, c=c, sends=sends: simulate(p, c, sends), runs
            )
        shared = job(stages, count, {stages // 2: 60.0}, cores=stages / 2)
        row["shared cores ms"] = median_ms(lambda p=program, c=shared: simulate(p, c), runs)
        out.append(row)
    return [*out, crossed(runs)]


def crossed(runs: int, replicas: int = 8, stages: int = 8, count: int = 32) -> dict[str, Any]:
    """1F1B of several replicas, in which every message goes to another replica's worker."""
    order = [
        tuple(op._replace(home=(replica + stage) % replicas) for op in line)
        for replica in range(replicas)
        for stage, line in enumerate(warmup_line(stages - s, count) for s in range(stages))
    ]
    schedule = Schedule(tuple(order), count, replicas=replicas)
    program, c = lower(schedule), ReplicaConditions(job(stages, count, {}), replicas)
    row: dict[str, Any] = {
        "p x m": f"{replicas} replicas of {stages} x {count}",
        "ops": sum(map(len, order)),
        "lower ms": median_ms(lambda: lower(schedule), runs),
        "check ms": median_ms(lambda: check(program), runs),
    }
    for sends in SENDS:
        row[f"{sends} ms"] = median_ms(lambda sends=sends: simulate(program, c, sends), runs)
    return {**row, "shared cores ms": "-"}


if __name__ == "__main__":
    main("Simulator", rows)
