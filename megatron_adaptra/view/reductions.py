"""The report's part on all-reduces that were chosen while training: shared by page and PNG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_adaptra.view import findings
from megatron_adaptra.view.axis import number
from megatron_adaptra.view.findings import Picture
from megatron_adaptra.view.ranges import ranges
from megatron_adaptra.view.report import Reduction, Report


def all_reduces(report: Report) -> list[Mapping[str, Any]]:
    """Return the decisions on all-reduces, in order."""
    listed = findings.listing(report.summary.get("all_reduces"))
    return [findings.mapping(one) for one in listed]


def detail(decision: Mapping[str, Any]) -> str:
    """Describe a `decision`: the change, its ranks, and the predicted and measured times."""
    before, after = decision.get("before"), decision.get("after")
    parts = [f"{before} → {after}"] if before and after else []
    ranks = findings.listing(decision.get("ranks"))
    if ranks:
        parts.append(f"ranks {ranges(ranks)}")
    times = [(word, findings.value(decision.get(f"{key}_ms"))) for word, key in _TIMES]
    known = [f"{word} {number(ms)} ms" for word, ms in times if ms]
    if known:
        parts.append(f"after the last arrival {', '.join(known)}")
    return "; ".join(parts)


_TIMES = (("native", "native"), ("predicted", "predicted"), ("measured", "measured"))


def about(reduction: Reduction) -> str:
    """Return the caption of the picture."""
    return (
        f"As simulated from what had been measured when it was chosen for iteration "
        f"{reduction.iteration}, on one time scale. Rows are the ranks of one data-parallel group, "
        f"{reduction.ranks}: what the port of each sends (out), and what it receives (in)."
    )


def pictures(reduction: Reduction) -> list[Picture]:
    """Return the pictures of the native all-reduce and, below it, of ours."""
    rows = (
        ("native", reduction.native, reduction.native_ms, reduction.measured_native_ms),
        (reduction.name, reduction.ours, reduction.ours_ms, reduction.measured_ms),
    )
    out = []
    for name, gantt, simulated, measured in rows:
        words = f"{name}: {number(simulated)} ms after the last arrival"
        if measured is not None:
            words += f", measured {number(measured)} ms"
        out.append(Picture(words, gantt, False))
    return out


def common_seconds(reduction: Reduction) -> float:
    """The length of the one axis on which both are drawn."""
    return 1.04 * max(reduction.native.length, reduction.ours.length) or 1.0
