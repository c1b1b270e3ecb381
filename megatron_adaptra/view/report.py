"""The data of a finished demo run: the one input of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.summary import Summary


@dataclass(frozen=True)
class ArmReport:
    """An arm's report holds the iterations that ran under one setting.

    Args:
        name: "stock" or "adaptra".
        iteration_ms: how long each iteration took, in order.
        measured, predicted: one iteration of the slow phase; None where there is none.
        conditions: of replicas that are planned together, as they were then; else None.
    """

    name: str
    iteration_ms: Sequence[float]
    measured: Timeline | None = None
    predicted: Timeline | None = None
    conditions: ReplicaConditions | None = None


@dataclass(frozen=True)
class Reduction:
    """A reduction shows an all-reduce of gradients, by native and by its successor, as simulated.

    Args:
        iteration: from which on it ran.
        ranks: global ranks of the group, of which the rows are, in words.
        name: of what ran.
        native, ours: the simulated pictures.
        native_ms, ours_ms: simulated, from the last arrival to the end.
        measured_native_ms, measured_ms: the medians of what was measured; None where nothing was.
    """

    iteration: int
    ranks: str
    name: str
    native: Gantt
    ours: Gantt
    native_ms: float
    ours_ms: float
    measured_native_ms: float | None = None
    measured_ms: float | None = None


@dataclass(frozen=True)
class SharedIteration:
    """A shared iteration shows all replicas before and after their counts changed, simulated.

    Args:
        iteration: from which on the counts were in force.
        before, after: by replica, how many microbatches it ran.
        gantt: a row per replica before, then a row per replica after.
        before_ms, after_ms: simulated.
        measured_ms: the median of what was measured after; None where nothing was.
    """

    iteration: int
    before: Sequence[int]
    after: Sequence[int]
    gantt: Gantt
    before_ms: float
    after_ms: float
    measured_ms: float | None = None


@dataclass(frozen=True)
class Report:
    """A report holds all that its page shows; empty parts are left out.

    Args:
        title: of the page.
        summary: what `adaptra demo` writes as summary.json.
        arms: in the order in which they are drawn.
        phases: by name, the first iteration and the one after the last.
        link_delay_ms: by directed link, `2>3`, the delay measured in each iteration.
        reduction: one all-reduce that was chosen while training; None where there was none.
        shared: one change of the replicas' microbatches; None where there was none.
    """

    title: str
    summary: Summary
    arms: Sequence[ArmReport]
    phases: Mapping[str, tuple[int, int]]
    link_delay_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    reduction: Reduction | None = None
    shared: SharedIteration | None = None
