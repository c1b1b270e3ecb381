"""The schedules that do not adapt: 1F1B, GPipe, interleaved 1F1B, ZB-H1, ZB-H2, and one by one.

- 1F1B as Megatron runs it: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training"
  (ICML 2021), section 3.
- GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
  Parallelism" (NeurIPS 2019), section 2.3.
- Interleaved 1F1B, as Megatron runs it, with several model chunks per device, depth first:
  Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM" (SC 2021), section 2.2. The model goes round the devices once per chunk, so that a
  device's share of the warmup shrinks with the number of chunks, for as many times the messages.
- The handcrafted zero-bubble schedules: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024),
  sections 2.1 (ZB-H1) and 2.2 (ZB-H2). Weight gradients wait, and fill what would be idle. Both run
  the triangle of 1F1B, but send a gradient upwards as soon as its half of the backward is done.
  Stage i owes `delay` weight gradients throughout and works them off at the end, just when 1F1B
  would idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line, Schedule, warmup_line
from megatron_adaptra.plan.pipeline.base import PLANNERS, planner


def stock_warmup(stages: int, microbatches: int) -> tuple[int, ...]:
    """Return 1F1B's warmup depth per stage, of so many `stages`, with so many `microbatches`."""
    return tuple(min(stages - i, microbatches) for i in range(stages))


def refuse_chunks(conditions: Conditions) -> None:
    """Raise BadInput where a policy for one model chunk per device is given more."""
    if conditions.chunks > 1:
        allowed = "it has to be 1 for all policies but warmup, interleaved and adaptive"
        raise BadInput("chunks", conditions.chunks, allowed)


def first_schedule(stages: int, microbatches: int, budgets: float | Sequence[float]) -> Schedule:
    """Return the first schedule of a job of `stages` and `microbatches`: 1F1B, cut to budgets.

    `budgets`: the microbatches in flight that all stages, or each of them, may have.
    """
    each = budgets if isinstance(budgets, Sequence) else [budgets] * stages
    stock = stock_warmup(stages, microbatches)
    least = [min(each[: i + 1]) for i in range(stages)]  # depths do not grow towards the end
    depths = (int(min(depth, budget)) for depth, budget in zip(stock, least, strict=True))
    order = tuple(warmup_line(depth, microbatches) for depth in depths)
    return Schedule(order, microbatches, policy="1f1b", why="1F1B, as Megatron runs it")


@planner("1f1b")
def one_f_one_b(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Return 1F1B: stage i starts `stages - i` forwards before its first backward.

    `sends` and `time_limit` do not matter. Raises BadInput for several chunks.
    """
    refuse_chunks(conditions)
    return first_schedule(conditions.stages, conditions.microbatches, math.inf)


@planner("gpipe")
def gpipe(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Return GPipe with backwards from microbatch 0 on, as gradients are summed in that order.

    `sends` and `time_limit` do not matter. Raises BadInput for several chunks.
    """
    refuse_chunks(conditions)
    count = conditions.microbatches
    order = (warmup_line(count, count),) * conditions.stages
    return Schedule(order, count, policy="gpipe", why="GPipe: every forward, then every backward")


def one_by_one(conditions: Conditions) -> Schedule:
    """Return a schedule in which a stage ends a microbatch, backward too, before the next one."""
    chunks, count = range(conditions.chunks), conditions.microbatches
    line: list[Op] = []
    for k in range(count):
        line += [Op(Kind.F, k, chunk) for chunk in chunks]
        for chunk in reversed(chunks):
            halves = (Kind.I, Kind.W) if conditions.split else (Kind.B,)
            line += [Op(kind, k, chunk) for kind in halves]
    return Schedule((tuple(line),) * conditions.stages, count, conditions.chunks)


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


def zero_bubble(
    policy: str,
    steepness: int,
    why: str,
    conditions: Conditions,
    sends: str,
    time_limit: float | None,
) -> Schedule:
    """Return the zero-bubble schedule of a `policy`, for the reason `why`.

    `steepness`: forwards by which the warmup grows from one stage to the one before it. `sends` and
    `time_limit` do not matter. Raises BadInput for chunks or whole backwards.
    """
    refuse_chunks(conditions)
    if not conditions.split:
        allowed = "policies zb-h1 and zb-h2 split every backward; 1f1b does not"
        raise BadInput("split", conditions.split, allowed)
    last, count = conditions.stages - 1, conditions.microbatches
    order = tuple(
        zero_bubble_line(1 + steepness * (last - i), steepness * i, count) for i in range(last + 1)
    )
    return Schedule(order, count, policy=policy, why=why)


# The warmup of 1F1B, and no device holds more than the first one does under 1F1B.
PLANNERS["zb-h1"] = partial(
    zero_bubble, "zb-h1", 1,
    "ZB-H1: 1F1B whose weight gradients fill the end, in the memory of 1F1B's first stage",
)  # fmt: skip
# Nearly twice the warmup: no bubble where F, I and W take equally long.
PLANNERS["zb-h2"] = partial(
    zero_bubble, "zb-h2", 2,
    "ZB-H2: weight gradients fill all bubbles, in nearly twice the memory of 1F1B",
)  # fmt: skip


def zero_bubble_line(depth: int, delay: int, microbatches: int) -> Line:
    """`depth` forwards; then I, the W of `delay` microbatches before, and F in turn.

    The line of one stage, for so many `microbatches`. With depth + delay the same on all stages, so
    are the microbatches that are not done with.
    """
    line = [Op(Kind.F, k) for k in range(min(depth, microbatches))]
    for k in range(microbatches):
        line.append(Op(Kind.I, k))
        if k >= delay:
            line.append(Op(Kind.W, k - delay))
        if depth + k < microbatches:
            line.append(Op(Kind.F, depth + k))
    line += [Op(Kind.W, k) for k in range(max(0, microbatches - delay), microbatches)]
    return tuple(line)
