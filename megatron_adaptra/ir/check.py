"""Proof that a program runs: every op once, no deadlock under either kind of send, enough memory.

Two semantics of sending are tried, because transports differ: *eager* (a send is done at once) and
*rendezvous* (a stage is held in its send until the receiver has posted the receive, the strictest
a transport can be). A program that passes both cannot hang for its order, whatever carries it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_adaptra.errors import ScheduleError
from megatron_adaptra.ir.deps import ACTIVATION, GRADIENT, Token, makes, needs, position_of
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program
from megatron_adaptra.ir.schedule import Line
from megatron_adaptra.ir.timeline import peak_in_flight

SENDS = ("eager", "rendezvous")


def check(program: Program, budget: Sequence[float] = ()) -> None:
    """Raise ScheduleError, with the grid and the first op that cannot run, or return.

    `budget`: per stage, the microbatches' activations it may hold; empty for no limit.
    """
    _check_complete(program)
    for sends in SENDS:
        _check_progress(program, sends)
    for stage, limit in enumerate(budget):
        peak = peak_in_flight(program.order[stage])
        if peak > limit + 1e-9:
            at = _first_over(program.order[stage], limit)
            raise ScheduleError(
                f"stage {stage} holds {peak:g} microbatches' activations, its budget is {limit:g}\n"
                + grid(program, {stage: at}, "exceeds the budget")
            )


def grid(program: Program, marks: dict[int, int], what: str) -> str:
    """One row per stage; `marks[stage]` is the index of the op to point at."""
    rows = []
    for stage, line in enumerate(program.order):
        mark = marks.get(stage)
        words = [f"[{op}]" if i == mark else str(op) for i, op in enumerate(line)]
        note = f"   <-- {line[mark]} {what}" if mark is not None and mark < len(line) else ""
        rows.append(f"stage {stage} | {' '.join(words)}{note}")
    return "\n".join(rows)


def _check_complete(program: Program) -> None:
    stages, chunks = program.stages, program.chunks
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
                    raise ScheduleError(
                        f"stage {stage} runs {sorted(have)} of {name}; "
                        "it has to run F with B, or F with I and W\n" + grid(program, {}, "")
                    )
    _check_messages(program, stages)


def _check_messages(program: Program, stages: int) -> None:
    """Sends and posts pair up: what one stage sends, the other has posted, and in that order."""
    sent: dict[tuple[str, int], list[Token]] = {}
    posted: dict[tuple[str, int], list[Token]] = {}
    for stage, line in enumerate(program.order):
        for op in line:
            token = _carried(op, stage, stages)
            if token is not None:
                book = sent if op.kind in (Kind.SEND_F, Kind.SEND_B) else posted
                book.setdefault((token.kind, token.position), []).append(token)
    for key in sent.keys() | posted.keys():
        if sorted(sent.get(key, [])) != sorted(posted.get(key, [])):
            raise ScheduleError(
                f"position {key[1]} sends {sent.get(key, [])} and {posted.get(key, [])} is awaited"
            )


def _carried(op: Op, stage: int, stages: int) -> Token | None:
    """The token that a send or a post moves."""
    here = position_of(op, stage, stages)
    if op.kind is Kind.SEND_F:
        return Token(ACTIVATION, here, op.microbatch)
    if op.kind is Kind.SEND_B:
        return Token(GRADIENT, here, op.microbatch)
    if op.kind is Kind.POST_F:
        return Token(ACTIVATION, here - 1, op.microbatch)
    if op.kind is Kind.POST_B:
        return Token(GRADIENT, here + 1, op.microbatch)
    return None


def _check_progress(program: Program, sends: str) -> None:
    stages, chunks = program.stages, program.chunks
    light = [
        {(op.microbatch, op.chunk) for op in line if op.kind is Kind.R} for line in program.order
    ]
    at = [0] * stages
    made: set[Token] = set()
    posted: set[Token] = set()
    sent: set[Token] = set()

    def runnable(stage: int, op: Op) -> bool:
        token = _carried(op, stage, stages)
        if token is None:
            is_light = (op.microbatch, op.chunk) in light[stage]
            for need in needs(op, stage, stages, chunks, is_light):
                away = need.position % stages != stage
                if need not in made or (away and (need not in sent or need not in posted)):
                    return False
            return True
        if op.kind in (Kind.SEND_F, Kind.SEND_B):
            return token in made and (sends == "eager" or token in posted)
        return True

    moving = True
    while moving:
        moving = False
        for stage, line in enumerate(program.order):
            while at[stage] < len(line) and runnable(stage, line[at[stage]]):
                op = line[at[stage]]
                token = _carried(op, stage, stages)
                if token is None:
                    out = makes(op, stage, stages)
                    if out is not None:
                        made.add(out)
                elif op.kind in (Kind.SEND_F, Kind.SEND_B):
                    sent.add(token)
                else:
                    posted.add(token)
                at[stage] += 1
                moving = True
    stuck = {s: i for s, i in enumerate(at) if i < len(program.order[s])}
    if stuck:
        first = min(stuck, key=lambda s: (stuck[s], s))
        raise ScheduleError(
            f"deadlock under {sends} sends: {program.order[first][stuck[first]]} "
            f"of stage {first} can never run\n" + grid(program, stuck, "cannot run")
        )


def _first_over(line: Line, limit: float) -> int:
    """The index of the op at which a stage first holds more than its limit."""
    for i in range(len(line)):
        computes = [op for op in line[: i + 1] if op.kind.computes]
        recomputes = [op for op in line[i + 1 :] if op.kind is Kind.R]
        if computes and peak_in_flight(computes + recomputes) > limit + 1e-9:
            return i
    return len(line) - 1
