"""A schedule as a grid for a terminal."""

from __future__ import annotations

from megatron_adaptra.ir.deps import Token, makes, needs, recomputed_of
from megatron_adaptra.ir.schedule import Schedule

IDLE = "."


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
        rows.append(f"{schedule.routes.name(stage)} | {grid}".rstrip())
    return "\n".join(rows)


def _slots(schedule: Schedule) -> list[list[int]]:
    """Per stage, the slot of each op if every op took one; ends at the first op that cannot run."""
    routes = schedule.routes
    recomputed = [recomputed_of(line) for line in schedule.order]
    ready: dict[Token, int] = {}  # the first slot in which a token can be used
    slots: list[list[int]] = [[] for _ in schedule.order]
    moving = True
    while moving:
        moving = False
        for stage, line in enumerate(schedule.order):
            while len(slots[stage]) < len(line):
                op = line[len(slots[stage])]
                wanted = needs(op, stage, routes, op[1:] in recomputed[stage])
                if any(token not in ready for token in wanted):
                    break
                after = slots[stage][-1] + 1 if slots[stage] else 0
                slot = max([after, *(ready[token] for token in wanted)])
                slots[stage].append(slot)
                made = makes(op, stage, routes)
                if made is not None:
                    ready[made] = slot + 1
                moving = True
    return slots
