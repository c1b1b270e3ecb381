"""Where an iteration can still be begun anew, and what is under way between its stages then.

Until a verdict on the last optimizer step is there, a stage runs warmup forwards only. If the
verdict is bad, every stage stops at its gate, and the messages of the attempt have to go: the
program tells both ends of a link which were sent and which receives stand posted, so nobody asks.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program

_BACKWARD = frozenset({Kind.B, Kind.I})


@dataclass(frozen=True)
class Gate:
    """One stage's. `op`: the first one that waits for the verdict: a stage's first backward, on the
    last stage, which computes losses, its first forward. `owed`: sends of anything, for receives
    that stand posted at the neighbours. `void`: receives, by their posts, whose messages have to be
    taken and forgotten."""

    op: Op
    owed: tuple[Op, ...]
    void: tuple[Op, ...]


def gate_of(program: Program, stage: int) -> Gate:
    """The gate of a stage of a program without chunks."""
    here = _Begun(program, stage)
    owed: set[Op] = set()
    void = here.posted
    if stage > 0:
        before = _Begun(program, stage - 1)
        void |= {Op(Kind.POST_F, m) for m in before.sent}
        owed |= {Op(Kind.SEND_B, op.microbatch) for op in before.posted if op.kind is Kind.POST_B}
    if stage < program.stages - 1:
        posted = _Begun(program, stage + 1).posted
        asked = {op.microbatch for op in posted if op.kind is Kind.POST_F}
        owed |= {Op(Kind.SEND_F, m) for m in asked - here.sent}
    void -= {Op(Kind.POST_F, m) for m in here.taken}
    return Gate(here.op, tuple(sorted(owed)), tuple(sorted(void)))


class _Begun:
    """What a stage has done when it stands at its gate."""

    def __init__(self, program: Program, stage: int) -> None:
        last = stage == program.stages - 1
        self.posted: set[Op] = set()
        self.sent: set[int] = set()
        self.taken: set[int] = set()
        for op in program.order[stage]:
            if op.kind in _BACKWARD or (last and op.kind is Kind.F):
                self.op = op
                return
            if op.kind in (Kind.POST_F, Kind.POST_B):
                self.posted.add(op)
            elif op.kind is Kind.SEND_F:
                self.sent.add(op.microbatch)
            elif op.kind is Kind.F:
                self.taken.add(op.microbatch)
        raise AssertionError(f"stage {stage} computes nothing")  # no program is like that
