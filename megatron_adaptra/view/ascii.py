"""Timelines and schedules for a terminal."""

from __future__ import annotations

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.deps import Token, light_of, makes, needs
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view.axis import ms, number, ticks
from megatron_adaptra.view.theme import OP_TEXT, op_fill, op_name

FILL = {
    Kind.F: "-",
    Kind.B: "=",
    Kind.I: "~",
    Kind.W: "+",
    Kind.R: "*",
    Kind.STEP: "#",
    Kind.SYNC: "x",
}
IDLE, MORE = ".", ">"
LEAST_WIDTH = 32


def ascii_timeline(timeline: Timeline, width: int = 100, colour: bool = False) -> str:
    """One row per stage, one character per slice of time; no line is wider than `width`.

    An op is its text, filled up by kind (`F3--`, `B3====`), or its letter where there is no room;
    `F3.1` may be short as `f3` or `f`. Each has at least one character, so short ops can push later
    ones to the right; a row that grows too long for that reason ends with `>`. `colour`: with the
    colours of the other pictures, as escape sequences that take no room. Raises BadInput where
    `width` is too small.
    """
    if width < LEAST_WIDTH:
        raise BadInput("width", width, f"at least {LEAST_WIDTH} characters")
    if not timeline.spans:
        return (timeline.name + ": nothing ran" if timeline.name else "nothing ran")[:width]
    labels = [f"stage {stage} |" for stage in range(timeline.stages)]
    margin = max(map(len, labels))
    cells = width - margin - 1
    begin = min(span.start for span in timeline.spans)
    per_cell = (timeline.makespan or 1.0) / cells
    rows: list[list[tuple[str, Op | None]]] = [[] for _ in labels]
    used = [0] * timeline.stages
    for span in sorted(timeline.spans, key=lambda s: s.start):
        row, at = rows[span.stage], used[span.stage]
        idle = IDLE * (round((span.start - begin) / per_cell) - at)
        at += len(idle)
        box = _box(span.op, round((span.end - begin) / per_cell) - at)
        row += [(idle, None), (box, span.op)]
        used[span.stage] = at + len(box)
    head = f"{timeline.name}: {ms(timeline.makespan)}" if timeline.name else ms(timeline.makespan)
    paint = _painted if colour else _plain
    lines = [
        label.rjust(margin) + "".join(paint(*piece) for piece in _fit(row, cells)) + "|"
        for label, row in zip(labels, rows, strict=True)
    ]
    return "\n".join([head[:width], *lines, " " * margin + _ruler(timeline.makespan, cells)])


def ascii_legend(timeline: Timeline, colour: bool = False) -> str:
    """What the letters and fillings of `ascii_timeline` mean; `colour` as there."""
    kinds = {span.op.kind for span in timeline.spans}
    paint = _painted if colour else _plain
    parts = [
        f"{paint(_box(Op(kind, 0), 4), Op(kind, 0))} {op_name(kind)}"
        for kind in FILL
        if kind in kinds
    ]
    if any(span.op.chunk for span in timeline.spans):
        shown = (paint(words, Op(Kind.F, 0, 1)) for words in ("F0.1", "f0", "f"))
        parts.append(f"{' or '.join(shown)} forward of a later chunk")
    return "   ".join(parts)


def ascii_schedule(schedule: Schedule) -> str:
    """The classic grid: every op takes one slot and stands where its inputs allow it.

    An op that can never run (a deadlock; `check` explains it) is shown with a question mark.
    """
    slots = _slots(schedule)
    words = [[str(op) for op in line] for line in schedule.order]
    cell = 1 + max((len(word) for line in words for word in line), default=0)
    length = 1 + max((slot for line in slots for slot in line), default=-1)
    warmup = ",".join(map(str, schedule.warmup))
    rows = [f"{schedule.policy or 'schedule'}: warmup {warmup}"]
    for stage, (line, at) in enumerate(zip(words, slots, strict=True)):
        row = [IDLE] * length
        for word, slot in zip(line, at, strict=False):
            row[slot] = word
        stuck = [word + "?" for word in line[len(at) :]]
        grid = "".join(word.ljust(cell) for word in row + stuck).rstrip()
        rows.append(f"stage {stage} | {grid}".rstrip())
    return "\n".join(rows)


def _fit(row: list[tuple[str, Op | None]], cells: int) -> list[tuple[str, Op | None]]:
    """The row with as many characters as there are cells."""
    room, out = cells, []
    for words, op in row:
        out.append((words[:room], op))
        room -= len(words)
        if room < 0:
            words, op = next(piece for piece in reversed(out) if piece[0])
            return [*[p for p in out if p[0]][:-1], (words[:-1] + MORE, op)]
    return [*out, (IDLE * room, None)]


def _box(op: Op, size: int) -> str:
    """The longest text that fits; a small letter is short for a later chunk."""
    letter = op.kind.value[:1]
    words = [str(op), letter]
    if op.kind in (Kind.STEP, Kind.SYNC):
        words = [letter]
    elif op.chunk:
        words[1:] = [f"{letter.lower()}{op.microbatch}", letter.lower()]
    word = next((word for word in words if len(word) <= size), words[-1])
    return word.ljust(size, FILL.get(op.kind, "?"))


def _plain(words: str, op: Op | None) -> str:
    return words


def _painted(words: str, op: Op | None) -> str:
    """Dark on the op's colour; the fillings are not needed then."""
    if op is None:
        return words.replace(IDLE, " ")
    words = words.replace(FILL.get(op.kind, " "), " ")
    back, ink = op_fill(op.kind, op.chunk), OP_TEXT
    codes = [
        f"{layer};2;" + ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        for layer, colour in ((48, back), (38, ink))
    ]
    return f"\x1b[{';'.join(codes)}m{words}\x1b[0m" if words else ""


def _ruler(seconds: float, cells: int) -> str:
    """Times in ms under the cells they belong to; one that finds no room is left out."""
    line = ""
    for tick in ticks(1e3 * seconds, max(2, cells // 12)):
        at = round(tick / (1e3 * seconds) * cells) if seconds else 0
        word = number(tick) if tick else "0 ms"
        if at + len(word) <= cells and (at > len(line) or not line):
            line = line.ljust(at) + word
    return line


def _slots(schedule: Schedule) -> list[list[int]]:
    """Per stage, the slot of each op if every op took one; ends at the first op that cannot run."""
    stages, chunks = schedule.stages, schedule.chunks
    light = [light_of(line) for line in schedule.order]
    ready: dict[Token, int] = {}  # the first slot in which a token can be used
    slots: list[list[int]] = [[] for _ in schedule.order]
    moving = True
    while moving:
        moving = False
        for stage, line in enumerate(schedule.order):
            while len(slots[stage]) < len(line):
                op = line[len(slots[stage])]
                wanted = needs(op, stage, stages, chunks, (op.microbatch, op.chunk) in light[stage])
                if any(token not in ready for token in wanted):
                    break
                after = slots[stage][-1] + 1 if slots[stage] else 0
                slot = max([after, *(ready[token] for token in wanted)])
                slots[stage].append(slot)
                made = makes(op, stage, stages)
                if made is not None:
                    ready[made] = slot + 1
                moving = True
    return slots
