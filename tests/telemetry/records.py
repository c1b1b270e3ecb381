"""Made-up records of iterations, and noise as links make it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from statistics import median

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.telemetry.probe import IterationRecord, OpTime
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


def noise(
    rng: random.Random, base: float, count: int, sigma: float = 0.25, spikes: float = 0.01
) -> Iterator[float]:
    """Per iteration the median delay of 16 messages: lognormal, a hundredth five times as long."""
    for _ in range(count):
        yield median(
            base * rng.lognormvariate(0.0, sigma) * (5.0 if rng.random() < spikes else 1.0)
            for _ in range(16)
        )
