"""Proof that a program runs: every op once, no deadlock under either kind of send, enough memory.

Each microbatch of each replica runs once at every stage, on one of the stage's workers.

Two semantics of sending are tried, because transports differ: *eager* (a send is done at once) and
*rendezvous* (a worker is held in its send until the receiver has posted the receive, the strictest
a transport can be). A program that passes both cannot hang for its order, whatever carries it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import count, product

from megatron_adaptra.base.errors import BadInput, ScheduleError
from megatron_adaptra.ir.deps import Token, carried, maker, makes, needs, recomputed_of, user
from megatron_adaptra.ir.op import COMPUTE, Kind
from megatron_adaptra.ir.program import Program
from megatron_adaptra.ir.schedule import in_flight

SENDS = ("eager", "rendezvous")
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_FACTS = 3  # of each token: it is made, it is sent, its receive is posted
_MADE, _SENT, _POSTED = range(_FACTS)
_NOTHING = -_FACTS  # the fact that a W brings about, of no token: no op waits for it
# Facts of an op: those that it needs, those that also hold it if it is a send, the one it makes.
_Rule = tuple[list[int], list[int], int]
_WHOLE = {Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}
_Mine = tuple[int, int, int | None]  # microbatch, chunk, home


def check(program: Program, budget: Sequence[float] = ()) -> None:
    """Raise ScheduleError, with the grid and the first op that cannot run, or return.

    `budget`: per worker, the microbatches' activations it may hold; empty for no limit. Raises
    BadInput when it has another length.
    """
    if len(budget) not in (0, len(program.order)):
        what = "stage" if program.replicas == 1 else "worker"
        allowed = f"it has to be one value per {what}, {len(program.order)} in all"
        raise BadInput("budget", list(budget), allowed)
    _check_complete(program)
    numbers = defaultdict[Token, int](count(step=_FACTS).__next__)
    rules = [_rules(program, worker, numbers) for worker in range(len(program.order))]
    _check_messages(program, rules)
    for sends in SENDS:
        _check_progress(program, sends, rules)
    for worker, limit in enumerate(budget):
        held = in_flight(program.order[worker], program.chunks)
        peak = max(held, default=0.0)
        if not peak <= limit + 1e-9:
            at = next(i for i, now in enumerate(held) if not now <= limit + 1e-9)
            raise ScheduleError(
                f"{program.routes.name(worker)} holds {peak:g} microbatches' activations, "
                f"its budget is {limit:g}\n" + _grid(program, {worker: at}, "exceeds the budget")
            )


def _check_messages(program: Program, rules: list[list[_Rule]]) -> None:
    """Sends and posts pair up; their order is for `_check_progress`, as tags match messages."""
    stands = {
        fact: (worker, i)
        for worker, line in enumerate(rules)
        for i, (_, _, fact) in enumerate(line)
        if fact % _FACTS != _MADE
    }
    for fact, other, what in (
        (_SENT, _POSTED, "has no posted receive"),
        (_POSTED, _SENT, "awaits what nobody sends"),
    ):
        for one, (worker, i) in stands.items():
            if one % _FACTS == fact and one - fact + other not in stands:
                raise ScheduleError(
                    f"{program.order[worker][i]} of {program.routes.name(worker)} {what}\n"
                    + _grid(program, {worker: i}, what)
                )


def _check_progress(program: Program, sends: str, rules: list[list[_Rule]]) -> None:
    done: set[int] = set()
    at = [0] * len(program.order)
    waiting: dict[int, list[int]] = {}  # by what they miss
    ready = list(range(len(rules)))
    while ready:
        worker = ready.pop()
        for needed, held, fact in rules[worker][at[worker] :]:
            awaited = needed + held if sends == "rendezvous" else needed
            if not done.issuperset(awaited):
                missing = next(one for one in awaited if one not in done)
                waiting.setdefault(missing, []).append(worker)
                break
            done.add(fact)
            at[worker] += 1
            ready += waiting.pop(fact, ())
    stuck = {s: i for s, i in enumerate(at) if i < len(program.order[s])}
    if stuck:
        first = min(stuck, key=lambda s: (stuck[s], s))
        raise ScheduleError(
            f"deadlock under {sends} sends: {program.order[first][stuck[first]]} "
            f"of {program.routes.name(first)} can never run\n" + _grid(program, stuck, "cannot run")
        )


def _rules(program: Program, worker: int, numbers: Mapping[Token, int]) -> list[_Rule]:
    """The ops of one worker as the facts that they wait for and bring about.

    `numbers`: the first fact of each token, given when it comes up first. Raises ScheduleError for
    a send or a post of another worker's.
    """
    routes, line = program.routes, program.order[worker]
    recomputed = recomputed_of(line)
    rules: list[_Rule] = []
    for i, op in enumerate(line):
        token = carried(op, worker, routes)
        if token is None:
            needed = []
            for need in needs(op, worker, routes, op[1:] in recomputed):
                first = numbers[need]
                if maker(need, routes) == worker:
                    needed.append(first + _MADE)
                else:
                    needed += first + _SENT, first + _POSTED
            out = makes(op, worker, routes)
            rules.append((needed, [], _NOTHING if out is None else numbers[out] + _MADE))
            continue
        sends = op.kind in _SENDS
        if (maker if sends else user)(token, routes) != worker:
            what = f"{'sends' if sends else 'awaits'} what another worker runs"
            raise ScheduleError(
                f"{op} of {routes.name(worker)} {what}\n" + _grid(program, {worker: i}, what)
            )
        if sends:
            first = numbers[token]
            rules.append(([first + _MADE], [first + _POSTED], first + _SENT))
        else:
            rules.append(([], [], numbers[token] + _POSTED))
    return rules


def _check_complete(program: Program) -> None:
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
                    + _grid(program, {worker: i}, f"is of a microbatch of {name(before)}")
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
                    + _grid(program, {worker: next(at, len(line))}, "is not all of it")
                )


def _grid(program: Program, marks: dict[int, int], what: str) -> str:
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
    for i, (op, times) in enumerate(Counter(line).items()):
        if times > 1:
            raise ScheduleError(
                f"{op} stands {times} times on {where}\n"
                + _grid(program, {worker: len(line) - 1 - line[::-1].index(op)}, "is repeated")
            )
        if op.microbatch not in microbatches or op.chunk not in chunks:
            raise ScheduleError(
                f"{op} on {where}: microbatches are 0 to {program.microbatches - 1}, "
                f"chunks 0 to {program.chunks - 1}\n"
                + _grid(program, {worker: i}, "does not exist")
            )
        if op.home not in homes:
            allowed = f"ops of {program.replicas} replicas have a home, 0 to {program.replicas - 1}"
            allowed = allowed if program.replicas > 1 else "ops of one replica have no home"
            raise ScheduleError(
                f"{op} on {where}: {allowed}\n" + _grid(program, {worker: i}, "has a wrong home")
            )


def _name(mine: _Mine, program: Program) -> str:
    microbatch, chunk, home = mine
    of_chunk = f" of chunk {chunk}" if program.chunks > 1 else ""
    return f"microbatch {microbatch}{of_chunk}" + ("" if home is None else f" of home {home}")
