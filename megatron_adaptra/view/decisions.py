"""A report's words and pictures of all-reduces and shares that were found while training."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.view.axis import number
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.ranges import ranges
from megatron_adaptra.view.report import Reduction, SharedIteration
from megatron_adaptra.view.summary import AllReduce, Shares


def all_reduce_detail(one: AllReduce) -> str:
    """Describe `one`: the change, its ranks, and the predicted and measured times."""
    times = _times(
        ("native", one["native_ms"]),
        ("predicted", one["predicted_ms"]),
        ("measured", one["measured_ms"]),
    )
    text = f"{one['before']} → {one['after']}; ranks {ranges(one['ranks'])}"
    return text + (f"; after the last arrival {times}" if times else "")


def shares_detail(one: Shares) -> str:
    """Describe `one`: the change, the predicted and measured times, the other remedies."""
    times = _times(
        ("with equal counts", one["full_ms"]),
        ("predicted", one["predicted_ms"]),
        ("measured", one["measured_ms"]),
    )
    others = [
        f"{other['remedy']} would leave {number(other['leaves_ms'])} ms"
        for other in one["cheaper"]
        if other["leaves_ms"] is not None
    ]
    change = f"{counts(one['before'])} → {counts(one['after'])} microbatches"
    return "; ".join([change, f"an iteration {times}", *others])


def _times(*times: tuple[str, float | None]) -> str:
    return ", ".join(f"{word} {number(ms)} ms" for word, ms in times if ms)


def counts(each: Sequence[int]) -> str:
    """Return the microbatches of `each` replica as text, `9,9,5,9`."""
    return ",".join(map(str, each))


def shares_line(one: Shares) -> str:
    """A line of the closing table, for `one` of summary.json."""
    return (
        f"microbatches from iteration {one['iteration']} on, {counts(one['after'])}: "
        f"{one['why']} ({shares_detail(one)})"
    )


def reduction_note(reduction: Reduction) -> str:
    """Return the caption of the pictures."""
    return (
        f"As simulated from what had been measured when it was chosen for iteration "
        f"{reduction.iteration}, on one time scale. Rows are the ranks of one data-parallel group, "
        f"{reduction.ranks}: what the port of each sends (out), and what it receives (in)."
    )


def reduction_pictures(reduction: Reduction) -> dict[str, Gantt]:
    """Return the native all-reduce and, below it, ours, by title."""
    rows = (
        ("native", reduction.native, reduction.native_ms, reduction.measured_native_ms),
        (reduction.name, reduction.ours, reduction.ours_ms, reduction.measured_ms),
    )
    out = {}
    for name, gantt, simulated, measured in rows:
        words = f"{name}: {number(simulated)} ms after the last arrival"
        out[words + _measured(measured)] = gantt
    return out


def shared_title(shared: SharedIteration) -> str:
    """Counts and milliseconds of both halves of the picture."""
    before = f"{counts(shared.before)}: {number(shared.before_ms)} ms"
    after = f"{counts(shared.after)}: {number(shared.after_ms)} ms"
    return f"{before}; then {after}{_measured(shared.measured_ms)}"


def shared_note(shared: SharedIteration) -> str:
    """Return the caption of the picture."""
    return (
        f"As simulated from what had been measured when counts were chosen for iteration "
        f"{shared.iteration}: a row per replica, before and after. Each microbatch takes what it "
        f"takes the slowest stage of the replica; a stripe marks a sample of another replica."
    )


def _measured(ms: float | None) -> str:
    return "" if ms is None else f", measured {number(ms)} ms"
