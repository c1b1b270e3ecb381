"""Decisions on how many microbatches each data-parallel replica runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_adaptra.adapt.log import Decision
from megatron_adaptra.adapt.trial import in_words
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.plan.shares.counts import shares_in_words


@dataclass(kw_only=True)
class ShareDecision(Decision):
    """A share decision changes how many microbatches each replica runs.

    An iteration is measured from its beginning to that of the next one.

    Args:
        microbatches: of a replica in stock.
        before, after: by replica, how many it ran and runs now.
        slow: replicas that are slow.
        microbatch_ms, outside_ms: by replica, what a microbatch takes, and what does not depend on
            their number. Empty where the decision takes back what was slower.
        predicted_ms: an iteration with these counts.
        full_ms: an iteration in which each replica runs as many as in stock; where the decision
            takes back what was slower, an iteration as it is.
        lower_bound_ms: no counts take less; None where the decision takes back what was slower.
        gain: share of `full_ms` that it is expected to save.
        cheaper: other remedies, the cheapest first, as Remedy.to_json has them.
    """

    KIND: ClassVar[str] = "sync"
    ABOUT: ClassVar[str] = "decisions on shares of microbatches"

    microbatches: int
    before: list[int]
    after: list[int]
    slow: list[int]
    microbatch_ms: list[float] = field(default_factory=list)
    outside_ms: list[float] = field(default_factory=list)
    predicted_ms: float
    full_ms: float
    lower_bound_ms: float | None
    gain: float
    cheaper: list[dict[str, Any]] = field(default_factory=list)

    def sentence(self) -> str:
        words = shares_in_words(SyncPlan(self.microbatches, tuple(self.after)))
        text = f"from iteration {self.iteration + 1} on, {words}: {self.why}"
        if self.again is not None:
            return text + in_words(self.again)
        text += f"; an iteration is expected to take {self.predicted_ms:.4g} ms"
        if self.after == [self.microbatches] * len(self.after):
            return text
        text += f", with {self.microbatches} each {self.full_ms:.4g}"
        known = [one for one in self.cheaper if one["leaves_ms"] is not None]
        if known:
            best = min(known, key=lambda one: float(one["leaves_ms"]))
            text += f"; {best['remedy']} would leave {best['leaves_ms']:.4g}"
        return text
