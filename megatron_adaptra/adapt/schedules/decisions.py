"""Decisions on plans of pipelines and of routes between replicas, and their sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from megatron_adaptra.adapt.log import Decision
from megatron_adaptra.adapt.trial import in_words
from megatron_adaptra.diagnose.finding import Place
from megatron_adaptra.ir.timeline import Timeline

WARMUP = (
    "warmup: forwards of each stage before its first backward, one more than Megatron's "
    "num_warmup_microbatches"
)
_IN_SENTENCE = 2  # links whose ends the log of the training names


@dataclass(frozen=True)
class LinkChange:
    """A link change describes a link that a decision is for, and what a message takes there.

    `delay_before_ms`: all of it, as it was planned for. `delay_ms`: on the way. `wire_ms`: for its
    bytes, at `bandwidth` bytes per second; None where that is too little to matter.
    """

    source: Place
    target: Place
    delay_before_ms: float
    delay_ms: float
    wire_ms: float = 0.0
    bandwidth: float | None = None


@dataclass(kw_only=True)
class PlanDecision(Decision):
    """A plan decision changes the schedule of one pipeline, or that of all replicas.

    Args:
        kinds: of values that change, in a Bundle.
        links: it is for them; empty where memory, better knowledge of the costs, or slower
            iterations are the reason.
        warmup_before, warmup_after: warmup depth by stage, of several replicas by worker.
        predicted_ms: an iteration on the new plan.
        predicted_without_ms: an iteration under the same conditions on the plan before.
        stock: what unchanged Megatron would do under the same conditions.
        lower_bound_ms: no plan takes less under the same conditions.
        digest, plan: of the new schedule, and its text form.
        conditions: it was made for; see `Conditions.to_json`, and of several replicas
            `ReplicaConditions.to_json`.
        refreshed_ms: predicted again for the iterations to come, uncorrected, once all that the
            model uses was measured under the plan. Ops take longer while a pipeline stalls.
        recovered: nothing is slow any more, and the first plan is back for what that frees.
        answers: the open findings that it is for, by name.
    """

    KIND: ClassVar[str] = "decision"
    ABOUT: ClassVar[str] = "decisions"
    OUTCOME_ITERATIONS: ClassVar[int] = 3

    kinds: list[str]
    links: list[LinkChange]
    warmup_before: list[int]
    warmup_after: list[int]
    predicted_ms: float
    predicted_without_ms: float
    stock: Timeline
    lower_bound_ms: float
    digest: str
    plan: str
    conditions: dict[str, Any]
    refreshed_ms: float | None = None
    recovered: bool = False
    answers: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        links = [asdict(link) for link in self.links]
        return {**super().to_json(), "links": links, "stock_ms": 1e3 * self.stock.makespan}

    def sentence(self) -> str:
        expected = (
            f"; an iteration is expected to take {self.predicted_ms:.4g} ms, without "
            f"{self.predicted_without_ms:.4g}"
        )
        return (  # Megatron's log counts from one
            f"from iteration {self.iteration + 1} on, {self.why}"
            f"{'' if self.recovered else expected}{_ends(self.links)}{in_words(self.again)}"
        )

    def subject(self) -> str:
        return f"the plan of iteration {self.iteration + 1}: an iteration takes"


def _ends(links: Sequence[LinkChange]) -> str:
    """Describe where the slowest links are. Both directions of a link count once."""
    pairs: dict[frozenset[int], LinkChange] = {}
    for link in sorted(links, key=lambda x: -max(x.delay_ms + x.wire_ms, x.delay_before_ms)):
        pairs.setdefault(frozenset((link.source.rank, link.target.rank)), link)
    found = [
        f"; between {link.source.in_words()} and {link.target.in_words()}"
        for link in list(pairs.values())[:_IN_SENTENCE]
    ]
    return "".join(found)
