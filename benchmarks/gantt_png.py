"""A Gantt as a PNG, drawn by matplotlib, and the parts that other PNGs are made of, too.

matplotlib is an optional dependency and is imported only here, when a figure is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from megatron_adaptra.view.axis import ms, number, ticks
from megatron_adaptra.view.bars import Bar, Gantt, legend_keys, slow_messages
from megatron_adaptra.view.theme import BOX_TEXT, MESSAGE, STOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT = "#1b2530", "#5b6875"
NAMED = 24  # rows whose names have room, in a picture of any height
NAME, ABOVE = 0.16, 0.14  # inches that a name takes, and between a legend and what is under it
BOX = 0.62  # height of a row's boxes; the rest of the row is for messages
STRIPE = 0.14  # of that the height of another group's stripe
INCHES = 13.0  # width of every figure
LONGEST = 165  # characters of a line beneath the headline; two lines of a text at most
STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": "#c9d1d9",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


def save(path: str | os.PathLike[str], inches: float, draw: Callable[[Any, float], None]) -> None:
    """Let `draw(figure, inches)` fill a figure that is `inches` high, and write it.

    Raises ImportError where matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(INCHES, inches), dpi=130, facecolor="white")
        FigureCanvasAgg(figure)
        draw(figure, inches)
        figure.savefig(path, format="png")


def write_header(figure: Any, height: float, headline: str, *lines: str) -> None:
    """The `headline` and, beneath it, quieter lines, on a `figure` of that `height` in inches."""
    figure.text(0.025, 1 - 0.22 / height, headline, va="top", fontsize=21, fontweight="bold")
    wrapped = [wrap(words, LONGEST, max_lines=2, placeholder=" ...") for words in lines]
    for i, words in enumerate(chain.from_iterable(wrapped)):
        y = 1 - (0.68 + 0.25 * i) / height
        figure.text(0.025, y, words, va="top", fontsize=10.5, color=SOFT)


def draw_gantt(axes: Axes, gantt: Gantt, seconds: float) -> None:
    """Draw the Gantt as `gantt_svg` does, on an axis of `seconds`."""
    begin, end = gantt.begin, gantt.length
    for row in range(gantt.rows):
        mine = [bar for bar in gantt.bars if bar.row == row]
        axes.broken_barh(
            [(1e3 * (bar.start - begin), 1e3 * (bar.end - bar.start)) for bar in mine],
            (row - BOX / 2, BOX),
            facecolors=[bar.fill for bar in mine],
            edgecolor="white",
            linewidth=0.5,
        )
        striped = [bar for bar in mine if gantt.stripe(bar)]
        if striped:
            axes.broken_barh(
                [(1e3 * (bar.start - begin), 1e3 * (bar.end - bar.start)) for bar in striped],
                (row + BOX / 2 - STRIPE, STRIPE),
                facecolors=[gantt.stripe(bar) for bar in striped],
                edgecolor="white",
                linewidth=0.5,
            )
        if row in gantt.gone:
            style: dict[str, Any] = {"facecolor": "#f1f3f5", "edgecolor": STOCK, "linestyle": "--"}
            axes.broken_barh([(0.0, 1e3 * end)], (row - BOX / 2, BOX), linewidth=0.5, **style)
        for bar in mine:
            _word(axes, bar, begin, seconds, bar.row - STRIPE / 2 * (gantt.stripe(bar) is not None))
    for m in slow_messages(gantt, seconds):
        side = BOX / 2 if m.target > m.source else -BOX / 2
        times = [1e3 * (m.sent - begin), 1e3 * (m.arrived - begin)]
        style = {"color": MESSAGE, "linewidth": 0.7, "zorder": 0.9}
        style["alpha"] = 0.75 if abs(m.target - m.source) == 1 else 0.35
        axes.plot(times, [m.source + side, m.target - side], **style)
    axes.axvline(1e3 * end, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.annotate(
        ms(end),
        (1e3 * max(end, 0.03 * seconds), 1),
        (0, 4),
        ("data", "axes fraction"),
        "offset points",
        ha="center",
        fontweight="bold",
        fontsize=9,
    )
    axes.set_xlim(0, 1e3 * seconds)
    axes.set_ylim(max(gantt.rows, 1) - 0.45, -0.55)
    marks = ticks(1e3 * seconds, 10)
    axes.set_xticks(marks, [number(tick) if tick else "0 ms" for tick in marks])
    room = max(NAMED, int(axes.bbox.height / axes.figure.dpi / NAME))
    named = range(0, gantt.rows, 1 + max(0, gantt.rows - 1) // room)
    axes.set_yticks(named, [_name(gantt, row) for row in named])
    groups = gantt.groups
    for group, colour in enumerate(groups.colours if groups else ()):
        assert groups is not None
        ends = (group * groups.size - BOX / 2, (group + 1) * groups.size - 1 + BOX / 2)
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False}
        axes.plot([-0.005] * 2, ends, color=colour, linewidth=4, solid_capstyle="butt", **place)
    axes.tick_params(length=0, labelsize=8)
    if gantt.groups:
        axes.tick_params(axis="y", pad=10)
    axes.grid(axis="x", color="#e8ecf0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["left", "bottom"]].set_visible(False)


def _name(gantt: Gantt, row: int) -> str:
    """Return the name beside a row, and beneath it what is unusual about the row."""
    return "\n".join(filter(None, (gantt.row_name(row), gantt.notes.get(row))))


def _word(axes: Axes, bar: Bar, begin: float, seconds: float, height: float) -> None:
    """Write the first text of a bar that fits its box, at that `height`; none if all are long."""
    inches = (bar.end - bar.start) / seconds * 0.90 * INCHES
    for word in bar.inside or (bar.label,):
        if inches >= 0.065 * len(word) + 0.02:
            middle = 500 * (bar.start + bar.end - 2 * begin)
            style: dict[str, Any] = {
                "ha": "center",
                "va": "center_baseline",
                "fontsize": 6.5,
                "color": BOX_TEXT,
            }
            axes.text(middle, height, word, **style)
            return


def draw_legend(figure: Any, gantts: Sequence[Gantt], seconds: float, y: float) -> None:
    """Draw the legend of `gantts` on an axis of `seconds`.

    It is one line of `figure` that ends at height `y`, from 0 to 1.
    """
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys, handles = legend_keys(gantts, seconds), list[Any]()
    for key in keys:
        if key.line:
            handles.append(Line2D([], [], color=key.fills[0], linewidth=1, label=key.words))
        else:
            handles.append(tuple(Patch(facecolor=fill) for fill in key.fills))
    names = [key.words for key in keys]
    figure.legend(
        handles,
        names,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.2)},
        loc="lower right",
        bbox_to_anchor=(0.97, y + ABOVE / figure.get_figheight()),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
        borderaxespad=0,
        columnspacing=1.4,
    )
