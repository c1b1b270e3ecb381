"""Proof that a program runs: every op once, no deadlock under either kind of send, enough memory.

Two semantics of sending are tried, because transports differ: *eager* (a send is done at once) and
*rendezvous* (a stage is held in its send until the receiver has posted the receive, the strictest
a transport can be). A program that passes both cannot hang for its order, whatever carries it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_adaptra.errors import BadInput, ScheduleError
from megatron_adaptra.ir.deps import Token, carried, makes, needs, recomputed_of
from megatron_adaptra.ir.in_flight import in_flight
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program

SENDS = ("eager", "rendezvous")
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_Fact = tuple[str, Token | None]  # a token (W makes none) is "made", "sent" or "posted"
_Rule = tuple[list[_Fact], _Fact | None, _Fact]  # needed, what holds a send back, brought about


def check(program: Program, budget: Sequence[float] = ()) -> None:
    """Raise ScheduleError, with the grid and the first op that cannot run, or return.

    `budget`: per stage, the microbatches' activations it may hold; empty for no limit. Raises
    BadInput when it has another length.
    """
    if len(budget) not in (0, program.stages):
        raise BadInput(
            "budget", list(budget), f"it has to be one value per stage, {program.stages} in all"
        )
    _check_complete(program)
    _check_messages(program)
    rules = [_rules(program, stage) for stage in range(program.stages)]
    for sends in SENDS:
        _check_progress(program, sends, rules)
    for stage, limit in enumerate(budget):
        held = in_flight(program.order[stage], program.chunks)
        peak = max(held, default=0.0)
        if not peak <= limit + 1e-9:
            at = next(i for i, now in enumerate(held) if not now <= limit + 1e-9)
            raise ScheduleError(
                f"stage {stage} holds {peak:g} microbatches' activations, its budget is {limit:g}\n"
                + grid(program, {stage: at}, "exceeds the budget")
            )


def grid(program: Program, marks: dict[int, int], what: str) -> str:
    """One row per stage; `marks[stage]` is the index of the op to point at and to say `what` of."""
    rows = []
    for stage, line in enumerate(program.order):
        mark = marks.get(stage)
        words = [f"[{op}]" if i == mark else str(op) for i, op in enumerate(line)]
        note = f"   <-- {line[mark]} {what}" if mark is not None and mark < len(line) else ""
        rows.append(f"stage {stage} | {' '.join(words)}{note}")
    return "\n".join(rows)


def _check_complete(program: Program) -> None:
    chunks = program.chunks
    for stage, line in enumerate(program.order):
        for i, (op, count) in enumerate(Counter(line).items()):
            if count > 1:
                raise ScheduleError(
                    f"{op} stands {count} times on stage {stage}\n"
                    + grid(program, {stage: len(line) - 1 - line[::-1].index(op)}, "is repeated")
                )
            if not (0 <= op.microbatch < program.microbatches and 0 <= op.chunk < chunks):
                raise ScheduleError(
                    f"{op} on stage {stage}: microbatches are 0 to {program.microbatches - 1}, "
                    f"chunks 0 to {chunks - 1}\n" + grid(program, {stage: i}, "does not exist")
                )
        present = set(line)
        for microbatch in range(program.microbatches):
            for chunk in range(chunks):
                have = {k for k in "FBIW" if Op(Kind(k), microbatch, chunk) in present}
                if have not in ({"F", "B"}, {"F", "I", "W"}):
                    name = f"microbatch {microbatch}" + (f" of chunk {chunk}" if chunks > 1 else "")
                    mine = (i for i, op in enumerate(line) if op[1:3] == (microbatch, chunk))
                    raise ScheduleError(
                        f"stage {stage} runs {', '.join(sorted(have)) or 'nothing'} of {name}; "
                        "it has to run F with B, or F with I and W\n"
                        + grid(program, {stage: next(mine, len(line))}, "is not all of it")
                    )


def _check_messages(program: Program) -> None:
    """Sends and posts pair up; their order is for `_check_progress`, as tags match messages."""
    sent: dict[Token, tuple[int, int]] = {}  # what is moved -> where its send stands
    posted: dict[Token, tuple[int, int]] = {}
    for stage, line in enumerate(program.order):
        for i, op in enumerate(line):
            token = carried(op, stage, program.stages)
            if token is not None:
                book = sent if op.kind in _SENDS else posted
                book[token] = stage, i
    for book, other, what in (
        (sent, posted, "has no posted receive"),
        (posted, sent, "awaits what nobody sends"),
    ):
        for token, (stage, i) in book.items():
            if token not in other:
                raise ScheduleError(
                    f"{program.order[stage][i]} of stage {stage} {what}\n"
                    + grid(program, {stage: i}, what)
                )


def _check_progress(program: Program, sends: str, rules: list[list[_Rule]]) -> None:
    done: set[_Fact] = set()
    at = [0] * program.stages
    moving = True
    while moving:
        moving = False
        for stage, line in enumerate(rules):
            while at[stage] < len(line):
                needed, held_by, fact = line[at[stage]]
                held = held_by is not None and sends == "rendezvous" and held_by not in done
                if held or not done.issuperset(needed):
                    break
                done.add(fact)
                at[stage] += 1
                moving = True
    stuck = {s: i for s, i in enumerate(at) if i < len(program.order[s])}
    if stuck:
        first = min(stuck, key=lambda s: (stuck[s], s))
        raise ScheduleError(
            f"deadlock under {sends} sends: {program.order[first][stuck[first]]} "
            f"of stage {first} can never run\n" + grid(program, stuck, "cannot run")
        )


def _rules(program: Program, stage: int) -> list[_Rule]:
    """The ops of one stage as the facts that they wait for and bring about."""
    stages, line = program.stages, program.order[stage]
    recomputed = recomputed_of(line)
    rules: list[_Rule] = []
    for op in line:
        token = carried(op, stage, stages)
        if token is None:
            needed: list[_Fact] = []
            is_recomputed = (op.microbatch, op.chunk) in recomputed
            for need in needs(op, stage, stages, program.chunks, is_recomputed):
                if need.position % stages == stage:
                    needed.append(("made", need))
                else:
                    needed += [("sent", need), ("posted", need)]
            out = makes(op, stage, stages)
            rules.append((needed, None, ("made", out)))
        elif op.kind in _SENDS:
            rules.append(([("made", token)], ("posted", token), ("sent", token)))
        else:
            rules.append(([], None, ("posted", token)))
    return rules
