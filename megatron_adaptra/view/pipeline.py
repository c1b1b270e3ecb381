"""A pipeline's timeline, or two of them, as bars and arrows: a row per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_adaptra.ir.deps import position_of
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Routes, worker_name
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.view.bars import Arrow, Bar, Category, Gantt, Groups, Shading
from megatron_adaptra.view.theme import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    ROSE,
    TEAL,
    YELLOW,
    group_colour,
)

CATEGORY = {
    Kind.F: Category("forward", BLUE, "-", "F0", "F"),
    Kind.B: Category("backward", ORANGE, "=", "B0", "B"),
    Kind.I: Category("input gradient", YELLOW, "~", "I0", "I"),
    Kind.W: Category("weight gradient", TEAL, "+", "W0", "W"),
    Kind.R: Category("recompute", PURPLE, "*", "R0", "R"),
    Kind.STEP: Category("optimizer step", GREY, "#", "T"),
    Kind.SYNC: Category("collective of the step", ROSE, "x", "X", "X"),
}
_CHUNKS = Shading("chunk", CATEGORY[Kind.F], ("F0.1", "f0", "f"), "forward of a later chunk")
_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.POST_F})
_BACKWARD = frozenset({Kind.B, Kind.I})


def pipeline_gantt(
    timeline: Timeline,
    finish: float | None = None,
    conditions: ReplicaConditions | None = None,
) -> Gantt:
    """All spans and messages, one row per stage; of several replicas, per worker.

    What a worker runs of another replica's microbatches has a stripe of that replica's colour.

    Args:
        timeline: predicted or measured.
        finish: where the mark with the length stands, in seconds from the first start; None for the
            end of the first stage.
        conditions: of the replicas, for notes on workers that are slow or dead; None where they
            are not known.
    """
    several, stages = timeline.replicas > 1, timeline.stages
    gone = conditions.failed if conditions else frozenset()
    if gone:  # no worker that is dead takes part in the step
        timeline = replace(timeline, spans=tuple(s for s in timeline.spans if s.stage not in gone))
    find = _Ops(timeline)
    return Gantt(
        noun="worker" if several else "stage",
        rows=timeline.workers,
        categories=tuple(CATEGORY.values()),
        bars=tuple(_op_bar(span, stages) for span in timeline.spans),
        arrows=tuple(
            Arrow(m.source, m.target, str(m.op), m.sent, m.arrived, m.posted, find.ends(m))
            for m in timeline.messages
        ),
        name=timeline.name,
        finish=timeline.iteration if finish is None else finish,
        shading=_CHUNKS,
        names=tuple(worker_name(w, stages) for w in range(timeline.workers * several)),
        groups=_groups(timeline) if several else None,
        notes=_notes(conditions) if conditions else {},
        gone=gone,
    )


def _groups(timeline: Timeline) -> Groups:
    colours = tuple(map(group_colour, range(timeline.replicas)))
    return Groups("replica", timeline.stages, colours, ("F0@1", "@1", "f"))


def _notes(conditions: ReplicaConditions) -> Mapping[int, str]:
    notes = dict.fromkeys(conditions.failed, "dead")
    for worker, times in conditions.slow.items():
        words = f"{times:.3g}x slow" if times > 1 else f"{1 / times:.3g}x fast"
        if times != 1:
            notes.setdefault(worker, words)
    for worker in conditions.ports:
        notes.setdefault(worker, "slow port")
    return notes


def _op_bar(span: Span, stages: int) -> Bar:
    op, category = span.op, CATEGORY[span.op.kind]
    guest = op.home is not None and op.home != span.stage // stages
    step = op.kind is Kind.STEP
    return Bar(
        span.stage,
        str(op),
        span.start,
        span.end,
        category,
        title="step" if step else f"{op} {category.name}",
        inside=("step",) if step else _inside(op, guest),
        plain=_plain(op, guest),
        shade=op.chunk,
        owner=op.home if guest else None,
        details={
            "microbatch": op.microbatch,
            "chunk": op.chunk,
            **({} if op.home is None else {"home": op.home}),
        },
    )


def _inside(op: Op, guest: bool) -> tuple[str, ...]:
    """The home stands with what a worker runs for others alone."""
    short = str(op._replace(home=None))
    return (str(op), short, str(op.microbatch)) if guest else (short, str(op.microbatch))


def _plain(op: Op, guest: bool) -> tuple[str, ...]:
    """A small letter is short for a later chunk, or for a microbatch of another replica."""
    letter = op.kind.value
    if not op.kind.computes:
        return (letter,)
    if op.chunk:
        return str(op), f"{letter.lower()}{op.microbatch}", letter.lower()
    if guest:
        return str(op), f"@{op.home}", letter.lower()
    return str(op._replace(home=None)), letter


class _Ops:
    """Finds the spans at the two ends of a message."""

    def __init__(self, timeline: Timeline) -> None:
        self.routes = Routes(max(1, timeline.stages), replicas=timeline.replicas)
        self.spans: dict[tuple[bool, int, int, int | None], int] = {}
        for i, (stage, op, _, _) in enumerate(timeline.spans):
            forward = op.kind is Kind.F
            if forward or op.kind in _BACKWARD:
                self.spans[forward, position_of(op, stage, self.routes), op.microbatch, op.home] = i

    def ends(self, message: Message) -> tuple[int, int] | None:
        """The indices of the two, if both are there."""
        op = message.op
        forward = op.kind in _FORWARD
        here = position_of(op, message.source, self.routes)
        there = here + 1 if forward else here - 1
        made = self.spans.get((forward, here, op.microbatch, op.home))
        used = self.spans.get((forward, there, op.microbatch, op.home))
        return None if made is None or used is None else (made, used)


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
