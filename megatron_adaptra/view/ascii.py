"""Gantts for a terminal."""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.view.axis import ms, number, ticks
from megatron_adaptra.view.bars import Bar, Gantt, categories_in
from megatron_adaptra.view.theme import BOX_TEXT

IDLE, MORE = ".", ">"
LEAST_WIDTH = 32
Piece = tuple[str, Bar | None]  # characters, and the bar that they show


def ascii_gantt(gantt: Gantt, width: int = 100, colour: bool = False) -> str:
    """Draw one line per row, one character per slice of time; no line is wider than `width`.

    A bar is its text, filled up by category (`F3--`, `B3====`), or a shorter one where there is no
    room. Each has at least one character, so short bars can push later ones to the right; a row
    that grows too long for that reason ends with `>`.

    Args:
        gantt: what to draw.
        width: characters of the longest line, at least LEAST_WIDTH.
        colour: with the colours of the other pictures, as escape sequences, which take no room.

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
    rows: list[list[Piece]] = [[] for _ in labels]
    used = [0] * gantt.rows
    for bar in sorted(gantt.bars, key=lambda b: b.start):
        row, at = rows[bar.row], used[bar.row]
        idle = IDLE * (round((bar.start - begin) / per_cell) - at)
        at += len(idle)
        box = _box(bar, round((bar.end - begin) / per_cell) - at)
        row += [(idle, None), (box, bar)]
        used[bar.row] = at + len(box)
    head = f"{gantt.name}: {ms(makespan)}" if gantt.name else ms(makespan)
    paint = _painted if colour else _plain
    lines = []
    for at, (label, row) in enumerate(zip(labels, rows, strict=True)):
        pieces: list[Piece] = [(" " * cells, None)] if at in gantt.gone else _fit(row, cells)
        shown = (paint(words, bar, gantt.stripe(bar)) for words, bar in pieces)
        lines += [""] * gantt.starts_group(at)
        lines.append(label.rjust(margin) + "".join(shown) + "|")
    return "\n".join([head[:width], *lines, " " * margin + _ruler(makespan, cells)])


def ascii_legend(gantt: Gantt, colour: bool = False) -> str:
    """Explain the letters and fillings of `ascii_gantt` in a line of text; `colour`: as there."""
    paint = _painted if colour else _plain
    parts = []
    for category in categories_in([gantt]):
        bar = Bar(0, category.sample, 0.0, 0.0, category)
        parts.append(f"{paint(_box(bar, 4), bar)} {category.name}")
    shading = gantt.shading
    if shading and any(bar.shade for bar in gantt.bars):
        light = Bar(0, "", 0.0, 0.0, shading.category, shade=1)
        shown = (paint(words, light) for words in shading.samples)
        parts.append(f"{' or '.join(shown)} {shading.meaning}")
    owners, groups = gantt.owners(), gantt.groups
    if groups and owners:
        first = Bar(0, "", 0.0, 0.0, categories_in([gantt])[0], owner=owners[0])
        shown = (paint(words, first, gantt.stripe(first)) for words in groups.samples)
        parts.append(f"{' or '.join(shown)} of another {groups.noun}")
    return "   ".join(parts)


def _fit(row: list[Piece], cells: int) -> list[Piece]:
    """Cut or fill the row to as many characters as there are cells."""
    room, out = cells, []
    for words, bar in row:
        out.append((words[:room], bar))
        room -= len(words)
        if room < 0:
            words, bar = next(piece for piece in reversed(out) if piece[0])
            return [*[p for p in out if p[0]][:-1], (words[:-1] + MORE, bar)]
    return [*out, (IDLE * room, None)]


def _box(bar: Bar, size: int) -> str:
    """Return the bar's first text that fits, else the last, filled up to `size` characters."""
    texts = bar.plain or (bar.label, bar.label[:1])
    text = next((text for text in texts if len(text) <= size), texts[-1])
    return text.ljust(size, bar.category.filling)


def _plain(words: str, bar: Bar | None, stripe: str | None = None) -> str:
    return words


def _painted(words: str, bar: Bar | None, stripe: str | None = None) -> str:
    """Write dark on the bar's colour, or bold in its stripe's; blanks replace the fillings."""
    if bar is None:
        return words.replace(IDLE, " ")
    words = words.replace(bar.category.filling, " ")
    codes = [
        f"{layer};2;" + ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        for layer, colour in ((48, bar.fill), (38, stripe or BOX_TEXT))
    ]
    codes += ["1"] * bool(stripe)
    return f"\x1b[{';'.join(codes)}m{words}\x1b[0m" if words else ""


def _ruler(seconds: float, cells: int) -> str:
    """Return a line of times in ms under their cells, without those that find no room."""
    line = ""
    for tick in ticks(1e3 * seconds, max(2, cells // 12)):
        at = round(tick / (1e3 * seconds) * cells) if seconds else 0
        word = number(tick) if tick else "0 ms"
        if at + len(word) <= cells and (at > len(line) or not line):
            line = line.ljust(at) + word
    return line
