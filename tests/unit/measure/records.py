"""Made-up records of iterations, and noise as links make it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.iteration_record import IterationRecord, OpTime
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan import make_plan
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.transport.base import Stamps


def record(
    stage: int,
    iteration: int,
    delays: Mapping[int, float],
    *,
    forward: float = 0.01,
    backward: float = 0.02,
    count: int = 4,
    begin: float = 100.0,
    step: float = 0.005,
    clock: Mapping[int, float] | None = None,
    busy: float = 1.0,
) -> IterationRecord:
    """`count` microbatches, one after the other; from stage s messages take `delays[s]` seconds.

    `clock[s]` is how far that stage's clock is ahead of the common one; `busy`: CPU seconds of the
    process per CPU second of its ops.
    """
    ahead = clock or {}
    out, now = IterationRecord(stage, iteration, begin + ahead.get(stage, 0.0)), begin
    for i in range(count):
        for kind, seconds in ((Kind.F, forward), (Kind.B, backward)):
            mine = now + ahead.get(stage, 0.0)
            out.ops.append(OpTime(Op(kind, i), mine, mine + seconds, seconds / 2))
            for source, delay in delays.items():
                sent = now + ahead.get(source, 0.0)
                stamps = Stamps(sent, mine - 1e-3, mine + delay, mine)
                out.messages.append((source, Op(kind, i), stamps))
            now += seconds
    out.cpu = busy * sum(op.cpu for op in out.ops)
    out.end = now + ahead.get(stage, 0.0) + step
    return out


def report(worker: int, **fields: Any) -> StageReport:
    """Of a worker that has measured nothing but these `fields`."""
    return replace(IterationRecord(worker, 0).report(), **fields)


def noise(
    rng: random.Random, base: float, count: int, sigma: float = 0.25, spikes: float = 0.01
) -> Iterator[float]:
    """Per iteration the median delay of 16 messages: lognormal, a hundredth five times as long."""
    for _ in range(count):
        yield median(
            base * rng.lognormvariate(0.0, sigma) * (5.0 if rng.random() < spikes else 1.0)
            for _ in range(16)
        )


def job(
    delays: Mapping[tuple[int, int], float],
    stages: int,
    chunks: int = 1,
    *,
    count: int = 0,
    forward: float = 0.01,
    backward: float = 0.02,
) -> Conditions:
    """Equal stages; `count` microbatches, or two per stage."""
    links = {link: LinkState(delay) for link, delay in delays.items()}
    half = (backward / 2,) * stages
    return Conditions(
        count or 2 * stages, (forward,) * stages, half, half, links, chunks=chunks, split=False
    )


def stock(conditions: Conditions) -> Timeline:
    """What Megatron's own schedule does over its own messages."""
    policy = "interleaved" if conditions.chunks > 1 else "1f1b"
    return simulate(lower(make_plan(conditions, policy).schedule, 0), conditions, "eager")


def stock_records(
    timeline: Timeline,
    iteration: int = 0,
    late: Mapping[int, float] | None = None,
    probed: Mapping[tuple[int, int], float] | None = None,
) -> list[IterationRecord]:
    """What the stages see of it; on stage s the host calls `late[s]` after the op before."""
    out, begin = [], 1.0
    for stage in range(timeline.stages):
        record = IterationRecord(stage, iteration, begin, begin + timeline.makespan, stock=True)
        spans = (s for s in timeline.spans if s.stage == stage and s.op.kind.computes)
        before = 0.0
        for s in sorted(spans, key=lambda s: s.start):
            asked = begin + before + (late or {}).get(stage, 0.0)
            record.ops.append(OpTime(s.op, begin + s.start, begin + s.end, 0.0, asked))
            before = s.end
        for (source, target), seconds in (probed or {}).items():
            if target == stage:
                record.probed.append((source, Stamps(1.0, 0.5, 1.0 + seconds, eager=True)))
        out.append(record)
    return out
