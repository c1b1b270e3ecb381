"""A training on GPUs without threads or a clock, of which the remedy sees what stages report.

Each iteration is simulated under the true conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapt.fed_job import FedJob
from measure.records import stock_records

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.pipeline.remedy import PipelineRemedy
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.iteration_record import IterationRecord, OpTime
from megatron_adaptra.measure.link_probe import FIRST, NBYTES, SHARE
from megatron_adaptra.plan import Plan
from megatron_adaptra.plan.pipeline.fixed import first_schedule
from megatron_adaptra.plan.pipeline.initial import over_own_messages
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.transport.base import Stamps

MS = 1e-3
STAGES, COUNT = 4, 12
FORWARD, BACKWARD = 20 * MS, 40 * MS
NCCL, SMALL = 2 * MS, 0.1 * MS  # what a message takes by NCCL, and a small one of ours
MESSAGE = 64 << 20
LINKS = [(a, b) for a in range(STAGES) for b in (a - 1, a + 1) if 0 <= b < STAGES]


@dataclass(frozen=True)
class Truth:
    """What really takes how many seconds.

    `wire`: a message of ours, beyond its delay. `slow`: delays of links. `pace`: a factor of all
    ops. `hidden`: what our messages hold up each op, between two ops, where nothing measures it.
    `only`: links are slow for Megatron's own messages alone (True), or for ours alone (False).
    """

    wire: float
    slow: Mapping[tuple[int, int], float] = field(default_factory=dict)
    pace: float = 1.0
    hidden: float = 0.0
    only: bool | None = None

    def delay(self, link: tuple[int, int], own: bool) -> float:
        """That a link has for ours, or for Megatron's `own` messages."""
        return 0.0 if self.only == (not own) else self.slow.get(link, 0.0)

    def conditions(self, own: bool) -> Conditions:
        """For ours, or for Megatron's `own` messages."""
        forward, backward = self.pace * FORWARD, self.pace * BACKWARD
        if own:
            links = {link: LinkState(NCCL + self.delay(link, own)) for link in LINKS}
        else:
            forward, backward = forward + self.hidden, backward + self.hidden
            rate = MESSAGE / self.wire
            links = {link: LinkState(SMALL + self.delay(link, own), rate) for link in LINKS}
        half = (backward / 2,) * STAGES
        return Conditions(
            COUNT, (forward,) * STAGES, half, half, links, message_bytes=MESSAGE, split=False
        )

    def run(self, schedule: Schedule) -> Timeline:
        """An iteration of a schedule."""
        program = lower(schedule, 0 if schedule.stock else None)
        return simulate(program, self.conditions(schedule.stock), "eager")

    def records(self, schedule: Schedule, iteration: int) -> list[IterationRecord]:
        """What the stages measure of it."""
        timeline = self.run(schedule)
        if schedule.stock:
            out = stock_records(timeline, iteration)
        else:
            out = [self._ours(timeline, stage, iteration) for stage in range(STAGES)]
        for record in out:
            for source, target in LINKS:
                if target == record.worker:
                    least = SMALL + self.delay((source, target), False)
                    record.probed.append((source, _probe(NBYTES, least)))
                    due = iteration < FIRST or iteration % round(1 / SHARE / COUNT) == 1
                    if schedule.stock and due:
                        record.probed.append((source, _probe(MESSAGE, least + self.wire)))
        return out

    def _ours(self, timeline: Timeline, stage: int, iteration: int) -> IterationRecord:
        record = IterationRecord(stage, iteration, 9.0, 9.0 + timeline.makespan)
        for span in sorted((s for s in timeline.spans if s.stage == stage), key=lambda s: s.start):
            if span.op.kind.computes:
                end = 9 + span.end - self.hidden
                record.ops.append(OpTime(span.op, 9 + span.start, end, 0.0))
        for m in timeline.messages:
            if m.target == stage:
                stamps = Stamps(9 + m.sent, 8.0, 9 + m.arrived, eager=True, nbytes=MESSAGE)
                record.messages.append((m.source, m.op, stamps))
        return record


def _probe(nbytes: int, seconds: float) -> Stamps:
    return Stamps(1.0, 0.5, 1.0 + seconds, eager=True, nbytes=nbytes)


class Job(FedJob[Plan, Conditions]):
    """A training, for which `truth` holds until `train` changes it.

    It begins over Megatron's `own` messages, or over ours.

    `predicted`: seconds of every iteration, where that was asked.
    """

    truth: Truth

    def __init__(self, truth: Truth, own: bool = True, stock_sends: str = "rendezvous") -> None:
        self.truth = truth
        start = first_schedule(STAGES, COUNT, (float("inf"),) * STAGES)
        start = over_own_messages(start) if own else start
        estimator = Estimator(COUNT, ["one"] * STAGES, None, MESSAGE, on_device=True)
        self.rule = ReplanPolicy(sends="eager", stock_sends=stock_sends)
        super().__init__(
            start, PipelineRemedy(start, estimator, self.rule, DecisionLog(PlanDecision, None), ())
        )
        self.predicted: dict[int, float] = {}

    def _measured(self, iteration: int) -> list[IterationRecord]:
        return self.truth.records(self._in_force, iteration)

    def feed(self, iteration: int, reports: Any) -> None:
        super().feed(iteration, reports)
        if self.remedy.predicted is not None:
            self.predicted[iteration] = self.remedy.predicted

    def seconds(self, schedule: Schedule) -> float:
        """What an iteration of it takes now."""
        return self.truth.run(schedule).makespan
