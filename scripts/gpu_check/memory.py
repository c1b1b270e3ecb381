"""Part `memory`: the trainings of part `hide`, and what they held.

Activations: the allocator's peak beside the plan's microbatches in flight and the budget. Pinned
memory: held while messages go through the host, given back when they do not. And what Megatron
reports: the allocator's own records are the same as without the plugin, before a link gets slow.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_check.ranks import Deadline
from gpu_check.result import Result
from gpu_check.target import Target
from gpu_check.trainings import Trained, train, why_not

MIB = 2**20
NEAR = 0.02  # of the allocator's peak: blocks are rounded
FEW = 64 << 10  # bytes


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    if why := why_not(target):
        found.why_not = why
        return
    stock = train(target, work, deadline, options, plugin=False)
    ours = train(
        target, work, deadline, options, plugin=True, plant="spoil" if options.plant else ""
    )
    if not any(ours.ours):
        found.left_out.append("what messages through the host hold: they never left the GPU's "
                              "queue, see hide")  # fmt: skip
    _reports(found, stock, ours)
    _activations(found, ours)
    _pinned(found, ours)


def _reports(found: Result, stock: Trained, ours: Trained) -> None:
    """Megatron prints what the allocator has recorded; while all is well that is stock's own."""
    worst = 0
    for stage, (one, other) in enumerate(zip(stock.ranks, ours.ranks, strict=True)):
        for i in range(1, min(ours.plan.begin, ours.left)):
            for what in ("allocated", "most"):
                theirs, mine = one["rows"][i][what], other["rows"][i][what]
                worst = max(worst, abs(mine - theirs))
                if abs(mine - theirs) > NEAR * theirs + FEW:
                    found.wrong.append(f"stage {stage}, iteration {i}: {what} {mine / MIB:.2f} "
                                       f"MiB by the allocator, {theirs / MIB:.2f} without the "
                                       "plugin")  # fmt: skip
        found.check(ours.left > 1, "the messages have left the GPU's queue at once: nothing to "
                    "compare")  # fmt: skip
        if _falls(other["rows"]) and not _falls(one["rows"]):
            found.wrong.append(f"stage {stage}: the plugin has reset the allocator's peak, which "
                               "Megatron reports")  # fmt: skip
    found.figures.append(f"Megatron's report differs by {worst / 1024:.0f} KiB at most")


def _falls(rows: list[dict[str, Any]]) -> bool:
    """Whether the allocator's peak was reset."""
    peaks = [row["most"] for row in rows]
    return any(later < before for before, later in pairwise(peaks))


def _activations(found: Result, ours: Trained) -> None:
    rows = []
    for stage, rank in enumerate(ours.ranks):
        for record in rank["records"]:
            memory = record["memory"]
            if memory is None or not memory["peak_bytes"]:
                continue
            i, unit = record["iteration"], memory["per_microbatch"]
            planned, budget = rank["rows"][i]["in_flight"] or 0.0, _budget(ours, i, stage)
            name, mib = f"iteration {i}, stage {stage}", memory["peak_bytes"] / MIB
            rows.append([f"{i}, stage {stage}{'' if record['stock'] else ', deeper'}",
                         f"{memory['peak']:g}", f"{planned:g}",
                         "-" if budget is None else f"{budget:g}",
                         f"{mib:.2f}", f"{planned * unit / MIB:.2f}",
                         "-" if budget is None else f"{budget * unit / MIB:.2f}"])  # fmt: skip
            for what, most in (("planned", planned), ("the budget", budget)):
                if most is not None:
                    found.check(memory["peak"] <= most + 1e-6, f"{name}: {memory['peak']:g} "
                                f"microbatches in flight, {what}: {most:g}")  # fmt: skip
            if budget is not None:
                found.check(mib <= budget * unit / MIB, f"{name}: {mib:.2f} MiB, the budget is "
                            f"{budget * unit / MIB:.2f}")  # fmt: skip
    if rows:
        found.figures.append(f"{len(rows)} iterations counted, none beyond its plan or its budget")
    found.check(bool(rows), "no iteration's bytes were counted")
    found.table("Activations", ("iteration", "most in flight", "planned", "budget", "peak, MiB",
                "predicted, MiB", "budget, MiB"), rows)  # fmt: skip


def _budget(ours: Trained, iteration: int, stage: int) -> float | None:
    """Microbatches, of the plan that was in force; None where it was not known yet, or no limit."""
    plans = [d for d in ours.decisions if d.get("committed") and d["iteration"] <= iteration]
    found = plans[-1]["conditions"]["activation_budget"][stage] if plans else None
    return None if found is None else float(found)


def _pinned(found: Result, ours: Trained) -> None:
    rows = []
    for stage, rank in enumerate(ours.ranks):
        held = [row.get("held", 0) for row in rank["rows"]]
        most, last = max(held), held[-1]
        back = not ours.ours[-1]
        found.check(not back or last == 0, f"stage {stage}: {last / MIB:.2f} MiB are still pinned, "
                    "though messages are back with Megatron")  # fmt: skip
        rows.append([str(stage), f"{held[0] / MIB:.2f}", f"{most / MIB:.2f}", f"{last / MIB:.2f}"])
    found.figures.append(f"at most {max(float(row[2]) for row in rows):.2f} MiB pinned, "
                         f"{max(float(row[3]) for row in rows):.2f} at the end")  # fmt: skip
    found.table("Pinned memory, MiB", ("stage", "healthy", "most", "at the end"), rows)
