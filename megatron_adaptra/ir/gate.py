"""Where an iteration can still be begun anew, and what is under way between its stages then.

Until a verdict on the last optimizer step is there, a stage runs warmup forwards only. If the
verdict is bad, every stage stops at its gate, and the messages of the attempt have to go: the
program tells both ends of a link which were sent and which receives stand posted, so nobody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from megatron_adaptra.ir.deps import ACTIVATION, GRADIENT, Token, carried, consumer, remote_need
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program

_BACKWARD = frozenset({Kind.B, Kind.I})
_POSTS = frozenset({Kind.POST_F, Kind.POST_B})


class Void(NamedTuple):
    """What one stage does to clear its links. `owed`: sends of anything, for receives that stand
    posted at the neighbours; then `void`: receives, named by their posts, whose messages are
    forgotten."""

    owed: tuple[Op, ...]
    void: tuple[Op, ...]


class Gate(NamedTuple):
    """One stage's. `op` is the first one that waits for the verdict: the first backward, and on the
    last stage, which computes losses, the first forward."""

    op: Op
    messages: Void


def gate_of(program: Program, stage: int) -> Gate:
    """The gate of a stage of a program without chunks, and the messages of what stands before."""
    gates = {s: _gate(program, s) for s in _near(program, stage)}
    begun = {s: program.order[s][:at] for s, at in gates.items()}
    return Gate(program.order[stage][gates[stage]], _messages(program, begun, stage))


def first_posts(program: Program, stage: int) -> Sequence[Op]:
    """The receives that a stage posts before anything else."""
    return tuple(takewhile(lambda op: op.kind in _POSTS, program.order[stage]))


def first_messages(program: Program, stage: int) -> Void:
    """The messages of an iteration that has got no further than its first posts."""
    begun = {s: first_posts(program, s) for s in _near(program, stage)}
    return _messages(program, begun, stage)


def _near(program: Program, stage: int) -> set[int]:
    """The stage and those it has links to; with chunks the last stage has one to the first."""
    near = {stage - 1, stage, stage + 1}
    if program.chunks > 1:
        return {s % program.stages for s in near}
    return near & set(range(program.stages))


def _gate(program: Program, stage: int) -> int:
    """The gate's place in a stage's line."""
    held = _BACKWARD | {Kind.F} if stage == program.stages - 1 else _BACKWARD
    return next(i for i, op in enumerate(program.order[stage]) if op.kind in held)


def _messages(program: Program, begun: Mapping[int, Sequence[Op]], stage: int) -> Void:
    """`begun[s]`: what stage s has done. Nobody has run a backward."""
    stages, chunks = program.stages, program.chunks
    sent: dict[Token, int] = {}  # and by whom
    posted: dict[Token, int] = {}
    taken: set[Token] = set()
    for s, line in begun.items():
        for op in line:
            token = carried(op, s, stages)
            if token is not None:
                (posted if op.kind in _POSTS else sent)[token] = s
            elif s == stage and (used := remote_need(op, s, stages, chunks)) is not None:
                taken.add(used)
    owed = [t for t in posted if t.position % stages == stage and t not in sent]
    coming = {t for t, s in posted.items() if s == stage}
    coming |= {t for t in sent if consumer(t, stages, chunks) == stage}
    return Void(
        tuple(_op(t, t.position, _SEND, stages) for t in sorted(owed, key=_place)),
        tuple(
            _op(t, t.position + _STEP[t.kind], _POST, stages)
            for t in sorted(coming - taken, key=_place)
        ),
    )


_SEND = {ACTIVATION: Kind.SEND_F, GRADIENT: Kind.SEND_B}
_POST = {ACTIVATION: Kind.POST_F, GRADIENT: Kind.POST_B}
_STEP = {ACTIVATION: 1, GRADIENT: -1}  # from who makes a token to who uses it


def _place(token: Token) -> tuple[bool, int, int]:
    """Gradients first; in the order in which stages come to them."""
    return token.kind == ACTIVATION, token.position, token.microbatch


def _op(token: Token, position: int, kinds: Mapping[str, Kind], stages: int) -> Op:
    """The op of whoever is at `position` that moves a token."""
    return Op(kinds[token.kind], token.microbatch, position // stages)
