"""What the colours of timelines mean: the kinds of op and the lines that occur in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.timeline import Message, Timeline
from megatron_adaptra.view.svg.markup import element, text
from megatron_adaptra.view.theme import MESSAGE, OP_FILL, OP_NAME, op_fill

SLOW = 0.008  # a message under way for this share of the scale is drawn


class Key(NamedTuple):
    """One entry: boxes of these colours, or a line."""

    words: str
    fills: tuple[str, ...]
    line: bool = False


def slow_messages(timeline: Timeline, seconds: float) -> list[Message]:
    """The messages worth a line on an axis of that length; the others would stand upright."""
    return [m for m in timeline.messages if m.arrived - m.sent >= SLOW * seconds]


def keys(timelines: Sequence[Timeline], seconds: float) -> list[Key]:
    kinds = {span.op.kind for timeline in timelines for span in timeline.spans}
    out = [Key(_words(kind), (fill,)) for kind, fill in OP_FILL.items() if kind in kinds]
    chunks = 1 + max((s.op.chunk for t in timelines for s in t.spans), default=0)
    if chunks > 1:
        words = "chunk " + ", ".join(map(str, range(chunks)))
        out.append(Key(words, tuple(op_fill(Kind.F, chunk) for chunk in range(chunks))))
    if any(slow_messages(timeline, seconds) for timeline in timelines):
        out.append(Key("message on a slow link", (MESSAGE,), line=True))
    return out


def legend_html(timelines: Sequence[Timeline], seconds: float) -> str:
    items = []
    for key in keys(timelines, seconds):
        if key.line:
            signs = [f'<i class="message" style="border-color:{key.fills[0]}"></i>']
        else:
            signs = [f'<i style="background:{fill}"></i>' for fill in key.fills]
        items.append(element("span", *signs, text(key.words)))
    return element("p", *items, class_="legend")


def legend_svg(timeline: Timeline, seconds: float, x: float, y: float) -> list[str]:
    """One line of boxes and words, from `x` on, for a drawing that stands alone."""
    parts = []
    for key in keys([timeline], seconds):
        for fill in key.fills:
            if key.line:
                parts.append(_stroke(x, y, fill))
            else:
                parts.append(element("rect", x=x, y=y - 9, width=11, height=11, rx=2, fill=fill))
            x += 14.0
        x += 3.0
        parts.append(element("text", text(key.words), x=x, y=y, font_size=11, fill_opacity=0.8))
        x += 6.0 * len(key.words) + 14
    return parts


def _stroke(x: float, y: float, colour: str) -> str:
    middle = y - 4
    return element("line", x1=x, x2=x + 12, y1=middle, y2=middle, stroke=colour, stroke_width=2)


def _words(kind: Kind) -> str:
    return OP_NAME[kind] if kind is Kind.STEP else f"{kind.value} {OP_NAME[kind]}"
