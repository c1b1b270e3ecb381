"""Jobs for the hostile driver: which schedule runs where, drawn from a seed."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.emulate.rules import LinkRule
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Line, Schedule, warmup_line
from megatron_adaptra.plan.pipeline.fixed import interleaved_line

NATIVE, EXECUTOR = "native", "executor"


@dataclass(frozen=True)
class Job:
    """`order`: NATIVE is Megatron's own schedule, EXECUTOR our loop, with backwards in halves."""

    stages: int
    chunks: int
    order: str
    queues: int
    seed: int
    iterations: int = 2

    def random(self, what: str) -> random.Random:
        return random.Random(f"{what} of {self}")

    @property
    def microbatches(self) -> int:
        count = self.random("count")
        if self.chunks > 1:
            return self.stages * count.choice((1, 2))
        return count.choice((3, 4, 6, 8))

    @property
    def replicas(self) -> int:
        """Pipelines that do the same; the ranks of a stage have collectives."""
        chance = {2: 0.5, 4: 0.1}.get(self.stages, 0.0)
        return 1 + (self.random("replicas").random() < chance)

    @property
    def tensor_parallel(self) -> bool:
        """Whether these are in each op; else they are of gradients, beside the ops."""
        return self.random("collectives").random() < 0.5

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas

    def rank(self, replica: int, stage: int) -> int:
        return replica * self.stages + stage

    @property
    def words(self) -> int:
        """Of a message, eight bytes each."""
        return self.random("size").choice((8, 64, 640))

    @property
    def piece(self) -> int:
        """Bytes of a message that are copied at a time, in some jobs; 0: all of them."""
        return self.random("pieces").choice((0, 8 * (self.words // 3 + 1)))

    @property
    def rules(self) -> list[LinkRule]:
        """Links whose messages are held back for a moment, in some jobs."""
        rng = self.random("links")
        pairs = [(a, (a + 1) % self.stages) for a in range(self.stages)]
        ways = [way for a, b in pairs for way in ((a, b), (b, a))]
        return [LinkRule(*way, delay=0.001) for way in rng.sample(ways, rng.choice((0, 0, 1, 2)))]

    def program(self, iteration: int) -> Program:
        """Another schedule in each iteration."""
        return _program(self, iteration)

    def _program(self, iteration: int) -> Program:
        rng = self.random(f"schedule {iteration}")
        more = rng.choice((0, 1, 2, 4))
        until = rng.randint(0, self.stages)
        ahead = rng.choice((None, None, 0, 1))
        while True:
            depths = [more * (s < until) for s in range(self.stages)]
            order = tuple(self._line(stage, depths, rng) for stage in range(self.stages))
            schedule = Schedule(order, self.microbatches, self.chunks)
            try:
                check(lower(schedule))  # as gloo would need it; the engine sends at once
            except ScheduleError:  # its warmup is so deep that stages wait for each other
                more -= 1
                if more < 0:
                    raise
                continue
            return lower(schedule, ahead)

    def _line(self, stage: int, more: list[int], rng: random.Random) -> Line:
        count = self.microbatches
        if self.chunks > 1:
            line = interleaved_line(
                stage, self.stages, count, self.chunks, self.stages, more[stage]
            )
        else:
            line = warmup_line(min(count, self.stages - stage + more[stage]), count)
        return line if self.order == NATIVE else _in_halves(line, rng)


@functools.lru_cache(8)
def _program(job: Job, iteration: int) -> Program:
    return job._program(iteration)


def _in_halves(line: Line, rng: random.Random) -> Line:
    """Some backwards in halves, the second of which waits for a while; all keep their order."""
    out: list[Op] = []
    waiting: list[Op] = []
    for op in line:
        if op.kind is Kind.B and (waiting or rng.random() < 0.7):
            out.append(op._replace(kind=Kind.I))
            waiting.append(op._replace(kind=Kind.W))
        else:
            out.append(op)
        while waiting and rng.random() < 0.4:
            out.append(waiting.pop(0))
    return tuple(out + waiting)
