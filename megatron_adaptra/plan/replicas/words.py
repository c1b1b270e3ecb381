"""What a plan for several replicas does, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.replicas.chains import Chains

MOST = 4  # workers that a sentence names


def in_words(schedule: Schedule, conditions: ReplicaConditions, chains: Chains) -> str:
    """Which replicas exchange stages, and which workers run fewer microbatches than a replica has.

    Args:
        schedule: the plan.
        conditions: what it is for.
        chains: workers that form the pipelines of the plan.
    """
    c = conditions
    exchanged: dict[tuple[int, ...], list[int]] = {}  # by replicas, the stages
    for stage in range(c.stages):
        away = tuple(d for d, chain in enumerate(chains) if chain[stage] // c.stages != d)
        if away:
            exchanged.setdefault(away, []).append(stage)
    words = [
        f"replicas {_list(away)} exchange stage{'s' * (len(stages) > 1)} {_list(stages)}"
        for away, stages in exchanged.items()
    ]
    runs = [sum(op.kind is Kind.F for op in line) for line in schedule.order]
    fewer = [w for w in range(c.workers) if runs[w] < c.microbatches]
    fewer.sort(key=lambda w: (w not in c.failed, runs[w], w))
    named = [f"{c.name(w)} runs {runs[w]} of {c.microbatches}" for w in fewer[:MOST]]
    if len(fewer) > MOST:
        named.append(f"{len(fewer) - MOST} more workers run fewer")
    if named:
        named[0] = f"worker {named[0]} microbatches"
    text = "; ".join([*words, *filter(None, [", ".join(named)])])
    return text or "every microbatch stays at home"


def _list(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
