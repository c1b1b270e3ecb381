"""The record of a run, given to a replanner that was made as the run's was."""

from __future__ import annotations

from typing import Any

from megatron_adaptra.adapt.pipeline.replanner import PipelineReplanner
from megatron_adaptra.adapt.record import Recorded
from megatron_adaptra.adapt.routes.replanner import RouteReplanner
from megatron_adaptra.ir.schedule import Schedule


def replayed(run: Recorded, replanner: PipelineReplanner | RouteReplanner) -> list[tuple[int, str]]:
    """The iterations whose reports lead to a plan, and the plans as text."""
    now = Schedule.from_json(run.about["now"])
    swaps = {d["iteration"]: Schedule.parse(d["plan"]) for d in run.decisions}
    found: list[Any] = []
    for iteration, row in run.iterations.items():
        ran, now = now, swaps.get(iteration, now)
        if iteration == run.about["iteration"]:
            continue
        changed = replanner.observe(iteration, row.reports, ran)
        if iteration in swaps:
            replanner.swapped(found[-1][1], iteration)
        due = [d for d in run.decisions if d["detected"] < iteration <= d["iteration"]]
        change = replanner.propose(iteration, changed, now, possible=not due)
        if change is not None:
            found.append((iteration, change))
    return [(iteration, change.plan.schedule.text()) for iteration, change in found]
