"""Decisions on how a data-parallel group reduces its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_adaptra.adapt.log import Decision
from megatron_adaptra.adapt.trial import in_words


@dataclass(kw_only=True)
class ReductionDecision(Decision):
    """An all-reduce decision changes how the ranks of a group reduce their gradients.

    What is measured of a reduction counts from the last arrival. Iterations are counted in
    reductions of this group, from 0; ranks in `why` are global.

    Args:
        ranks: global ranks of the group.
        before, after: what ran and what runs now, in words.
        choice: what runs now, as Choice.to_json has it.
        late_ms: by rank, how late it comes.
        predicted_ms, native_ms: what it and native are expected to take after the last arrival.
        gain: share of an iteration that it is expected to save over what ran.
        figures: what it was chosen from, as Figures.to_json has it; None for one that has failed.
        answers: names of the open findings that it is for.
    """

    KIND: ClassVar[str] = "all-reduce"
    ABOUT: ClassVar[str] = "decisions on all-reduces"

    ranks: list[int]
    before: str
    after: str
    choice: dict[str, Any]
    late_ms: list[float] = field(default_factory=list)
    predicted_ms: float
    native_ms: float
    gain: float = 0.0
    figures: dict[str, Any] | None = None
    answers: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        back = "back to native" if self.after == "native" else f"by {self.after}"
        predicted = ""
        if self.predicted_ms != self.native_ms:
            predicted = (
                f"; expected after the last arrival: {self.predicted_ms:.3g} ms, native "
                f"{self.native_ms:.3g}"
            )
        whose, when = ranks_in_words(self.ranks), self.iteration + 1
        text = f"from reduction {when} on, gradients of {whose} go {back}: {self.why}{predicted}"
        return text + in_words(self.again, "reduction")

    def subject(self) -> str:
        whose, when = ranks_in_words(self.ranks), self.iteration + 1
        return f"gradients of {whose} from reduction {when} on: after the last arrival it takes"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`ranks 0 to 7`, where they are equally far apart, `ranks 0, 2, ... 14`."""
    first, *rest = ranks
    step = rest[0] - first if rest else 1
    if len(ranks) > 2 and list(ranks) == list(range(first, ranks[-1] + 1, step)):
        between = "to" if step == 1 else f"{rest[0]}, ..."
        return f"ranks {first}{'' if step == 1 else ','} {between} {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
