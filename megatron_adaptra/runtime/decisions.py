"""The log of decisions: one JSON line each, with what was predicted and what came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan.base import Plan


@dataclass
class Decision:
    """Times are milliseconds, as in every report. `iteration` is the first one on the new plan.

    `renewed_ms`: predicted again for the iterations to come, uncorrected, once all that the model
    is fed with was measured under the plan. Ops take longer while a pipeline stalls.
    """

    iteration: int
    detected: int
    why: str
    warmup_before: list[int]
    warmup_after: list[int]
    predicted_ms: float
    predicted_without_ms: float
    stock: Timeline  # what unchanged Megatron would do under the same conditions
    lower_bound_ms: float
    planning_ms: float
    digest: str
    plan: str
    conditions: dict[str, Any]
    committed: bool = False
    renewed_ms: float | None = None
    measured_ms: float | None = None
    samples: list[float] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        skipped = ("stock", "samples")
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        return {**data, "stock_ms": 1e3 * self.stock.makespan}


class DecisionLog:
    """A JSON-lines file, whole at any moment: it is replaced, not appended to.

    A decision is written when it is made and again when its outcome is known.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.decisions = path, list[Decision]()

    def add(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        lines = [json.dumps(d.to_json()) + "\n" for d in self.decisions]
        partial.write_text("".join(lines))
        os.replace(partial, self.path)


def sentence(decision: Decision) -> str:
    """A decision in force, for the log of the training."""
    return (  # Megatron's log counts from one
        f"from iteration {decision.iteration + 1} on, {decision.why}; an iteration is expected to "
        f"take {decision.predicted_ms:.4g} ms, without {decision.predicted_without_ms:.4g}"
    )


def why_swap(
    before: Mapping[tuple[int, int], float],
    now: Mapping[tuple[int, int], float],
    current: Plan,
    plan: Plan,
    back: bool,
) -> str:
    """The decision in one sentence, for people."""
    links = ", ".join(
        f"{a}->{b} takes {1e3 * now[a, b]:.3g} ms, "
        + (f"before {1e3 * old:.3g} ms" if old else "from the start")
        for (a, b), old in before.items()
    )
    what = "back to 1F1B" if back else "a deeper warmup hides it"
    return f"link {links}: {what} ({warmups(current, plan)})"


def warmups(current: Plan, plan: Plan) -> str:
    old, new = (",".join(map(str, p.schedule.warmup)) for p in (current, plan))
    return f"warmup {old} -> {new}"
