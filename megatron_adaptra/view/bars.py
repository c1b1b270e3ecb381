"""What a picture of time shows, whatever draws it: bars on rows, and arrows between rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_adaptra.view.theme import lighter


class Category(NamedTuple):
    """What bars of one colour have in common: its `name` and its colour, `fill` (`#rrggbb`).

    In a picture of text, `filling` is the character that fills a bar, and `sample` what stands in
    the bar of the legend. `code`: the letter that labels begin with, if they do.
    """

    name: str
    fill: str
    filling: str
    sample: str
    code: str = ""


@dataclass(frozen=True)
class Bar:
    """What was done on row `row` from `start` to `end`, in seconds.

    `title`: its name in full, shown when pointed at. `inside`: what is written in the bar, if it
    fits, else the next. `plain`: the same where no colour shows the category; the last one always
    fits. All three follow from `label` where they are not given. `shade`: 0, or by how many steps
    the colour is lighter than the category's. `details`: what else a trace shows, by name.
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
    details: Mapping[str, int] = field(default_factory=dict)

    @property
    def fill(self) -> str:
        """Its colour."""
        return lighter(self.category.fill, self.shade)


class Arrow(NamedTuple):
    """A message that left row `source` when it was `sent`, and was on row `target` at `arrived`.

    `posted`: when the receiver was ready for it, where that was measured. `joins`: the indices of
    the bars that made and used it, where both are there. Times are seconds.
    """

    source: int
    target: int
    label: str
    sent: float
    arrived: float
    posted: float | None = None
    joins: tuple[int, int] | None = None


class Shading(NamedTuple):
    """What lighter bars mean: `name` is what shades count, shown in the colours of `category`.

    In a picture of text `samples` stand for `meaning`.
    """

    name: str
    category: Category
    samples: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class Gantt:
    """Bars and arrows on so many `rows`, each of which is a `noun` with a number: `stage 0`.

    `categories`: all that there may be, in the order of the legend. `shading`: where bars have
    shades. `finish`: where the mark with the length stands, in seconds from the first start; None
    for the last end.
    """

    noun: str
    rows: int
    categories: tuple[Category, ...]
    bars: tuple[Bar, ...]
    arrows: tuple[Arrow, ...] = ()
    name: str = ""
    finish: float | None = None
    shading: Shading | None = None

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
        """Where the mark stands, in seconds from the first start."""
        return self.makespan if self.finish is None else self.finish

    def row_name(self, row: int) -> str:
        """What stands beside that `row`."""
        return f"{self.noun} {row}"
