"""Shares of microbatches where replicas are pipelines: each plans for its own count.

A replica's pipeline is simulated to find the seconds of a count: the slowest stage sets the pace,
and filling and draining the pipeline take the same whatever the count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.sync import Pair, SyncPlan
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.plan.pipeline.base import Plan, make_plan
from megatron_adaptra.plan.shares.counts import SharePlan, Speed, least_counts, least_seconds
from megatron_adaptra.sim.clock import step_spans

STOCK = "1f1b"
_ROOM = 1e-9  # of a microbatch, as sums of shares differ in their last bits


@dataclass(frozen=True)
class PipelineShares(SharePlan):
    """A share plan of pipelines adds the plan of each replica for its count.

    Args:
        conditions: of all workers.
        plans: by replica, of its pipeline alone, without the optimizer step.
        before: the same in stock, where all replicas run equally many.
    """

    conditions: ReplicaConditions | None = None
    plans: tuple[Plan, ...] = ()
    before: tuple[Plan, ...] = ()

    def timelines(self) -> tuple[Timeline, Timeline]:
        """Return an iteration of all replicas: in stock, and with these counts."""
        assert self.conditions is not None
        full = SyncPlan.full_of(self.sync.replicas, self.sync.microbatches)
        return (
            _together(self.before, full, self.conditions, "full"),
            _together(self.plans, self.sync, self.conditions, "share"),
        )


def share_pipelines(
    conditions: ReplicaConditions,
    sends: str = "eager",
    counts: Sequence[int] | None = None,
) -> PipelineShares:
    """Find the counts with the fastest iteration, or evaluate one with other `counts`.

    Where a replica has no memory for more microbatches in flight, it gets no more.

    Args:
        conditions: of all workers; none of them is dead.
        sends: "eager" or "rendezvous".
        counts: by replica; None for the best ones.

    Raises:
        BadInput: a worker is dead; counts that are no plan, or that memory is too small for.
    """
    c = conditions
    if c.failed:
        names = ", ".join(map(c.name, sorted(c.failed)))
        allowed = "a replica with a dead worker runs nothing; routes go round it, shares do not"
        raise BadInput("failed", names, allowed)
    pipelines = _Pipelines(c, sends)
    each, speeds = c.microbatches, [speed_of(c, replica) for replica in c.all_replicas]
    for replica in c.all_replicas:
        pipelines.prove(replica, each)
    if counts is None:
        costs = [partial(pipelines.seconds, replica) for replica in c.all_replicas]
        counts = least_counts(costs, each, least_counts([s.seconds for s in speeds], each))
    sync = SyncPlan(each, tuple(counts))
    if sync.replicas != c.replicas:
        allowed = f"one per replica, and there are {c.replicas}"
        raise BadInput("counts of microbatches", list(counts), allowed)
    for replica, count in enumerate(sync.counts):
        pipelines.prove(replica, count)
    step = c.pipeline.step_seconds
    plans = tuple(map(pipelines.plan, c.all_replicas, sync.counts))
    before = tuple(pipelines.plan(replica, each) for replica in c.all_replicas)
    return PipelineShares(
        sync,
        tuple(plan.predicted for plan in plans),
        max(plan.predicted for plan in before) + step,
        least_seconds(speeds, each) + step,
        step,
        c,
        plans,
        before,
    )


def pipeline_of(conditions: ReplicaConditions, replica: int, count: int) -> Conditions:
    """Return the conditions of a `replica`'s pipeline for `count` microbatches, without a step."""
    c, p, first = conditions, conditions.pipeline, replica * conditions.stages
    one = c.chain(range(first, first + c.stages))
    own = {s: c.ports[first + s] for s in range(c.stages) if first + s in c.ports}
    return replace(
        one,
        microbatches=count,
        ports={**p.ports, **own},
        step_seconds=0.0,
        step_sync=(),
        core_share=one.core_share if c.core_share or p.core_share else (),
    )


