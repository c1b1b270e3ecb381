"""The log of decisions: one JSON line each, with what was predicted and what came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan.base import Plan

OUTCOME = 3  # iterations whose median is the measured outcome of a decision


@dataclass
class Decision:
    """One line of the log. Times are milliseconds, as in every report.

    `iteration`: the first one on the new plan. `detected`: the one whose reports led to it.
    `predicted_without_ms`: an iteration under the same conditions without the decision.
    `refreshed_ms`: predicted again for the iterations to come, uncorrected, once all that the model
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
    refreshed_ms: float | None = None
    measured_ms: float | None = None
    samples: list[float] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        """What the log and `adaptra replay` have."""
        skipped = ("stock", "samples")
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        return {**data, "stock_ms": 1e3 * self.stock.makespan}


class DecisionLog:
    """A JSON-lines file, whole at any moment: it is replaced, not appended to.

    A decision is written when it is made and again when its outcome is known. Without a `path`
    nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.decisions = path, list[Decision]()
        self._awaited: list[Decision] = []  # committed, the outcome not known

    @property
    def committed(self) -> list[Decision]:
        """The decisions that have come into force, in order."""
        return [d for d in self.decisions if d.committed]

    def add(self, decision: Decision) -> None:
        """Log a decision that is proposed."""
        self.decisions.append(decision)
        self.write()

    def commit(self, decision: Decision) -> None:
        """A decision of the log comes into force."""
        decision.committed = True
        self._awaited.append(decision)
        self.write()

    def record_outcome(self, ran: int, seconds: float) -> None:
        """Iteration `ran` took `seconds`; the first one on a plan does not count."""
        in_force = [d for d in self._awaited if d.iteration <= ran][-1:]
        if not in_force:
            return
        decision = in_force[0]
        self._awaited = self._awaited[self._awaited.index(decision) :]
        if decision.iteration == ran:
            return
        decision.samples.append(1e3 * seconds)
        decision.measured_ms = median(decision.samples)
        if len(decision.samples) == OUTCOME:
            self._awaited.remove(decision)
            self.write()

    def write(self) -> None:
        """Replace the file."""
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
    """The decision in one sentence, for people.

    `before`, `now`: seconds of delay of the links that have changed. `back`: whether `plan` is the
    one without any slow link.
    """
    links = ", ".join(
        f"{a}->{b} takes {1e3 * now[a, b]:.3g} ms, "
        + (f"before {1e3 * old:.3g} ms" if old else "from the start")
        for (a, b), old in before.items()
    )
    what = "back to 1F1B" if back else "a deeper warmup hides it"
    return f"link {links}: {what} ({warmups(current, plan)})"


def warmups(current: Plan, plan: Plan) -> str:
    """Both plans' warmup depths, for people."""
    old, new = (",".join(map(str, p.schedule.warmup)) for p in (current, plan))
    return f"warmup {old} -> {new}"
