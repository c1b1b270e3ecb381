"""What a finished demo run has to show: the one input of the HTML and of the PNG report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_adaptra.ir.timeline import Timeline


@dataclass(frozen=True)
class ArmReport:
    """One arm (stock or adaptra). Timelines are of one iteration of the slow phase."""

    name: str
    iteration_ms: Sequence[float]
    measured: Timeline | None = None
    predicted: Timeline | None = None


@dataclass(frozen=True)
class Report:
    """`summary` is what summary.json holds (see README); `phases` maps a name to [first, end)."""

    title: str
    summary: Mapping[str, Any]
    arms: Sequence[ArmReport]
    phases: Mapping[str, tuple[int, int]]
    # "2>3" -> the delay measured in each iteration
    link_delay_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)
