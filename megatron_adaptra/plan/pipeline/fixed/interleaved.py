"""Interleaved 1F1B, as Megatron runs it: several model chunks per device, depth first.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC 2021), section 2.2. The model goes round the devices once per chunk, so that a
device's share of the warmup shrinks with the number of chunks, for as many times the messages.
"""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.plan.pipeline.base import planner


@planner("interleaved")
def interleaved(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Return the schedule that Megatron runs. Raises BadInput where Megatron refuses too.

    `sends` and `time_limit` do not matter.
    """
    stages, count, chunks = conditions.stages, conditions.microbatches, conditions.chunks
    if chunks == 1:
        raise BadInput(
            "chunks", chunks, "policy interleaved needs at least 2; with 1 it is policy 1f1b"
        )
    if stages == 1:
        raise BadInput("stages", stages, "policy interleaved needs at least 2")
    if count % stages:
        allowed = f"with several chunks it has to be a multiple of the stages, here {stages}"
        raise BadInput("microbatches", count, allowed)
    order = tuple(interleaved_line(stage, stages, count, chunks, stages) for stage in range(stages))
    why = f"interleaved 1F1B with {chunks} chunks per device, as Megatron runs it"
    return Schedule(order, count, chunks, policy="interleaved", why=why)


def interleaved_line(
    stage: int, stages: int, microbatches: int, chunks: int, group: int, more: int = 0
) -> Line:
    """Return the line of `stage`, of so many `stages` with so many `chunks` each.

    A group of `group` of the `microbatches` goes through all chunks before the next group starts.
    The backwards do the same from the last chunk to the first. The warmup lets the first group
    reach its last chunk everywhere, and then the usual triangle, twice as steep as that of 1F1B.
    `more`: forwards that the warmup has beyond Megatron's.
    """
    groups = [
        range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)
    ]
    forwards, backwards = (
        [
            Op(kind, k, chunk)
            for members in groups
            for chunk in way
            for k in members
        ]
        for kind, way in (
            (Kind.F, range(chunks)),
            (Kind.B, range(chunks - 1, -1, -1)),
        )
    )  # fmt: skip
    warmup = min(2 * (stages - stage - 1) + (chunks - 1) * group + more, len(forwards))
    line = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        line += [forward, backward]
    return tuple(line + backwards[len(forwards) - warmup :])
