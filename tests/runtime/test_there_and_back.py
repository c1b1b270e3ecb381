"""Off Megatron's own messages and back to them, by what each kind of message really takes.

No threads, no clock: each iteration is simulated under the true conditions, the replanner gets
what the stages would have reported of it, and its plans come into force two iterations later.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from telemetry.records import stock_records

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan.fixed.baselines import first_schedule
from megatron_adaptra.plan.initial import over_own_messages
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.replanner import Replanner
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.telemetry.estimate import Estimator
from megatron_adaptra.telemetry.link_probe import NBYTES, SHARE
from megatron_adaptra.telemetry.probe import IterationRecord, OpTime
from megatron_adaptra.transport.base import Stamps

MS = 1e-3
STAGES, COUNT = 4, 12
FORWARD, BACKWARD = 20 * MS, 40 * MS
NCCL, SMALL = 2 * MS, 0.1 * MS  # what a message takes by NCCL, and a small one of ours
MESSAGE = 64 << 20
LINKS = [(a, b) for a in range(STAGES) for b in (a - 1, a + 1) if 0 <= b < STAGES]
Slow = Mapping[tuple[int, int], float]


def true_conditions(slow: Slow, wire: float, own: bool) -> Conditions:
    """`own`: Megatron's own messages; ours take `wire` seconds on the link besides."""
    if own:
        links = {link: LinkState(NCCL + slow.get(link, 0.0)) for link in LINKS}
    else:
        links = {link: LinkState(SMALL + slow.get(link, 0.0), MESSAGE / wire) for link in LINKS}
    half = (BACKWARD / 2,) * STAGES
    return Conditions(
        COUNT, (FORWARD,) * STAGES, half, half, links, message_bytes=MESSAGE, split=False
    )


def run(schedule: Schedule, slow: Slow, wire: float) -> Timeline:
    conditions = true_conditions(slow, wire, schedule.stock)
    return simulate(lower(schedule, 0 if schedule.stock else None), conditions, "eager")


def probe(nbytes: int, seconds: float) -> Stamps:
    return Stamps(1.0, 0.5, 1.0 + seconds, eager=True, nbytes=nbytes)


def records(schedule: Schedule, slow: Slow, wire: float, iteration: int) -> list[IterationRecord]:
    timeline = run(schedule, slow, wire)
    if schedule.stock:
        out = stock_records(timeline, iteration)
    else:
        out = [ours(timeline, stage, iteration) for stage in range(STAGES)]
    for record in out:
        for source, target in LINKS:
            if target == record.stage:
                least = SMALL + slow.get((source, target), 0.0)
                record.probed.append((source, probe(NBYTES, least)))
                if schedule.stock and iteration % round(1 / SHARE / COUNT) == 1:
                    record.probed.append((source, probe(MESSAGE, least + wire)))
    return out


def ours(timeline: Timeline, stage: int, iteration: int) -> IterationRecord:
    record = IterationRecord(stage, iteration, 9.0, 9.0 + timeline.makespan)
    for span in sorted((s for s in timeline.spans if s.stage == stage), key=lambda s: s.start):
        if span.op.kind.computes:
            record.ops.append(OpTime(span.op, 9 + span.start, 9 + span.end, 0.0))
    for m in timeline.messages:
        if m.target == stage:
            stamps = Stamps(9 + m.sent, 8.0, 9 + m.arrived, eager=True, nbytes=MESSAGE)
            record.messages.append((m.source, m.op, stamps))
    return record


class Job:
    """A training whose links are as `slow` says."""

    def __init__(self, wire: float) -> None:
        self.wire, self.iteration = wire, 0
        self.start = over_own_messages(first_schedule(STAGES, COUNT, (float("inf"),) * STAGES))
        estimator = Estimator(COUNT, ["one"] * STAGES, None, MESSAGE, on_device=True)
        self.rule = ReplanPolicy(sends="eager")
        self.replanner = Replanner(self.start, estimator, self.rule)
        self.in_force, self.before = self.start, None
        self.due: tuple[int, Schedule] | None = None
        self.changes: list[tuple[int, str]] = []

    def train(self, iterations: int, slow: Slow) -> list[Schedule]:
        """The schedules that ran."""
        ran = []
        for _ in range(iterations):
            if self.due is not None and self.iteration >= self.due[0]:
                self.in_force, self.due = self.due[1], None
            ran.append(self.in_force)
            now = records(self.in_force, slow, self.wire, self.iteration)
            before = self.before or [None] * STAGES
            reports = [r.report(b) for r, b in zip(now, before, strict=True)]
            previous = ran[-2] if len(ran) > 1 else None
            changed = self.replanner.observe(self.iteration, reports, previous)
            change = self.replanner.propose(
                self.iteration, changed, self.in_force, self.due is None
            )
            if change is not None:
                self.due = self.iteration + 2, change.plan.schedule
                self.replanner.swapped(change, self.iteration + 2)
                self.changes.append((self.iteration, change.why))
            self.before = now
            self.iteration += 1
        return ran


@pytest.mark.parametrize("wire_ms", [1, 8, 12, 20, 60])
@pytest.mark.parametrize("where", [[(1, 2), (2, 1)], [(2, 3)]])
def test_a_healed_pipeline_goes_back_whatever_our_messages_take(
    wire_ms: int, where: list[tuple[int, int]]
) -> None:
    """40 ms three times; where ours would lose, stock stays."""
    training = Job(wire_ms * MS)
    slow = dict.fromkeys(where, 40 * MS)
    healthy = run(training.start, {}, training.wire).makespan
    assert training.train(20, {}) == [training.start] * 20
    for _ in range(3):
        ran = training.train(20, slow)
        stock_seconds = run(training.start, slow, training.wire).makespan
        taken = run(ran[-1], slow, training.wire).makespan
        assert taken <= 1.001 * stock_seconds, training.changes
        possible = training.rule.make_plan(true_conditions(slow, training.wire, own=False))
        gain = 1 - possible.predicted / stock_seconds
        if abs(gain - training.rule.min_gain) > 0.02:  # not just on the edge
            assert ran[-1].stock == (gain < training.rule.min_gain), (gain, training.changes)
        ran = training.train(20, {})
        assert all(one.stock for one in ran[10:]), training.changes
        assert run(ran[-1], {}, training.wire).makespan == healthy
        evaluated = training.replanner.stock().makespan
        assert evaluated == pytest.approx(healthy, rel=0.02)
