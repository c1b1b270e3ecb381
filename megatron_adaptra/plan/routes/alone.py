"""Workers that share cores, as if each had its own: for searches that know no shared cores."""

from __future__ import annotations

from dataclasses import replace

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.pipeline.base import Evaluated


def alone(conditions: ReplicaConditions, stretch: float) -> ReplicaConditions:
    """The same with a device per worker, on which what ops compute takes `stretch` times as long.

    What they wait for takes as long as before.
    """
    c, p = conditions, conditions.pipeline
    each = [_longer(p.on_core(stage), stretch) for stage in range(p.stages)]
    slow = {}
    for worker in range(c.workers):
        times = c.slow.get(worker, 1.0) * _longer(c.on_core(worker), stretch)
        if times != each[worker % p.stages]:
            slow[worker] = times / each[worker % p.stages]
    pipeline = replace(p.scaled(each), cores=None, core_share=())
    return replace(c, pipeline=pipeline, slow=slow, core_share={})


def stretched(plan: Evaluated[ReplicaConditions]) -> float:
    """How many times as long as on cores of its own what ops compute takes in a `plan`."""
    c = plan.conditions
    took = computed = 0.0
    for span in plan.timeline.spans:
        if span.op.kind.computes:
            seconds = c.seconds(span.op.kind, span.stage)
            waited = seconds * (1 - c.on_core(span.stage))
            took += span.end - span.start - waited
            computed += seconds - waited
    return max(1.0, took / computed) if computed > 0 else 1.0


def _longer(share: float, stretch: float) -> float:
    return 1 + share * (stretch - 1)
