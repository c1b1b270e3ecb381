"""The picture of a schedule: its simulated timeline, and its figures stage by stage."""

from __future__ import annotations

from collections import Counter

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view.axis import ms, number
from megatron_adaptra.view.drawing import Drawing
from megatron_adaptra.view.html.page import Table
from megatron_adaptra.view.pipeline import pipeline_gantt


def schedule_drawing(
    name: str,
    job: str,
    why: str,
    timeline: Timeline,
    bound: float | None = None,
    conditions: ReplicaConditions | None = None,
) -> Drawing:
    """Return the drawing that `adaptra draw` shows.

    Args:
        name: of the schedule, such as its policy.
        job: the job that it was planned for, in a sentence.
        why: why it was planned so, in a sentence.
        timeline: of one simulated iteration.
        bound: seconds that no schedule beats; None where that is not known.
        conditions: of several replicas; None for one, or where they are not known.
    """
    makespan = timeline.makespan
    gantt = pipeline_gantt(timeline, makespan, conditions)
    compute = timeline.pipeline  # shares are of the pipeline's time, without the optimizer step
    busy = [timeline.busy(worker) for worker in range(timeline.workers)]
    peaks = timeline.peak_in_flight()
    figures = [(ms(makespan), "an iteration, predicted")]
    if bound:
        figures.append((ms(bound), "no schedule is faster"))
    if compute > 0:
        alive = len(busy) - len(gantt.gone)
        idle = 1 - sum(busy) / alive / compute
        words = f"of the time a {gantt.noun} waits, on average"
        figures.append((f"{100 * idle:.1f} %", words))
    if peaks:
        words = f"microbatches' activations on one {gantt.noun} at most"
        figures.append((number(max(peaks)), words))
    guests = Counter(bar.row for bar in gantt.bars if bar.owner is not None)
    several = gantt.groups is not None
    rows = [
        (
            gantt.row_title(row),
            ms(b),
            f"{100 * b / compute:.1f} %" if compute > 0 else "",
            ms(compute - b),
            number(peak),
            *([str(guests[row])] * several),
        )
        for row, (b, peak) in enumerate(zip(busy, peaks, strict=True))
        if row not in gantt.gone
    ]
    head = ("", "compute", "share", "waiting", "peak in flight", *["ops for others"] * several)
    return Drawing(
        name,
        job,
        why,
        gantt,
        bound,
        "The iteration",
        figures,
        Table(f"{gantt.noun.capitalize()} by {gantt.noun}", head, rows),
    )
