"""One microbatch after the other: as slow as can be, and it fits wherever anything does."""

from __future__ import annotations

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Schedule


def one_by_one(conditions: Conditions) -> Schedule:
    """No microbatch starts on a stage before the one ahead of it is done with there."""
    chunks, count = range(conditions.chunks), conditions.microbatches
    line: list[Op] = []
    for k in range(count):
        line += [Op(Kind.F, k, chunk) for chunk in chunks]
        for chunk in reversed(chunks):
            halves = (Kind.I, Kind.W) if conditions.split else (Kind.B,)
            line += [Op(kind, k, chunk) for kind in halves]
    return Schedule((tuple(line),) * conditions.stages, count, conditions.chunks)
