"""What the colours of timelines mean: the kinds of op and the lines that occur in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.timeline import Message, Timeline
from megatron_adaptra.view.theme import MESSAGE, OP_FILL, OP_NAME, op_fill

SLOW = 0.008  # a message under way for this share of the scale is drawn


class Key(NamedTuple):
    """One entry: boxes of these colours, or a line."""

    words: str
    fills: tuple[str, ...]
    line: bool = False


def slow_messages(timeline: Timeline, seconds: float) -> list[Message]:
    """The messages worth a line on an axis of `seconds`; the others would stand upright."""
    return [m for m in timeline.messages if m.arrived - m.sent >= SLOW * seconds]


def legend_keys(timelines: Sequence[Timeline], seconds: float) -> list[Key]:
    """The entries of a legend for all `timelines` together, drawn on an axis of `seconds`."""
    kinds = {span.op.kind for timeline in timelines for span in timeline.spans}
    out = [Key(_words(kind), (fill,)) for kind, fill in OP_FILL.items() if kind in kinds]
    chunks = 1 + max((s.op.chunk for t in timelines for s in t.spans), default=0)
    if chunks > 1:
        words = "chunk " + ", ".join(map(str, range(chunks)))
        out.append(Key(words, tuple(op_fill(Kind.F, chunk) for chunk in range(chunks))))
    if any(slow_messages(timeline, seconds) for timeline in timelines):
        out.append(Key("message on a slow link", (MESSAGE,), line=True))
    return out


def _words(kind: Kind) -> str:
    return OP_NAME[kind] if kind is Kind.STEP else f"{kind.value} {OP_NAME[kind]}"
