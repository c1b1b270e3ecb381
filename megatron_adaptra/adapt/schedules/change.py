"""A change of plan, of one pipeline or of several replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megatron_adaptra.adapt.schedules.policy import AnyPlan
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.plan import Plan
from megatron_adaptra.plan.routes.reroute import ReplicaPlan

AnyConditions = Conditions | ReplicaConditions

P = TypeVar("P", bound=AnyPlan)
K = TypeVar("K", bound=AnyConditions)


@dataclass(frozen=True)
class Change(Generic[P, K]):
    """A plan to swap to. Ends of links are workers: stages, where there is one pipeline.

    Args:
        why: a sentence.
        plan: what comes.
        current: what is in force.
        conditions: what it is planned for.
        seconds: that planning took.
        links: that it is for, with the seconds that a message took there before.
        workers: that it is for, with how many times as long as their peers they took before.
        retry: these have to be planned for again if it does not come into force.
        trial: if iterations turn out slower, the plan before comes back.
        undoes: the change that has made them slower.
        again: the iteration from which on that is tried again; None where it undoes none.
        tries: workers that get a microbatch to show what they take.
    """

    why: str
    plan: P
    current: P
    conditions: K
    seconds: float = 0.0
    links: Mapping[Path, float] = field(default_factory=dict)
    workers: Mapping[int, float] = field(default_factory=dict)
    retry: bool = False
    trial: bool = True
    undoes: Change[P, K] | None = None
    again: int | None = None
    tries: tuple[int, ...] = ()


PipelineChange = Change[Plan, Conditions]
ReplicaChange = Change[ReplicaPlan, ReplicaConditions]
