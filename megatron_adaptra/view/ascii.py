"""Gantts for a terminal."""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.view.axis import ms, number, ticks
from megatron_adaptra.view.bars import Bar, Gantt, categories_in

IDLE, MORE = ".", ">"
LEAST_WIDTH = 32


def ascii_gantt(gantt: Gantt, width: int = 100) -> str:
    """Draw one line per row, one character per slice of time; no line is wider than `width`.

    A bar is its text, filled up by category (`F3--`, `B3====`), or a shorter one where there is no
    room. Each has at least one character, so short bars can push later ones to the right; a row
    that grows too long for that reason ends with `>`.

    Args:
        gantt: what to draw.
        width: characters of the longest line, at least LEAST_WIDTH.

    Raises:
        BadInput: `width` is too small.
    """
    if width < LEAST_WIDTH:
        raise BadInput("width", width, f"at least {LEAST_WIDTH} characters")
    if not gantt.bars:
        return (gantt.name + ": nothing ran" if gantt.name else "nothing ran")[:width]
    labels = [f"{gantt.row_title(row)} |" for row in range(gantt.rows)]
    margin = max(map(len, labels))
    cells = width - margin - 1
    begin, makespan = gantt.begin, gantt.makespan
    per_cell = (makespan or 1.0) / cells
    rows = [""] * gantt.rows
    for bar in sorted(gantt.bars, key=lambda b: b.start):
        row = rows[bar.row].ljust(round((bar.start - begin) / per_cell), IDLE)
        rows[bar.row] = row + _box(bar, round((bar.end - begin) / per_cell) - len(row))
    head = f"{gantt.name}: {ms(makespan)}" if gantt.name else ms(makespan)
    lines = []
    for at, (label, row) in enumerate(zip(labels, rows, strict=True)):
        row = row if len(row) <= cells else row[: cells - 1] + MORE
        lines += [""] * gantt.starts_group(at)
        shown = row.ljust(cells, " " if at in gantt.gone else IDLE)
        lines.append(f"{label.rjust(margin)}{shown}|")
    return "\n".join([head[:width], *lines, " " * margin + _ruler(makespan, cells)])


def ascii_legend(gantt: Gantt) -> str:
    """Explain the letters and fillings of `ascii_gantt` in a line of text."""
    parts = []
    for category in categories_in([gantt]):
        bar = Bar(0, category.sample, 0.0, 0.0, category)
        parts.append(f"{_box(bar, 4)} {category.name}")
    shading, groups = gantt.shading, gantt.groups
    if shading and any(bar.shade for bar in gantt.bars):
        parts.append(f"{' or '.join(shading.samples)} {shading.meaning}")
    if groups and gantt.owners():
        parts.append(f"{' or '.join(groups.samples)} of another {groups.noun}")
    return "   ".join(parts)


def _box(bar: Bar, size: int) -> str:
    """Return the bar's first text that fits, else the last, filled up to `size` characters."""
    texts = bar.plain or (bar.label, bar.label[:1])
    text = next((text for text in texts if len(text) <= size), texts[-1])
    return text.ljust(size, bar.category.filling)


def _ruler(seconds: float, cells: int) -> str:
    """Return a line of times in ms under their cells, without those that find no room."""
    line = ""
    for tick in ticks(1e3 * seconds, max(2, cells // 12)):
        at = round(tick / (1e3 * seconds) * cells) if seconds else 0
        word = number(tick) if tick else "0 ms"
        if at + len(word) <= cells and (at > len(line) or not line):
            line = line.ljust(at) + word
    return line
