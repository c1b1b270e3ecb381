"""The data of a finished demo run: the one input of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view.summary import Summary


@dataclass(frozen=True)
class ArmReport:
    """An arm's report holds one iteration that ran under one setting, and the prediction for it.

    Args:
        name: "stock" or "adaptra".
        measured, predicted: one iteration of the slow phase; None where there is none.
        conditions: of replicas that are planned together, as they were then; else None.
    """

    name: str
    measured: Timeline | None = None
    predicted: Timeline | None = None
    conditions: ReplicaConditions | None = None


@dataclass(frozen=True)
class Report:
    """A report holds all that its page shows; empty parts are left out.

    Args:
        title: of the page.
        summary: what `adaptra demo` writes as summary.json.
        arms: in the order in which they are drawn.
        phases: by name, the first iteration and the one after the last.
        link_delay_ms: by directed link, `2>3`, the delay measured in each iteration.
    """

    title: str
    summary: Summary
    arms: Sequence[ArmReport]
    phases: Mapping[str, tuple[int, int]]
    link_delay_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)
