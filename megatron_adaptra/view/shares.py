"""The picture of an iteration of all replicas, in stock and with shares of microbatches."""

from __future__ import annotations

from dataclasses import replace

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view.bars import Gantt, Groups
from megatron_adaptra.view.pipeline import pipeline_gantt


def shares_gantt(before: Timeline, after: Timeline, conditions: ReplicaConditions) -> Gantt:
    """Both iterations on one time axis: the rows of `before`, then those of `after`.

    The mark with the length stands at the end of `after`. `conditions`: for notes on slow workers.
    """
    parts = [pipeline_gantt(one, one.makespan, conditions) for one in (before, after)]
    first, second = parts
    assert first.groups is not None  # there are several replicas
    bars, rows = len(first.bars), first.rows
    moved = tuple(
        arrow._replace(
            source=arrow.source + rows,
            target=arrow.target + rows,
            joins=arrow.joins and (arrow.joins[0] + bars, arrow.joins[1] + bars),
        )
        for arrow in second.arrows
    )
    groups = first.groups
    return replace(
        second,
        noun="",
        rows=2 * first.rows,
        bars=first.bars + tuple(replace(bar, row=bar.row + first.rows) for bar in second.bars),
        arrows=first.arrows + moved,
        name=f"{before.name}, then {after.name}",
        names=tuple(f"{part.name} {name}" for part in parts for name in part.names),
        groups=Groups(groups.noun, groups.size, 2 * groups.colours, groups.samples),
        notes=dict(first.notes) | {row + first.rows: text for row, text in second.notes.items()},
    )
