"""The log of decisions on shares of microbatches: JSON lines (docs/decision-log.schema.json)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.plan.shares import shares_in_words
from megatron_adaptra.runtime.trial import in_words
from megatron_adaptra.runtime.voted_log import VotedDecision, VotedLog


@dataclass(kw_only=True)
class SyncDecision(VotedDecision):
    """A change of how many microbatches replicas run; more of it in VotedDecision. Milliseconds.

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

    microbatches: int
    before: list[int]
    after: list[int]
    slow: list[int]
    microbatch_ms: list[float]
    outside_ms: list[float]
    predicted_ms: float
    full_ms: float
    lower_bound_ms: float | None
    gain: float
    cheaper: list[dict[str, Any]]


class SyncLog(VotedLog[SyncDecision]):
    """Those of one job. An iteration is measured from its beginning to that of the next one."""

    KIND, ABOUT, OUTCOME = "sync", "decisions on shares of microbatches", 5


def sentence(decision: SyncDecision) -> str:
    """A decision in force, for the log of the training, whose iterations count from one."""
    words = shares_in_words(SyncPlan(decision.microbatches, tuple(decision.after)))
    text = f"from iteration {decision.iteration + 1} on, {words}: {decision.why}"
    if decision.again is not None:
        return text + in_words(decision.again)
    text += f"; an iteration is expected to take {decision.predicted_ms:.4g} ms"
    if decision.after == [decision.microbatches] * len(decision.after):
        return text
    text += f", with {decision.microbatches} each {decision.full_ms:.4g}"
    known = [one for one in decision.cheaper if one["leaves_ms"] is not None]
    if known:
        best = min(known, key=lambda one: float(one["leaves_ms"]))
        text += f"; {best['remedy']} would leave {best['leaves_ms']:.4g}"
    return text
