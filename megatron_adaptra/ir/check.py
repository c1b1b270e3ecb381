"""Proof that a program runs: every op once, no deadlock under either kind of send, enough memory.

Two semantics of sending are tried, because transports differ: *eager* (a send is done at once) and
*rendezvous* (a worker is held in its send until the receiver has posted the receive, the strictest
a transport can be). A program that passes both cannot hang for its order, whatever carries it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.errors import BadInput, ScheduleError
from megatron_adaptra.ir.complete import check_complete, grid
from megatron_adaptra.ir.deps import Token, carried, maker, makes, needs, recomputed_of
from megatron_adaptra.ir.in_flight import in_flight
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import Program

SENDS = ("eager", "rendezvous")
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_Fact = tuple[str, Token | None]  # a token (W makes none) is "made", "sent" or "posted"
_Rule = tuple[list[_Fact], _Fact | None, _Fact]  # needed, what holds a send back, brought about


def check(program: Program, budget: Sequence[float] = ()) -> None:
    """Raise ScheduleError, with the grid and the first op that cannot run, or return.

    `budget`: per worker, the microbatches' activations it may hold; empty for no limit. Raises
    BadInput when it has another length.
    """
    if len(budget) not in (0, len(program.order)):
        what = "stage" if program.replicas == 1 else "worker"
        allowed = f"it has to be one value per {what}, {len(program.order)} in all"
        raise BadInput("budget", list(budget), allowed)
    check_complete(program)
    _check_messages(program)
    rules = [_rules(program, worker) for worker in range(len(program.order))]
    for sends in SENDS:
        _check_progress(program, sends, rules)
    for worker, limit in enumerate(budget):
        held = in_flight(program.order[worker], program.chunks)
        peak = max(held, default=0.0)
        if not peak <= limit + 1e-9:
            at = next(i for i, now in enumerate(held) if not now <= limit + 1e-9)
            raise ScheduleError(
                f"{program.routes.name(worker)} holds {peak:g} microbatches' activations, "
                f"its budget is {limit:g}\n" + grid(program, {worker: at}, "exceeds the budget")
            )


def _check_messages(program: Program) -> None:
    """Sends and posts pair up; their order is for `_check_progress`, as tags match messages."""
    sent: dict[Token, tuple[int, int]] = {}  # what is moved -> where its send stands
    posted: dict[Token, tuple[int, int]] = {}
    for worker, line in enumerate(program.order):
        for i, op in enumerate(line):
            token = carried(op, worker, program.routes)
            if token is not None:
                book = sent if op.kind in _SENDS else posted
                book[token] = worker, i
    for book, other, what in (
        (sent, posted, "has no posted receive"),
        (posted, sent, "awaits what nobody sends"),
    ):
        for token, (worker, i) in book.items():
            if token not in other:
                raise ScheduleError(
                    f"{program.order[worker][i]} of {program.routes.name(worker)} {what}\n"
                    + grid(program, {worker: i}, what)
                )


def _check_progress(program: Program, sends: str, rules: list[list[_Rule]]) -> None:
    done: set[_Fact] = set()
    at = [0] * len(program.order)
    moving = True
    while moving:
        moving = False
        for worker, line in enumerate(rules):
            while at[worker] < len(line):
                needed, held_by, fact = line[at[worker]]
                held = held_by is not None and sends == "rendezvous" and held_by not in done
                if held or not done.issuperset(needed):
                    break
                done.add(fact)
                at[worker] += 1
                moving = True
    stuck = {s: i for s, i in enumerate(at) if i < len(program.order[s])}
    if stuck:
        first = min(stuck, key=lambda s: (stuck[s], s))
        raise ScheduleError(
            f"deadlock under {sends} sends: {program.order[first][stuck[first]]} "
            f"of {program.routes.name(first)} can never run\n" + grid(program, stuck, "cannot run")
        )


def _rules(program: Program, worker: int) -> list[_Rule]:
    """The ops of one worker as the facts that they wait for and bring about."""
    routes, line = program.routes, program.order[worker]
    recomputed = recomputed_of(line)
    rules: list[_Rule] = []
    for op in line:
        token = carried(op, worker, routes)
        if token is None:
            needed: list[_Fact] = []
            for need in needs(op, worker, routes, op[1:] in recomputed):
                if maker(need, routes) == worker:
                    needed.append(("made", need))
                else:
                    needed += [("sent", need), ("posted", need)]
            out = makes(op, worker, routes)
            rules.append((needed, None, ("made", out)))
        elif op.kind in _SENDS:
            rules.append(([("made", token)], ("posted", token), ("sent", token)))
        else:
            rules.append(([], None, ("posted", token)))
    return rules
