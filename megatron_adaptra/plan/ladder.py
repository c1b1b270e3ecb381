"""The ladder of remedies for slow replicas, and the cheapest that leaves no material loss.

The rungs, in the order of their price: another order in each pipeline, where nothing moves between
replicas; shares of a collective, which hide communication; routes, which move microbatches of
single stages; shares of microbatches, which change the order of sums over the whole batch. Only
one of them moves work in an iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_adaptra.base.errors import BadInput

FULL = "full"  # nothing changes: as many microbatches each, as Megatron runs and reduces them
ORDER, COLLECTIVE, ROUTES, SHARES = REMEDIES = (
    "another order in the pipeline", "shares of a collective", "routes", "shares of microbatches",
)  # fmt: skip
BY_COUNTS = "whole microbatches move, and sums have another order"  # of SHARES
ONE_STAGE, ONLY_WAITING = (  # of ORDER
    "one stage never waits for another", "a schedule hides waiting, not compute"
)  # fmt: skip
ONLY_COMMUNICATION = "they hide communication, not compute"  # of COLLECTIVE
NEAR = 0.05  # share of an iteration for which a cheaper remedy is taken, where one is taken at all
_SAME = 1e-9


class Remedy(NamedTuple):
    """A remedy is one rung of the ladder.

    `leaves`: seconds of an iteration with it; None where it cannot be had, or that is not known.
    `why`: the reason for that figure, or for None.
    """

    name: str
    leaves: float | None
    why: str

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump, in milliseconds."""
        leaves = None if self.leaves is None else 1e3 * self.leaves
        return {"remedy": self.name, "leaves_ms": leaves, "why": self.why}


@dataclass(frozen=True)
class Ladder:
    """A ladder lists the seconds of an iteration with each remedy, and names the one chosen.

    Args:
        full: seconds of an iteration in which nothing is done.
        remedies: the cheapest first.
        chosen: the name of one of them, or FULL.
    """

    full: float
    remedies: tuple[Remedy, ...]
    chosen: str

    @property
    def predicted(self) -> float:
        """The seconds of an iteration with the chosen remedy; never above `full`."""
        found = (one.leaves for one in self.remedies if one.name == self.chosen)
        return next((leaves for leaves in found if leaves is not None), self.full)

    @property
    def best(self) -> Remedy:
        """The remedy that leaves the least, worth it or not; of equals the cheapest."""
        return min(self.remedies, key=_leaves, default=Remedy(FULL, self.full, ""))

    @property
    def cheaper(self) -> tuple[Remedy, ...]:
        """The remedies cheaper than the chosen one, the cheapest first; all of them for FULL."""
        names = [one.name for one in self.remedies]
        return self.remedies[: names.index(self.chosen)] if self.chosen in names else self.remedies

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump, in milliseconds."""
        return {
            "chosen": self.chosen,
            "full_ms": 1e3 * self.full,
            "predicted_ms": 1e3 * self.predicted,
            "remedies": [one.to_json() for one in self.remedies],
        }


def climb(full: float, remedies: Sequence[Remedy], min_gain: float) -> Ladder:
    """Return the ladder, with the cheapest remedy that is enough as the chosen one.

    A rung is worth it when it saves `min_gain` of an iteration, as its own planner asks; it
    is enough when no other one leaves an iteration shorter by more than NEAR. Where none is worth
    it nothing is done: what is lost then is less than `min_gain`.

    Args:
        full: seconds of an iteration in which nothing is done.
        remedies: the cheapest first; one that leaves more than `full` is never chosen.
        min_gain: `--adaptra-min-gain`.

    Raises:
        BadInput: seconds that are negative or infinite, or a gain below 0.
    """
    for what, seconds in (("full", full), *((one.name, one.leaves) for one in remedies)):
        if seconds is not None and not 0 <= seconds < math.inf:
            raise BadInput(f"seconds of {what}", seconds, "a finite number of at least 0")
    if not min_gain >= 0:
        raise BadInput("min_gain", min_gain, "at least 0")
    worth = [one for one in remedies if _saves(full, one, min_gain)]
    least = min(map(_leaves, worth), default=full)
    enough = (one.name for one in worth if _leaves(one) <= least * (1 + NEAR))
    return Ladder(full, tuple(remedies), next(enough, FULL))


def _saves(full: float, remedy: Remedy, min_gain: float) -> bool:
    leaves = _leaves(remedy)
    return leaves < full * (1 - _SAME) and leaves <= full * (1 - min_gain) * (1 + _SAME)


def _leaves(remedy: Remedy) -> float:
    return math.inf if remedy.leaves is None else remedy.leaves


def ladder_in_words(ladder: Ladder, min_gain: float) -> str:
    """Describe the choice, its predicted time, and that of the best cheaper remedy.

    In a sentence; `min_gain`: the one that the `ladder` was climbed with.
    """
    full = f"{1e3 * ladder.full:.4g} ms"
    if ladder.chosen == FULL:
        best = ladder.best
        if best.leaves is None or best.leaves >= ladder.full * (1 - _SAME):
            return f"nothing is to be done: an iteration takes {full}, and no remedy makes it less"
        saves = 1 - best.leaves / ladder.full
        return (
            f"nothing is done: an iteration takes {full}; {best.name} would save {saves:.0%} of it,"
            f" less than --adaptra-min-gain {min_gain:.0%}"
        )
    text = (
        f"{ladder.chosen}: an iteration is expected to take {1e3 * ladder.predicted:.4g} ms, "
        f"without {full}"
    )
    known = [one for one in ladder.cheaper if one.leaves is not None]
    cheaper = min(known, key=_leaves, default=None)
    if cheaper is None or _leaves(cheaper) >= ladder.full * (1 - _SAME):
        return f"{text}; nothing cheaper makes it less"
    return f"{text}; {cheaper.name} would leave {1e3 * _leaves(cheaper):.4g}"
