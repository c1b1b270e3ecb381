"""The content of a picture of time, for all renderers: bars on rows, arrows, and their legend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_adaptra.view.theme import MESSAGE, lighter

SLOW = 0.008  # a message under way for this share of the scale is drawn


class Category(NamedTuple):
    """A category groups the bars of one colour.

    Args:
        name: what the bars show, for the legend.
        fill: their colour, `#rrggbb`.
        filling: in a picture of text, the character that fills a bar.
        sample: in a picture of text, what stands in the bar of the legend.
        code: the letter that labels begin with; empty for none.
    """

    name: str
    fill: str
    filling: str
    sample: str
    code: str = ""


@dataclass(frozen=True)
class Bar:
    """A bar shows a piece of work on one row.

    Args:
        row: number of the row, from 0 at the top.
        label: the short name of the work.
        start, end: seconds.
        category: gives the colour.
        title: the full name of the work, shown when pointed at.
        inside: what is written in the bar: the first of these that fits.
        plain: the same where no colour shows the category; the last one always fits.
        shade: 0, or by how many steps the colour is lighter than the category's.
        owner: the group of rows that the work belongs to; None for the group of its own row.
        details: what else a trace shows, by name.

    `title`, `inside` and `plain` follow from `label` where they are empty.
    """

    row: int
    label: str
    start: float
    end: float
    category: Category
    title: str = ""
    inside: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    shade: int = 0
    owner: int | None = None
    details: Mapping[str, int] = field(default_factory=dict)

    @property
    def fill(self) -> str:
        """The bar's colour."""
        return lighter(self.category.fill, self.shade)


class Arrow(NamedTuple):
    """A message from one row to another.

    Args:
        source, target: rows.
        label: what it carries: the text form of an op.
        sent: when it left the source, in seconds.
        arrived: when the target had it, in seconds.
        posted: when the receive was posted, in seconds; None where that was not measured.
        joins: indices, in the Gantt's bars, of the bars that made and used the message; None where
            one of the two is missing.
    """

    source: int
    target: int
    label: str
    sent: float
    arrived: float
    posted: float | None = None
    joins: tuple[int, int] | None = None


class Shading(NamedTuple):
    """A shading explains lighter bars: shades of the colour of `category` are numbers of `name`.

    In a picture of text `samples` stand for `meaning`.
    """

    name: str
    category: Category
    samples: tuple[str, ...]
    meaning: str


class Groups(NamedTuple):
    """Rows that belong together, each group `size` of them, from the top.

    Work that a row does for another group has a stripe of that group's colour.

    Args:
        noun: what a group is; with its number it names the group: `replica 1`.
        size: rows of each.
        colours: of each, `#rrggbb`, to be seen on that of any bar.
        samples: in a picture of text, what stands in bars of another group's work.
    """

    noun: str
    size: int
    colours: tuple[str, ...]
    samples: tuple[str, ...] = ()

    def names(self, numbers: Iterable[int]) -> str:
        """The groups of these `numbers`: `replica 0, 2`."""
        return f"{self.noun} {', '.join(map(str, numbers))}"


@dataclass(frozen=True)
class Gantt:
    """Bars and arrows on rows, over time.

    Args:
        noun: what a row is; with its number, or its name, it names the row: `stage 0`. Empty where
            names stand alone.
        rows: how many there are.
        categories: all that bars may have, in the order of the legend.
        bars: in any order; times count from the first start.
        arrows: messages between rows.
        name: of the whole, for people; empty for none.
        finish: where the mark with the length stands, in seconds from the first start; None for the
            last end.
        shading: what shades of bars mean; None where there are none.
        names: of the rows, after the noun; empty for their numbers.
        groups: of rows; None where they are all alike.
        notes: by row, what is unusual about it, in a few words.
        gone: rows on which nothing can run.
    """

    noun: str
    rows: int
    categories: tuple[Category, ...]
    bars: tuple[Bar, ...]
    arrows: tuple[Arrow, ...] = ()
    name: str = ""
    finish: float | None = None
    shading: Shading | None = None
    names: tuple[str, ...] = ()
    groups: Groups | None = None
    notes: Mapping[int, str] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()

    @property
    def begin(self) -> float:
        """The first start, in seconds."""
        return min((bar.start for bar in self.bars), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((bar.end for bar in self.bars), default=0.0) - self.begin

    @property
    def length(self) -> float:
        """The place of the mark, in seconds from the first start."""
        return self.makespan if self.finish is None else self.finish

    def row_name(self, row: int) -> str:
        """Return the name that stands beside that `row`, such as `stage 0`."""
        return f"{self.noun} {self.short_name(row)}".lstrip()

    def short_name(self, row: int) -> str:
        """Return the name of `row` without the noun."""
        return self.names[row] if self.names else str(row)

    def row_title(self, row: int) -> str:
        """Return the name of `row`, and what is unusual about it."""
        return ", ".join(filter(None, (self.row_name(row), self.notes.get(row))))

    def stripe(self, bar: Bar | None) -> str | None:
        """Return the colour of the group that owns the `bar`'s work; None for its row's own."""
        if bar is None or bar.owner is None or self.groups is None:
            return None
        return self.groups.colours[bar.owner]

    def starts_group(self, row: int) -> bool:
        """Return whether the `row` is the first of its group, except for row 0."""
        return row > 0 and self.groups is not None and row % self.groups.size == 0

    def owners(self) -> list[int]:
        """Return the groups whose work is done on rows of other groups."""
        return sorted({bar.owner for bar in self.bars if bar.owner is not None})


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
