"""A simulated all-reduce as bars: what each rank's port sends, and what it receives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_adaptra.ir.collective import Action, CollectivePlan
from megatron_adaptra.sim.ports import CollectiveRun
from megatron_adaptra.view.axis import ms
from megatron_adaptra.view.bars import Arrow, Bar, Category, Gantt
from megatron_adaptra.view.drawing import Drawing, Table
from megatron_adaptra.view.theme import BLUE, GREY, ORANGE, PURPLE, TEAL

_LATE = Category("not there yet", GREY, "~", "~", "")
_SENT = {
    Action.PART: Category("sends parts", BLUE, "-", "P", "P"),
    Action.SUM: Category("sends sums", TEAL, "=", "S", "S"),
}
_RECEIVED = {
    Action.PART: Category("receives parts, to add", ORANGE, "+", "A", "A"),
    Action.SUM: Category("receives sums", PURPLE, "*", "R", "R"),
}
_ALONE = 1 / 60  # of the whole time: a shorter bar is one with those of its kind beside it
_BREAK = 1 / 100  # of the whole time: a longer pause between two bars is seen
_ARROWS = 120  # more of them hide the bars


class _Span(NamedTuple):
    row: int
    category: Category
    label: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """Seconds."""
        return self.end - self.start


def all_reduce_drawing(plan: CollectivePlan, run: CollectiveRun, job: str, bound: float) -> Drawing:
    """What `adaptra draw --allreduce` shows.

    Args:
        plan: what was run.
        run: of it, on the clock of ports.
        job: what is reduced, over which ports, in a sentence.
        bound: seconds after the last arrival that no plan beats.
    """
    gantt = all_reduce_gantt(plan, run)
    last, whole = max(run.arrivals), max(run.ends)
    figures = [
        (ms(run.after_arrival), "from the last arrival to the end, predicted"),
        (ms(bound), "no plan is faster"),
        (str(len(run.transfers)), "messages"),
    ]
    rows = []
    for rank, (came, end) in enumerate(zip(run.arrivals, run.ends, strict=True)):
        sent = sum(t.left - t.sent for t in run.transfers if t.source == rank)
        got = sum(t.arrived - t.began for t in run.transfers if t.target == rank)
        shares = [
            f"{ms(busy)}, {100 * busy / whole:.0f} %" if whole else "" for busy in (sent, got)
        ]
        rows.append((f"rank {rank}", ms(came), *shares, ms(end)))
    head = ("", "comes at", "sends for", "receives for", "ends at")
    name = plan.name or "collective plan"
    table = Table("Rank by rank", head, rows)
    return Drawing(name, job, plan.why, gantt, last + bound, "The all-reduce", figures, table)


def all_reduce_gantt(plan: CollectivePlan, run: CollectiveRun) -> Gantt:
    """Two rows per rank: what its port sends, and what it receives.

    Short messages of one kind, one after another, are one bar. Where there are few messages, each
    is an arrow, too.
    """
    whole = max(run.ends)
    spans = [
        _Span(2 * rank, _LATE, "late", 0.0, came) for rank, came in enumerate(run.arrivals) if came
    ]
    arrows = []
    for t in run.transfers:
        label = str(t.op)
        spans.append(_Span(2 * t.source, _SENT[t.op.action], label, t.sent, t.left))
        received = _RECEIVED[t.op.action]
        spans.append(_Span(2 * t.target + 1, received, label, t.began, t.arrived))
        arrows.append(Arrow(2 * t.source, 2 * t.target + 1, label, t.left, t.arrived))
    return Gantt(
        noun="rank",
        rows=2 * plan.ranks,
        categories=(_LATE, *_SENT.values(), *_RECEIVED.values()),
        bars=tuple(_bars(spans, whole)),
        arrows=tuple(arrows) if len(arrows) <= _ARROWS else (),
        name=plan.name or "collective plan",
        finish=whole,
        names=tuple(f"{rank} {side}" for rank in range(plan.ranks) for side in ("out", "in")),
    )


def _bars(spans: Iterable[_Span], whole: float) -> list[Bar]:
    """A long span is a bar; short ones that touch are one, in the colour of most of them."""
    seen, pause = _ALONE * whole, _BREAK * whole
    groups: list[list[_Span]] = []

    def joins(group: list[_Span], span: _Span) -> bool:
        return (
            group[-1].row == span.row
            and span.start - group[-1].end < pause
            and max(group[0].length, span.length) < seen
        )

    # First as long as a bar has to be to be seen; then with those beside it of the same colour.
    slots: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: (span.row, span.start)):
        if slots and joins(slots[-1], span) and slots[-1][-1].end - slots[-1][0].start < seen:
            slots[-1].append(span)
        else:
            slots.append([span])
    for slot in slots:
        if groups and joins(groups[-1], slot[0]) and _most(groups[-1]) == _most(slot):
            groups[-1] += slot
        else:
            groups.append(slot)
    return [_bar(group) for group in groups]


def _most(group: Sequence[_Span]) -> Category:
    """The category that takes most of the time."""
    spent: dict[Category, float] = defaultdict(float)
    for span in group:
        spent[span.category] += span.length
    return max(spent, key=lambda category: (spent[category], category))


def _bar(group: Sequence[_Span]) -> Bar:
    first, count, category = group[0], len(group), _most(group)
    label, title = first.label, f"{first.label}: {category.name}"
    inside = (label, category.code) if category.code else (label,)
    if count > 1:
        each = Counter(span.category for span in group)
        title = ", ".join(f"{one.name} {number}×" for one, number in each.most_common())
        label, inside = f"{category.code}×{count}", (title, f"{count}×")
    return Bar(
        first.row,
        label,
        first.start,
        group[-1].end,
        category,
        title,
        inside,
        (category.code or category.filling,),
        details={"messages": count},
    )
