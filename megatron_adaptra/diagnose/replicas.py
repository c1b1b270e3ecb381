"""The diagnosis of replicas whose microbatches are timed: which are slow as a whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from megatron_adaptra.diagnose.beside import BesideOthers, Search
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import REPLICA, Finding, Place
from megatron_adaptra.diagnose.watch import Sight
from megatron_adaptra.measure.replica_speed import ReplicaRow, ReplicaSpeeds

EXPLAINED = 8  # iterations for which a finding that is closed explains a replica that is slow still
_KIND = "microbatch"

Places = Sequence[tuple[Place, ...]]


def slow_replica(places: tuple[Place, ...], sight: Sight) -> Finding:
    """Return the finding that the replica at these `places` is slow as a whole."""
    return Finding(
        REPLICA, places, sight.since, sight.now, 1.0, sight.agree, sight.samples,
        beside="in the others",
    )  # fmt: skip


class ReplicaDiagnosis:
    """A diagnosis finds replicas whose microbatches take longer than those of the others.

    Args:
        places: by replica, those of its workers.
        book: gets what is found.
        explains: returns, for a replica, the names of open findings on its workers and links. While
            there are some it is no finding of its own.
    """

    def __init__(
        self, places: Places, book: FindingBook, explains: Callable[[int], tuple[str, ...]]
    ) -> None:
        self._places, self._book, self._explains = places, book, explains
        self._beside = BesideOthers(1, len(places))
        self._explained: dict[int, int] = {}  # by replica, the last iteration in which it was so
        self._search = Search("who of the replicas is slow", book)

    def update(self, row: ReplicaRow, speeds: ReplicaSpeeds) -> None:
        """Take the `row` of an iteration, which `speeds` has taken before."""
        self._search.run(self._update, row, speeds)

    def answers(self, slow: Iterable[int]) -> list[str]:
        """Return the names of the open findings that explain why these replicas are `slow`."""
        found: list[str] = []
        for replica in slow:
            found += [*self._book.ids([replica]), *self._explains(replica)]
        return found

    def _update(self, row: ReplicaRow, speeds: ReplicaSpeeds) -> None:
        if row.took is not None:
            self._book.took(row.iteration, row.took)
        if not speeds.each:
            return
        walls = {replica: {_KIND: seconds} for replica, seconds in speeds.each.items()}
        self._beside.update(row.iteration, walls, lambda replica: 0.0)
        now: dict[Hashable, Finding] = {}
        for replica, sight in self._beside.slow.items():
            because = self._explains(replica)
            if because:
                self._explained[replica] = row.iteration
            known = bool(self._book.ids([replica]))
            explained = row.iteration - self._explained.get(replica, -EXPLAINED) < EXPLAINED
            new = not explained and not speeds.moves
            # What depends on counts, and what does not, is not known well enough to accuse another.
            new = new and len(set(row.microbatches)) == 1
            if known or new:
                now[replica] = replace(slow_replica(self._places[replica], sight), because=because)
        for replica, sight in self._beside.well.items():
            self._explained.pop(replica, None)
            finding = slow_replica(self._places[replica], sight)
            now[replica] = replace(finding, since=-1, until=sight.since)
        self._book.update(row.iteration, now)
