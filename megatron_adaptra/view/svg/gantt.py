"""A Gantt as SVG.

Text and grid take the colour of the page (`currentColor`), so the picture fits a light and a dark
page; alone in a file it is black on nothing. With `seconds` given, several Gantts of the same width
have one scale, and an instant stands at one x in all of them.
"""

from __future__ import annotations

from megatron_adaptra.view.axis import ms, number, ticks
from megatron_adaptra.view.bars import Arrow, Bar, Gantt, legend_keys, slow_messages
from megatron_adaptra.view.markup import element, label, picture, rule, text
from megatron_adaptra.view.theme import BOX_TEXT, MESSAGE

LEFT, RIGHT = 62, 14  # least room for the rows' names, and for the last tick's label
LETTER, SHORT = 6.6, 8  # pixels of a letter of such a name; with so many letters LEFT is enough
APART = 12  # pixels between groups of rows, beyond those between rows
GONE = "#9aa4af"
_ALONE = (
    "svg{color:#1b2530;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e3e9ef;background:#1a212a}}"
)


def gantt_svg(
    gantt: Gantt,
    seconds: float | None = None,
    *,
    width: int = 1160,
    row: int = 24,
    title: str = "",
    axis: bool = True,
    alone: bool = False,
) -> str:
    """Rows with their bars, and slow messages between them, as an SVG element.

    Args:
        gantt: what to draw; times count from its first start.
        seconds: length of the time axis, so that several Gantts have one scale; None for the
            Gantt's own length.
        width: of the whole picture, in pixels.
        row: height of a row, in pixels.
        title: stands above the rows; the Gantt's name if empty.
        axis: whether a time axis in ms is drawn.
        alone: a file of its own, with a legend, a margin, and colours for light and dark pages.
    """
    return _Picture(gantt, seconds, width, row, title or gantt.name, axis, alone).svg()


