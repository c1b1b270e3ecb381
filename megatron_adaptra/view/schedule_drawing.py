"""The picture of a schedule: its simulated timeline, and its figures stage by stage."""

from __future__ import annotations

from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view.axis import ms, number
from megatron_adaptra.view.drawing import Drawing, Table
from megatron_adaptra.view.pipeline import pipeline_gantt


def schedule_drawing(
    name: str, job: str, why: str, timeline: Timeline, bound: float | None = None
) -> Drawing:
    """What `adaptra draw` shows.

    Args:
        name: of the schedule, such as its policy.
        job: what it was planned for, in a sentence.
        why: why it was planned so, in a sentence.
        timeline: of one simulated iteration.
        bound: seconds that no schedule beats; None where that is not known.
    """
    makespan = timeline.makespan
    compute = timeline.pipeline  # the shares are of the pipeline, as the step is not its matter
    busy = [timeline.busy(stage) for stage in range(timeline.stages)]
    peaks = timeline.peak_in_flight()
    figures = [(ms(makespan), "an iteration, predicted")]
    if bound:
        figures.append((ms(bound), "no schedule is faster"))
    if compute > 0:
        idle = 1 - sum(busy) / len(busy) / compute
        figures.append((f"{100 * idle:.1f} %", "of the time a stage waits, on average"))
    if peaks:
        figures.append((number(max(peaks)), "microbatches' activations on one stage at most"))
    rows = [
        (
            f"stage {stage}",
            ms(b),
            f"{100 * b / compute:.1f} %" if compute > 0 else "",
            ms(compute - b),
            number(peak),
        )
        for stage, (b, peak) in enumerate(zip(busy, peaks, strict=True))
    ]
    head = ("", "compute", "share", "waiting", "peak in flight")
    return Drawing(
        name,
        job,
        why,
        pipeline_gantt(timeline, makespan),
        bound,
        "The iteration",
        figures,
        Table("Stage by stage", head, rows),
    )
