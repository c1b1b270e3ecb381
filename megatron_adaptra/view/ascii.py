"""Timelines and schedules for a terminal."""

from __future__ import annotations

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.deps import Token, makes, needs
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Span, Timeline
from megatron_adaptra.view.axis import ms, number, ticks

FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "~", Kind.W: "+", Kind.R: "*", Kind.TAIL: "#"}
IDLE, MORE = ".", ">"
LEAST_WIDTH = 32


def ascii_timeline(timeline: Timeline, width: int = 100) -> str:
    """One row per stage, one character per slice of time; no line is wider than `width`.

    An op is its text, filled up by kind (`F3--`, `B3====`), or its letter where there is no room.
    Each has at least one character, so short ops can push later ones to the right; a row that
    grows too long for that reason ends with `>`.
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
    rows = [""] * timeline.stages
    for span in sorted(timeline.spans, key=lambda s: s.start):
        row = rows[span.stage].ljust(round((span.start - begin) / per_cell), IDLE)
        rows[span.stage] = row + _box(span, round((span.end - begin) / per_cell) - len(row))
    head = f"{timeline.name}: {ms(timeline.makespan)}" if timeline.name else ms(timeline.makespan)
    lines = [
        label.rjust(margin) + _fit(row, cells) + "|"
        for label, row in zip(labels, rows, strict=True)
    ]
    return "\n".join([head[:width], *lines, " " * margin + _ruler(timeline.makespan, cells)])


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


def _fit(row: str, cells: int) -> str:
    return row.ljust(cells, IDLE) if len(row) <= cells else row[: cells - 1] + MORE


def _box(span: Span, size: int) -> str:
    size = max(1, size)
    word = str(span.op) if span.op.kind is not Kind.TAIL else "T"
    if len(word) > size:
        word = span.op.kind.value[:1]
    return word.ljust(size, FILL.get(span.op.kind, "?"))


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
    light = [
        {(op.microbatch, op.chunk) for op in line if op.kind is Kind.R} for line in schedule.order
    ]
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