class _Picture:
    def __init__(
        self, gantt: Gantt, seconds: float | None, width: int, row: int, title: str, axis: bool,
        alone: bool,
    ) -> None:  # fmt: skip
        self.gantt, self.title, self.axis = gantt, title, axis
        self.begin, self.finish = gantt.begin, gantt.length
        self.width, self.row, self.alone = width, row, alone
        self.seconds = seconds or gantt.makespan or 1.0
        self.gap = max(9, row * 2 // 3)
        longest = max((len(gantt.row_name(row)) for row in range(gantt.rows)), default=0)
        self.left = LEFT + LETTER * max(0, longest - SHORT) + 10 * (gantt.groups is not None)
        self.top = 26 if self.title else 8
        rows = max(1, gantt.rows)
        self.bottom = self.y(rows - 1) + row
        self.height = self.bottom + (26 if axis else 6) + (22 if alone else 0)

    def x(self, seconds: float) -> float:
        """Where a time of the axis stands."""
        return self.left + seconds / self.seconds * (self.width - self.left - RIGHT)

    def y(self, row: int) -> int:
        groups = self.gantt.groups
        return (
            self.top + row * (self.row + self.gap) + (row // groups.size * APART if groups else 0)
        )

    def svg(self) -> str:
        name = f"{self.title or 'timeline'}: {ms(self.finish)}"
        parts = [element("title", text(name)), *self.grid(), *self.labels()]
        parts += [self.line(arrow) for arrow in slow_messages(self.gantt, self.seconds)]
        parts += [self.box(bar) for bar in self.gantt.bars]
        parts += self.end()
        if self.alone:
            parts.insert(0, element("style", _ALONE))
            parts += _legend(self.gantt, self.seconds, self.left, self.height - 6)
        return picture(parts, self.width, self.height, "gantt", margin=14 * self.alone)

    def grid(self) -> list[str]:
        parts = []
        for tick in ticks(1e3 * self.seconds, 10):
            x = self.x(tick / 1e3)
            parts.append(rule(x, x, self.top - 4, self.bottom + 4))
            if self.axis:
                word = number(tick) if tick else "0 ms"
                parts.append(label(word, x, self.bottom + 19, size=11))
        return parts

    def labels(self) -> list[str]:
        parts = []
        if self.title:
            parts.append(
                element("text", text(self.title), x=0, y=13, font_size=13, font_weight=600)
            )
        size = 12 if self.row >= 18 else 10
        at = self.left - 10 - 10 * (self.gantt.groups is not None)
        for row in range(self.gantt.rows):
            note = self.gantt.notes.get(row)
            middle = self.y(row) + self.row / 2 + size * 0.35 - 5 * bool(note)
            parts.append(label(self.gantt.row_name(row), at, middle, "end", size))
            if note:
                parts.append(label(note, at, middle + size, "end", size - 1.5))
            if row in self.gantt.gone:
                parts.append(self.nothing(row))
        parts += self.groups()
        if not self.gantt.bars:
            parts.append(label("nothing ran", self.left, self.top + self.row / 2, "start", 12))
        return parts

    def groups(self) -> list[str]:
        """Beside the rows of each group a line in its colour."""
        groups, parts = self.gantt.groups, []
        for group, colour in enumerate(groups.colours if groups else ()):
            assert groups is not None
            first = group * groups.size
            tall = self.y(first + groups.size - 1) + self.row - self.y(first)
            name = element("title", text(groups.names([group])))
            box = {"x": self.left - 13, "y": self.y(first), "width": 5, "height": tall}
            parts.append(element("rect", name, **box, rx=2, fill=colour))
        return parts

    def nothing(self, row: int) -> str:
        """A row on which nothing can run."""
        return element(
            "rect",
            element("title", text(self.gantt.row_title(row))),
            x=self.left,
            y=self.y(row),
            width=self.x(self.finish) - self.left,
            height=self.row,
            fill=GONE,
            fill_opacity=0.14,
            stroke=GONE,
            stroke_dasharray="4 3",
        )

    def box(self, bar: Bar) -> str:
        """A rectangle with the bar's text, or a shorter one, as far as there is room."""
        start, length = bar.start - self.begin, bar.end - bar.start
        x, y = self.x(start), self.y(bar.row)
        wide = max(0.6, self.x(start + length) - x)
        name = bar.title or bar.label
        parts = [
            element("title", text(f"{name}\nstart {ms(start)}\nduration {ms(length)}")),
            element(
                "rect",
                x=x,
                y=y,
                width=max(0.6, wide - 0.8),  # a hairline between two boxes that touch
                height=self.row,
                rx=1.5 if wide < 8 else 2.5,
                fill=bar.fill,
            ),
        ]
        stripe = self.gantt.stripe(bar)
        if stripe:
            thick = max(3, self.row * 2 // 9)
            below = {"x": x, "y": y + self.row - thick, "width": max(0.6, wide - 0.8)}
            parts.append(element("rect", **below, height=thick, fill=stripe))
        size = 10 if self.row >= 18 else 8.5
        for word in bar.inside or (bar.label,):
            if len(word) * size * 0.6 + 1 <= wide:
                parts.append(
                    element(
                        "text",
                        text(word),
                        x=x + wide / 2 - 0.4,
                        y=y + self.row / 2 + size * 0.36 - 2 * bool(stripe),
                        text_anchor="middle",
                        font_size=size,
                        fill=BOX_TEXT,
                    )
                )
                break
        return element("g", *parts)

    def line(self, arrow: Arrow) -> str:
        """From the sender's row to the receiver's, slanted by the time under way."""
        down = arrow.target > arrow.source
        sent, arrived = arrow.sent - self.begin, arrow.arrived - self.begin
        target = self.gantt.short_name(arrow.target)
        what = (
            f"{arrow.label} from {self.gantt.row_name(arrow.source)} to {target}\n"
            f"sent {ms(sent)}\nunder way {ms(arrived - sent)}"
        )
        return element(
            "line",
            element("title", text(what)),
            x1=self.x(sent),
            y1=self.y(arrow.source) + (self.row if down else 0),
            x2=self.x(arrived),
            y2=self.y(arrow.target) + (0 if down else self.row),
            stroke=MESSAGE,
            stroke_width=1.1,
            stroke_opacity=0.75 if abs(arrow.target - arrow.source) == 1 else 0.35,
        )

    def end(self) -> list[str]:
        """A mark where it ends, with the length."""
        if not self.gantt.bars:
            return []
        x = self.x(self.finish)
        mark = element(
            "line",
            x1=x,
            x2=x,
            y1=self.top - 5,
            y2=self.bottom + 4,
            stroke="currentColor",
            stroke_width=1.3,
            stroke_dasharray="3 2",
            stroke_opacity=0.7,
        )
        room = x + 40 < self.width
        length = element(
            "text",
            text(ms(self.finish)),
            x=max(x, 9.0 * len(self.title) + 14) if room else float(self.width),
            y=13,
            text_anchor="middle" if room else "end",
            font_size=12,
            font_weight=600,
        )
        return [mark, length]


def _legend(gantt: Gantt, seconds: float, x: float, y: float) -> list[str]:
    """One line of boxes and words for an axis of `seconds`, from pixel `x` on, at height `y`."""
    parts = []
    for key in legend_keys([gantt], seconds):
        for fill in key.fills:
            if key.line:
                ends = {"x1": x, "x2": x + 12, "y1": y - 4, "y2": y - 4}
                parts.append(element("line", **ends, stroke=fill, stroke_width=2))
            else:
                parts.append(element("rect", x=x, y=y - 9, width=11, height=11, rx=2, fill=fill))
            x += 14.0
        x += 3.0
        parts.append(element("text", text(key.words), x=x, y=y, font_size=11, fill_opacity=0.8))
        x += 6.0 * len(key.words) + 14
    return parts
