"""The report's part on shares of microbatches found while training: for page, PNG and table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_adaptra.view import findings
from megatron_adaptra.view.axis import number
from megatron_adaptra.view.report import Report, SharedIteration

TITLE = "One iteration of all replicas, before and after"
_TIMES = (("with equal counts", "full"), ("predicted", "predicted"), ("measured", "measured"))


def share_decisions(report: Report) -> list[Mapping[str, Any]]:
    """Return the decisions on shares, in order."""
    return [findings.mapping(one) for one in findings.listing(report.summary.get("shares"))]


def detail(decision: Mapping[str, Any]) -> str:
    """Describe a `decision`: the change, the predicted and measured times, the other remedies."""
    before, after = (counts(decision.get(key)) for key in ("before", "after"))
    parts = [f"{before} → {after} microbatches"] if before and after else []
    times = [(word, findings.value(decision.get(f"{key}_ms"))) for word, key in _TIMES]
    known = [f"{word} {number(ms)} ms" for word, ms in times if ms is not None]
    if known:
        parts.append(f"an iteration {', '.join(known)}")
    for one in map(findings.mapping, findings.listing(decision.get("cheaper"))):
        leaves = findings.value(one.get("leaves_ms"))
        if leaves is not None and one.get("remedy"):
            parts.append(f"{one['remedy']} would leave {number(leaves)} ms")
    return "; ".join(parts)


def counts(data: object) -> str:
    """Microbatches by replica, `9,9,5,9`; empty where `data` is no list of them."""
    return ",".join(str(one) for one in findings.listing(data))


def words(decision: Mapping[str, Any]) -> str:
    """A line of the closing table, for a `decision` of summary.json."""
    return (
        f"microbatches from iteration {decision['iteration']} on, {counts(decision['after'])}: "
        f"{decision['why']} ({detail(decision)})"
    )


def title(shared: SharedIteration) -> str:
    """Counts and milliseconds of both halves of the picture."""
    text = (
        f"{counts(shared.before)}: {number(shared.before_ms)} ms; then {counts(shared.after)}: "
        f"{number(shared.after_ms)} ms"
    )
    if shared.measured_ms is not None:
        text += f", measured {number(shared.measured_ms)} ms"
    return text


def about(shared: SharedIteration) -> str:
    """Return the caption of the picture."""
    return (
        f"As simulated from what had been measured when counts were chosen for iteration "
        f"{shared.iteration}: a row per replica, before and after. Each microbatch takes what it "
        f"takes the slowest stage of the replica; a stripe marks a sample of another replica."
    )


def common_seconds(shared: SharedIteration) -> float:
    """The length of the axis."""
    return 1.04 * shared.gantt.makespan or 1.0
