"""Proof that a program does all the work once: each microbatch of each replica at every stage."""

from __future__ import annotations

from collections import Counter
from itertools import product

from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.ir.op import COMPUTE, Kind
from megatron_adaptra.ir.program import Program

_WHOLE = {Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}
_Mine = tuple[int, int, int | None]  # microbatch, chunk, home


def check_complete(program: Program) -> None:
    """Raise ScheduleError unless every stage runs each microbatch exactly once.

    All ops of one microbatch at a stage run on one of the stage's workers, which holds what they
    leave for each other.
    """
    # Per stage, the worker that runs a microbatch there, and what of it.
    ran: list[dict[_Mine, tuple[int, set[Kind]]]] = [{} for _ in range(program.stages)]
    for worker, line in enumerate(program.order):
        _check_ops(program, worker)
        own = ran[worker % program.stages]
        for i, op in enumerate(line):
            if op.kind not in COMPUTE:
                continue
            before, have = own.setdefault(op[1:], (worker, set()))
            if op.kind is not Kind.R:
                have.add(op.kind)
            if before != worker:
                name = program.routes.name
                raise ScheduleError(
                    f"{_name(op[1:], program)} runs twice at stage {worker % program.stages}: "
                    f"on {name(before)} and on {name(worker)}\n"
                    + grid(program, {worker: i}, f"is of a microbatch of {name(before)}")
                )
    homes = range(program.replicas) if program.replicas > 1 else (None,)
    for stage, own in enumerate(ran):
        for home, microbatch, chunk in product(
            homes, range(program.microbatches), range(program.chunks)
        ):
            mine = microbatch, chunk, home
            worker, have = own.get(mine, ((home or 0) * program.stages + stage, set()))
            if have not in _WHOLE:
                where = program.routes.name(worker) if mine in own else f"stage {stage}"
                line = program.order[worker]
                at = (i for i, op in enumerate(line) if op[1:] == mine)
                raise ScheduleError(
                    f"{where} runs {', '.join(sorted(have)) or 'nothing'} of "
                    f"{_name(mine, program)}; it has to run F with B, or F with I and W\n"
                    + grid(program, {worker: next(at, len(line))}, "is not all of it")
                )


def grid(program: Program, marks: dict[int, int], what: str) -> str:
    """One row per worker; `marks[worker]` is the index of the op to point at, `what` its fault."""
    rows = []
    for worker, line in enumerate(program.order):
        mark = marks.get(worker)
        words = [f"[{op}]" if i == mark else str(op) for i, op in enumerate(line)]
        note = f"   <-- {line[mark]} {what}" if mark is not None and mark < len(line) else ""
        rows.append(f"{program.routes.name(worker)} | {' '.join(words)}{note}")
    return "\n".join(rows)


def _check_ops(program: Program, worker: int) -> None:
    """No op stands twice on a worker, and each is of a microbatch that there is."""
    line, where = program.order[worker], program.routes.name(worker)
    microbatches, chunks = range(program.microbatches), range(program.chunks)
    homes = (None,) if program.replicas == 1 else range(program.replicas)
    for i, (op, count) in enumerate(Counter(line).items()):
        if count > 1:
            raise ScheduleError(
                f"{op} stands {count} times on {where}\n"
                + grid(program, {worker: len(line) - 1 - line[::-1].index(op)}, "is repeated")
            )
        if op.microbatch not in microbatches or op.chunk not in chunks:
            raise ScheduleError(
                f"{op} on {where}: microbatches are 0 to {program.microbatches - 1}, "
                f"chunks 0 to {program.chunks - 1}\n" + grid(program, {worker: i}, "does not exist")
            )
        if op.home not in homes:
            allowed = f"ops of {program.replicas} replicas have a home, 0 to {program.replicas - 1}"
            allowed = allowed if program.replicas > 1 else "ops of one replica have no home"
            raise ScheduleError(
                f"{op} on {where}: {allowed}\n" + grid(program, {worker: i}, "has a wrong home")
            )


def _name(mine: _Mine, program: Program) -> str:
    microbatch, chunk, home = mine
    of_chunk = f" of chunk {chunk}" if program.chunks > 1 else ""
    return f"microbatch {microbatch}{of_chunk}" + ("" if home is None else f" of home {home}")
