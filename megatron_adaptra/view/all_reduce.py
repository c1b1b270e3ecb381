"""A simulated all-reduce as bars: what each rank's port sends, and what it receives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_adaptra.ir.collective import Action, CollectivePlan
from megatron_adaptra.sim.ports import CollectiveRun
from megatron_adaptra.view.bars import Arrow, Bar, Category, Gantt
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
        last = t.op.piece + t.op.length - 1
        piece = str(t.op.piece) + f"-{last}" * (last > t.op.piece)
        sent, received = _SENT[t.op.action], _RECEIVED[t.op.action]
        label = f"{sent.code}{piece}>{t.target}"
        into = f"{received.code}{piece}<{t.source}"
        spans.append(_Span(2 * t.source, sent, label, t.sent, t.left))
        spans.append(_Span(2 * t.target + 1, received, into, t.began, t.arrived))
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
        (label, category.code or category.filling),
        details={"messages": count},
    )
