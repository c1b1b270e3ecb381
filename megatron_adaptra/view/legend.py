"""Legends of Gantts: the meaning of the colours and lines that occur in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_adaptra.view.bars import Arrow, Category, Gantt
from megatron_adaptra.view.theme import MESSAGE, lighter

SLOW = 0.008  # a message under way for this share of the scale is drawn


class Key(NamedTuple):
    """A key shows one entry of a legend: boxes of these colours, or a line."""

    words: str
    fills: tuple[str, ...]
    line: bool = False


def slow_messages(gantt: Gantt, seconds: float) -> list[Arrow]:
    """Return the messages slow enough for a line on an axis of `seconds`; others look upright."""
    return [arrow for arrow in gantt.arrows if arrow.arrived - arrow.sent >= SLOW * seconds]


def categories_in(gantts: Sequence[Gantt]) -> list[Category]:
    """Return the categories that bars of the `gantts` have, in the order of a legend."""
    used = {bar.category for gantt in gantts for bar in gantt.bars}
    known = dict.fromkeys(category for gantt in gantts for category in gantt.categories)
    return [category for category in known if category in used]


def legend_keys(gantts: Sequence[Gantt], seconds: float) -> list[Key]:
    """The entries of a legend for all `gantts` together, drawn on an axis of `seconds`."""
    out = [Key(f"{c.code} {c.name}".strip(), (c.fill,)) for c in categories_in(gantts)]
    shades = 1 + max((bar.shade for gantt in gantts for bar in gantt.bars), default=0)
    for shading in dict.fromkeys(gantt.shading for gantt in gantts):
        if shading and shades > 1:
            words = f"{shading.name} " + ", ".join(map(str, range(shades)))
            out.append(Key(words, tuple(lighter(shading.category.fill, i) for i in range(shades))))
    for groups in dict.fromkeys(gantt.groups for gantt in gantts):
        owners = sorted({one for gantt in gantts for one in gantt.owners()})
        if groups and owners:
            fills = tuple(groups.colours[one] for one in owners)
            out.append(Key(f"stripe: of {groups.names(owners)}", fills))
    if any(slow_messages(gantt, seconds) for gantt in gantts):
        out.append(Key("message on a slow link", (MESSAGE,), line=True))
    return out
