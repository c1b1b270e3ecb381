"""The selector of `auto`: the all-reduce that the clock of ports finds fastest, if it gains enough.

It compares the seconds from the arrival of the last rank to the end of the last one. Native stays
where nothing stands out (no rank is late, no port or path is slow), so that such a training keeps
its bits, and where the gain is too small for the precision of the clock. Equal figures give equal
choices on all ranks: nothing is random, and work is counted in messages, not in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median_low
from typing import Any

from megatron_adaptra.base.errors import BadInput, reading
from megatron_adaptra.model.all_reduce_forms import AllReduce
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import STANDS_OUT, Figures
from megatron_adaptra.plan.reductions.owners import changed, first_shares, kinds
from megatron_adaptra.plan.reductions.simulated import as_one, natively, simulated
from megatron_adaptra.plan.reductions.sized import FEWEST_RANKS, pieces_for

# Share by which the clock flatters plans of our own over a ring (docs/evidence/allreduce.md).
CERTAIN = 0.06
MOST_RANKS = 128  # plans for more have too many messages to be judged while a training waits
WORK = 40_000  # messages that are simulated for one choice, beside native's
_ENOUGH = 0.02  # share that unequal shares have to gain over simpler ones: less is noise
# Share by which a chain has to be faster than others, as it gains only while ranks stay as late.
_FRAGILE = 0.05


@dataclass(frozen=True)
class Chosen:
    """A chosen `choice` has the predicted seconds after the last arrival, of it and of native.

    Both are 0 where nothing stands out, so that nothing was predicted. `besides`: seconds of an
    iteration that it saves elsewhere: of a reduce-scatter, in the all-gather after it.
    """

    choice: Choice
    seconds: float
    native: float
    besides: float = 0.0

    @property
    def gain(self) -> float:
        """The seconds of an iteration that the choice saves over native."""
        return self.native - self.seconds + self.besides

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump."""
        return {
            "choice": self.choice.to_json(), "seconds": self.seconds, "native": self.native,
            "besides": self.besides,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> Chosen:
        """Read a chosen all-reduce from `data`, the JSON object of `to_json`. Raises BadInput."""
        with reading("all-reduce chosen", data):
            given = dict(data)  # type: ignore[call-overload]
            for name in ("seconds", "native"):
                if not 0 <= given[name] < math.inf:
                    raise BadInput(name, given[name], "seconds of at least 0")
            if not math.isfinite(given["besides"]):
                raise BadInput("besides", given["besides"], "seconds")
            return cls(**given | {"choice": Choice.from_json(given["choice"])})


def choose_all_reduce(figures: Figures, in_force: Choice, min_gain: float) -> Chosen:
    """Choose the all-reduce to run from now on; `in_force` where no other is clearly better.

    Args:
        figures: what is known.
        in_force: what runs now.
        min_gain: share of an iteration's seconds that a plan has to save over native, and another
            plan over the one in force. The one in force goes, for native, once it saves less than
            half of that, or nothing stands out any more.

    Raises:
        BadInput: `in_force` is for another number of ranks, or `min_gain` is below 0.
    """
    ranks = figures.ranks
    if in_force.ranks != ranks:
        raise BadInput("all-reduce in force", f"for {in_force.ranks} ranks", f"here are {ranks}")
    if not min_gain >= 0:
        raise BadInput("min_gain", min_gain, "at least 0")
    figures = figures.rounded()
    if not 1 < ranks <= MOST_RANKS or not figures.stands_out:
        return Chosen(Choice(ranks), 0.0, 0.0)
    search = _Search(figures)
    enough = max(min_gain * figures.iteration, CERTAIN * search.native)
    current = Choice(ranks)
    if search.affords(in_force) and _saves(search.native - search.seconds(in_force), enough / 2):
        current = in_force
    best = search.best()
    if best is not None and _saves(search.seconds(current) - search.seconds(best), enough):
        current = best
    return search.chosen(current)


def _saves(seconds: float, enough: float) -> bool:
    """Return whether the saved `seconds` are above 0, and at least `enough`."""
    return seconds > 0 and seconds >= enough


def _odds(choice: Choice) -> float:
    return 1 + _FRAGILE * (choice.algorithm == "sorted-chain")


def _most_pieces(job: AllReduce, algorithm: str) -> int:
    """Return how many pieces it is worth while to cut all buffers into, of the bytes of `job`."""
    return pieces_for(algorithm, job) if algorithm != "halving-doubling" else 0


class _Search:
    """A search times the candidates for `figures` by the clock of ports, up to WORK messages."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._very_late = figures.very_late
        self._left = float(WORK)
        self._seconds: dict[Choice, float] = {}
        self._buffer = self._job(figures.mean_buffer)
        self._most = cache(partial(_most_pieces, self._job(figures.nbytes)))
        ring = natively(figures, self._most("ring"))
        # A busy machine is slow for our plans, too: it does not count against native alone.
        self.native = ring if figures.native is None else min(ring, figures.native)

    def _job(self, nbytes: int) -> AllReduce:
        """Return the all-reduce of `nbytes` in the terms of the closed forms."""
        f, ports = self._figures, self._figures.ports
        return AllReduce(
            f.ranks, nbytes, median_low(ports.out), ports.delay, ports.cost, max(f.lateness),
            ports.turn,
        )  # fmt: skip

    def affords(self, choice: Choice) -> bool:
        """Return whether its seconds are known, or the work left is enough to simulate it."""
        return choice.native or choice in self._seconds or self._work(choice) <= self._left

    def _work(self, choice: Choice) -> int:
        """Return how many messages are simulated to time it: see `simulated`."""
        f, one = self._figures, choice.transfers()
        if not f.buffers.overlap:
            return one if f.buffers.count == 1 else 2 * one
        return one + as_one(choice, f, self._most(choice.algorithm)).transfers()

    def seconds(self, choice: Choice) -> float:
        """Return its seconds after the last arrival, to ten digits; native's as known."""
        if choice.native:
            return self.native
        if choice not in self._seconds:
            self._left -= self._work(choice)
            most = self._most(choice.algorithm)
            self._seconds[choice] = simulated(choice, self._figures, most)
        return self._seconds[choice]

    def _simulated_of(self, choices: Iterable[Choice]) -> list[Choice]:
        """Simulate `choices` while work is left, with nothing owned by very late ranks."""
        found = []
        for choice in map(self._permitted, choices):
            if choice is not None and self.affords(choice):
                self.seconds(choice)
                found.append(choice)
        return found

    def _permitted(self, choice: Choice) -> Choice | None:
        """Return the `choice` with no shares of very late ranks; None if no other rank owns any.

        The clock may find that they should own a little, but it cannot predict how much later
        still they may come.
        """
        late = self._very_late
        if not any(choice.shares[rank] for rank in late if choice.shares):
            return choice
        shares = tuple(0 if r in late else share for r, share in enumerate(choice.shares))
        return replace(choice, shares=shares) if any(shares) else None

    def chosen(self, choice: Choice) -> Chosen:
        """Return the `choice` with its seconds."""
        return Chosen(choice, self.seconds(choice), self.native)

    def best(self) -> Choice | None:
        """Return the fastest of the simulated choices; of equals the first; None without any."""
        tried = self._simulated_of(self._simple())
        owners = [choice for choice in tried if choice.algorithm == "direct"]
        if owners:
            tried.append(self._best_shares(min(owners, key=self.seconds)))
        return min(tried, key=lambda choice: self.seconds(choice) * _odds(choice), default=None)

    def _simple(self) -> Iterator[Choice]:
        """Yield all choices but those of the search for shares, the most often useful first."""
        f = self._figures
        ranks = f.ranks
        pieces = pieces_for("direct", self._buffer)
        for shares in first_shares(f.buffer, f.ports, f.lateness):
            yield Choice(ranks, "direct", pieces, shares)
        by_arrival = sorted(range(ranks), key=lambda rank: (f.lateness[rank], rank))
        late = tuple(r for r in by_arrival if f.lateness[r] > STANDS_OUT * f.buffer)
        if late and ranks >= FEWEST_RANKS["stragglar"]:
            yield Choice(ranks, "stragglar", pieces_for("stragglar", self._buffer), late=late[-1:])
        if late:
            cut = pieces_for("sorted-chain", self._buffer)
            yield Choice(ranks, "sorted-chain", cut, late=late)
        yield Choice(ranks, "ring", pieces_for("ring", self._buffer))
        yield Choice(ranks, "halving-doubling")

    def _best_shares(self, best: Choice) -> Choice:
        """Search for better shares than those of `best`, changing one kind of ranks at a time."""
        f = self._figures
        of = kinds(f.buffer, f.ports, f.lateness)
        before = None
        while best != before:
            before = best
            best = self._fastest(best, [replace(best, shares=s) for s in changed(best.shares, of)])
        cuts = [cut for cut in (best.pieces // 2, 2 * best.pieces) if cut]
        return self._fastest(best, [replace(best, pieces=cut) for cut in cuts])

    def _fastest(self, first: Choice, others: Sequence[Choice]) -> Choice:
        """Return the fastest of `others` within the work left, if clearly faster; else `first`."""
        tried = self._simulated_of(others)
        best = min(tried, key=self.seconds, default=first)
        return best if self.seconds(best) < (1 - _ENOUGH) * self.seconds(first) else first