def speed_of(conditions: ReplicaConditions, replica: int) -> Speed:
    """Return a speed that no schedule of a `replica` can beat, for every number of microbatches.

    Its slowest stage runs all of them, and begins when the first one has come through the stages
    before it. Without halves of backwards, the last gradient then has to go back through these.
    """
    c = pipeline_of(conditions, replica, 1)
    if c.shared:  # then all stages together may be the slowest
        return Speed(c.microbatch_seconds)
    each = [c.seconds(Kind.F, s) + c.seconds(Kind.B, s) for s in range(c.stages)]
    if c.backward and c.split:  # a planner may run halves, where these take less
        halves = zip(c.forward, c.backward_input, c.backward_weight, strict=True)
        each = [min(a, sum(b)) for a, b in zip(each, halves, strict=True)]
    slowest = max(range(c.stages), key=lambda s: (each[s], s))
    outside = 0.0
    for stage in range(slowest):
        outside += c.forward[stage] + c.message_seconds(stage, stage + 1)
        if not c.split:
            outside += c.message_seconds(stage + 1, stage) + c.seconds(Kind.B, stage)
    return Speed(each[slowest], outside)


class _Pipelines:
    """A cache holds the plan of each replica for each count, one for all that are alike."""

    def __init__(self, conditions: ReplicaConditions, sends: str) -> None:
        self._conditions, self._sends = conditions, sends
        known: list[Conditions] = []
        self._like = []  # by replica, the number of the first one that is like it
        for replica in conditions.all_replicas:
            one = pipeline_of(conditions, replica, 1)
            if one not in known:
                known.append(one)
            self._like.append(known.index(one))
        self._known = known
        self._plans: dict[tuple[int, int], Plan] = {}

    def plan(self, replica: int, count: int) -> Plan:
        key = self._like[replica], count
        if key not in self._plans:
            one = replace(self._known[key[0]], microbatches=count)
            self._plans[key] = make_plan(one, STOCK, self._sends)
        return self._plans[key]

    def seconds(self, replica: int, count: int) -> float:
        """Return the seconds of an iteration; infinite where activations do not fit."""
        plan = self.plan(replica, count)
        return math.inf if self._crowded(plan) else plan.predicted

    def prove(self, replica: int, count: int) -> None:
        """Raise BadInput where activations of so many do not fit."""
        plan = self.plan(replica, count)
        if stages := self._crowded(plan):
            worker = self._conditions.name(replica * self._conditions.stages + stages[0])
            allowed = (
                f"policy {STOCK} needs at least {plan.peak_in_flight[stages[0]]:g} on worker"
                f" {worker} for {count} microbatches"
            )
            budget = plan.conditions.activation_budget[stages[0]]
            raise BadInput("activation_budget", budget, allowed)

    @staticmethod
    def _crowded(plan: Plan) -> list[int]:
        """Return the stages that hold more than they may."""
        pairs = zip(plan.peak_in_flight, plan.conditions.activation_budget, strict=True)
        return [stage for stage, (peak, most) in enumerate(pairs) if peak > most + _ROOM]


def _together(
    plans: Sequence[Plan], sync: SyncPlan, conditions: ReplicaConditions, name: str
) -> Timeline:
    """Combine the replicas' pipelines into one iteration, with the step when all are done."""
    stages = conditions.stages
    spans: list[Span] = []
    messages: list[Message] = []
    for replica, plan in enumerate(plans):
        first, share = replica * stages, sync.share(replica)
        for span in plan.timeline.spans:
            spans.append(span._replace(stage=first + span.stage, op=_at_home(span.op, share)))
        for message in plan.timeline.messages:
            ends = {"source": first + message.source, "target": first + message.target}
            messages.append(message._replace(op=_at_home(message.op, share), **ends))
    end = max((span.end for span in spans), default=0.0)
    spans += step_spans(conditions, end)
    return Timeline(tuple(spans), tuple(messages), name, conditions.replicas, stages)


def _at_home(op: Op, share: Sequence[Pair]) -> Op:
    """Return the op with the home of its microbatch, and its number there."""
    home, microbatch = share[op.microbatch]
    return op._replace(microbatch=microbatch, home=home)
