"""The diagnosis of a data-parallel group: which of its ranks come late to their reductions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from megatron_adaptra.diagnose.beside import Search
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import LATE, Finding, Place
from megatron_adaptra.diagnose.watch import Samples, Sight
from megatron_adaptra.measure.detect import ABSOLUTE
from megatron_adaptra.measure.late_ranks import LateRanks, Watched
from megatron_adaptra.measure.rotation import Rotation

# A plan for a late rank has to pay for long, and waits for six of eight iterations; a finding is
# there to be read, and four of the last five are as many as chance rarely gives to one rank.
AGREE, AGREE_ROTATING = 4, 12
# Of an iteration: on a busy machine ranks come later than others by a tenth of it by chance, and of
# a hundred runs of 60 iterations in which they do, none had a finding; with 0.1 44 had.
SHARE = 0.2


class LateDiagnosis:
    """A diagnosis finds ranks that come late to the reductions of one group.

    Args:
        places: of its ranks.
        whose: the group's ranks, in words.
        book: gets what is found.
    """

    def __init__(self, places: Sequence[Place], whose: str, book: FindingBook) -> None:
        self._places, self._whose, self._book = places, whose, book
        self._watched = [Watched() for _ in places]
        self._samples = [Samples() for _ in places]
        self._late: dict[int, Sight] = {}
        self._rotation = Rotation()
        self._search = Search(f"who comes late to the reduction of gradients of {whose}", book)

    def update(
        self, iteration: int, ranks: LateRanks, period: float, queued: Mapping[int, float]
    ) -> None:
        """Take an `iteration` of `period` seconds, which the detector of late `ranks` has taken.

        `queued`: by rank, the seconds of it in which the rank waited for a core. What it waited
        longer than others is no lateness of its own, but of its host's.
        """
        self._search.run(self._update, iteration, ranks, period, queued)

    def answers(self) -> list[str]:
        """Return the names of the open findings."""
        return self._book.ids(range(len(self._places)))

    def _update(
        self, iteration: int, ranks: LateRanks, period: float, queued: Mapping[int, float]
    ) -> None:
        self._book.took(iteration, period)
        unit = max(ranks.buffer, SHARE / ABSOLUTE * period)
        least = min(queued.values(), default=0.0)
        own = {r: max(0.0, late - (queued.get(r, least) - least)) for r, late in ranks.now.items()}
        self._rotation.update({r for r, late in own.items() if late > ABSOLUTE * unit})
        now: dict[Hashable, Finding] = {}
        for rank, seconds in own.items():
            watched, samples, before = self._watched[rank], self._samples[rank], self._late
            old = watched.named
            agree = AGREE_ROTATING if self._rotation.rotating and not old else AGREE
            watched.update(seconds, unit, agree)
            watched.accept(unit)
            samples.add(iteration, seconds)
            if watched.named:
                sight = Sight(watched.named, 0.0, *samples.since(0.0, watched.named))
                if rank in before:
                    sight = sight._replace(since=before[rank].since)
                before[rank] = sight
            elif before.pop(rank, None) is not None:
                until, *_ = samples.since(old, 0.0)
                now[rank] = self._finding(rank, Sight(0.0, 0.0, -1, 1, 1), until)
        now |= {rank: self._finding(rank, sight) for rank, sight in self._late.items()}
        self._book.update(iteration, now)

    def _finding(self, rank: int, sight: Sight, until: int | None = None) -> Finding:
        return Finding(
            LATE, (self._places[rank],), sight.since, sight.now, 0.0, sight.agree, sight.samples,
            until=until, beside=self._whose,
        )  # fmt: skip
