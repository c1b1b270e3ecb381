"""Where an iteration can still be begun anew, and what is under way between its stages then.

Until a verdict on the last optimizer step is there, a stage runs warmup forwards only. If the
verdict is bad, every stage stops at its gate, and the messages of the attempt have to go: the
program tells both ends of a link which were sent and which receives stand posted, so nobody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

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
    return Gate(program.order[stage][gates[stage]], _messages(begun, stage))


def first_posts(program: Program, stage: int) -> Sequence[Op]:
    """The receives that a stage posts before anything else."""
    return tuple(takewhile(lambda op: op.kind in _POSTS, program.order[stage]))


def first_messages(program: Program, stage: int) -> Void:
    """The messages of an iteration that has got no further than its first posts."""
    return _messages({s: first_posts(program, s) for s in _near(program, stage)}, stage)


def _near(program: Program, stage: int) -> range:
    """The stage and its neighbours."""
    return range(max(0, stage - 1), min(program.stages, stage + 2))


def _gate(program: Program, stage: int) -> int:
    """The gate's place in a stage's line."""
    held = _BACKWARD | {Kind.F} if stage == program.stages - 1 else _BACKWARD
    return next(i for i, op in enumerate(program.order[stage]) if op.kind in held)


def _messages(begun: Mapping[int, Sequence[Op]], stage: int) -> Void:
    """`begun[s]`: what stage s has done. Nobody has run a backward."""

    def found(of: int, kind: Kind) -> set[int]:
        return {op.microbatch for op in begun.get(of, ()) if op.kind is kind}

    taken = found(stage, Kind.F) if stage else set()
    owed = [Op(Kind.SEND_B, m) for m in sorted(found(stage - 1, Kind.POST_B))]
    asked = found(stage + 1, Kind.POST_F) - found(stage, Kind.SEND_F)
    owed += [Op(Kind.SEND_F, m) for m in sorted(asked)]
    coming = found(stage, Kind.POST_F) | found(stage - 1, Kind.SEND_F)
    void = [Op(Kind.POST_B, m) for m in sorted(found(stage, Kind.POST_B))]
    void += [Op(Kind.POST_F, m) for m in sorted(coming - taken)]
    return Void(tuple(owed), tuple(void))
