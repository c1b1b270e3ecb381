"""The record of a run, given to a remedy that was made as the run's was."""

from __future__ import annotations

from typing import Any

from run_records import Recorded

from megatron_adaptra.adapt.pipeline.remedy import PipelineRemedy
from megatron_adaptra.adapt.routes.remedy import RouteRemedy
from megatron_adaptra.ir.schedule import Schedule


def replayed(run: Recorded, remedy: PipelineRemedy | RouteRemedy) -> list[tuple[int, str]]:
    """The iterations whose reports lead to a plan, and the plans as text."""
    now = Schedule.from_json(run.about["now"])
    swaps = {d["iteration"]: Schedule.parse(d["plan"]) for d in run.decisions}
    found: list[Any] = []
    for iteration, row in run.iterations.items():
        ran, now = now, swaps.get(iteration, now)
        if iteration == run.about["iteration"]:
            continue
        changed = remedy.measure(iteration, dict(enumerate(row.reports)), ran)
        if iteration in swaps:
            remedy.swapped(found[-1][1], iteration)
        due = [d for d in run.decisions if d["detected"] < iteration <= d["iteration"]]
        change = remedy.plan(iteration, changed, now, possible=not due)
        if change is not None:
            found.append((iteration, change))
    return [(iteration, change.plan.schedule.text()) for iteration, change in found]
