"""A pipeline's timeline as bars and arrows: one row per stage, one category per kind of op."""

from __future__ import annotations

from megatron_adaptra.ir.deps import position_of
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.routes import Routes, worker_name
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.view.bars import Arrow, Bar, Category, Gantt, Shading
from megatron_adaptra.view.theme import BLUE, GREY, ORANGE, PURPLE, ROSE, TEAL, YELLOW

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


def pipeline_gantt(timeline: Timeline, finish: float | None = None) -> Gantt:
    """All spans and messages, one row per stage; of several replicas, per worker.

    Args:
        timeline: predicted or measured.
        finish: where the mark with the length stands, in seconds from the first start; None for the
            end of the first stage.
    """
    find, several = _Ops(timeline), timeline.replicas > 1
    return Gantt(
        noun="worker" if several else "stage",
        rows=timeline.workers,
        categories=tuple(CATEGORY.values()),
        bars=tuple(_bar(span) for span in timeline.spans),
        arrows=tuple(
            Arrow(m.source, m.target, str(m.op), m.sent, m.arrived, m.posted, find.ends(m))
            for m in timeline.messages
        ),
        name=timeline.name,
        finish=timeline.iteration if finish is None else finish,
        shading=_CHUNKS,
        names=tuple(worker_name(w, timeline.stages) for w in range(timeline.workers * several)),
    )


def _bar(span: Span) -> Bar:
    op, category = span.op, CATEGORY[span.op.kind]
    step = op.kind is Kind.STEP
    return Bar(
        span.stage,
        str(op),
        span.start,
        span.end,
        category,
        title="step" if step else f"{op} {category.name}",
        inside=("step",) if step else (str(op), str(op.microbatch)),
        plain=_plain(op),
        shade=op.chunk,
        details={"microbatch": op.microbatch, "chunk": op.chunk},
    )


def _plain(op: Op) -> tuple[str, ...]:
    """A small letter is short for a later chunk."""
    letter = op.kind.value
    if not op.kind.computes:
        return (letter,)
    if op.chunk:
        return str(op), f"{letter.lower()}{op.microbatch}", letter.lower()
    return str(op), letter


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
