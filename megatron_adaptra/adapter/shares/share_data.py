"""Batches of a replica's share of an iteration: its own, and those of other replicas.

A replica reads its own microbatches from the iterator that Megatron gives it, as ever. It reads
others' ahead, when the backwards of the iteration before are over: nothing of the iteration
has begun then, so that a batch that cannot be read costs the shares, not the training. Batches read
ahead belong to the place where the iterator stood: when it has moved on since, as over iterations
that Megatron skips, other batches are read when the iteration begins. Batches given away are read
and dropped, so each replica's own iterator stands after all its batches at every end of an
iteration, and Megatron's count of consumed samples is the whole position.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from megatron_adaptra.adapter.pipeline.home_data import (
    loader_batches,
    loader_of,
    reads_homes,
    unreadable,
)
from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.ir.sync import SyncPlan


class ShareData:
    """A ShareData reads other replicas' batches for one rank, over all iterations.

    `replica`: the rank's own.
    """

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._ahead: list[Any] = []  # batches, read by the plan of the next iteration
        self._place: tuple[Any, int] | None = None  # for which they were read

    def read_ahead(self, iterator: Any, plan: SyncPlan) -> None:
        """Read the batches of other replicas that this one runs in the next iteration by `plan`.

        The iteration that is over has taken all batches of this replica from Megatron's `iterator`.
        Raises StopIteration where the data end, ScheduleError for data that nobody can read for
        another replica, and what reading raises.
        """
        self._ahead = []
        self._ahead, self._place = self._read(iterator, plan), _place(iterator)

    def others(self, iterator: Any, plan: SyncPlan) -> list[Any]:
        """Return other replicas' batches in the iteration that begins, in the order of its share.

        They were read ahead by this `plan`, if Megatron's `iterator` still stands there; else they
        are read now, which raises as `read_ahead` does. Stock's own reading would end there, too:
        they are samples of the same iteration.
        """
        found, self._ahead = self._ahead, []
        return found if _place(iterator) == self._place else self._read(iterator, plan)

    def _read(self, iterator: Any, plan: SyncPlan) -> list[Any]:
        others = [pair for pair in plan.share(self._replica) if pair[0] != self._replica]
        if not others:
            return []
        if reads_homes(iterator):
            rows = {home: iterator.of_home(home) for home, _ in others}
            places = dict.fromkeys(rows, -plan.microbatches)  # of the iteration that is over
            found = []
            for home, number in others:
                found.append(next(islice(rows[home], number - places[home], None)))
                places[home] = number + 1
            return found
        if (place := _place(iterator)) is None:
            raise ScheduleError(unreadable(iterator))
        loader, first = place
        return [next(loader_batches(loader, first + number, home)) for home, number in others]


def _place(iterator: Any) -> tuple[Any, int] | None:
    """Return the loader behind Megatron's `iterator`, and how many batches it has given.

    None where there is none: an iterator that reads homes is of one iteration, which the next one
    follows.
    """
    loader = None if reads_homes(iterator) else loader_of(iterator)
    return None if loader is None else (loader, loader._num_yielded)


class ShareBatches:
    """An iterator gives the batches of a share in one iteration, in order, at Megatron's `next`.

    `iterator`: Megatron's; `own`: how many of its next `each` batches are run here; `others`: the
    batches that come after these.
    """

    def __init__(self, iterator: Any, own: int, each: int, others: list[Any]) -> None:
        self._iterator, self._own, self._each = iterator, own, each
        self._taken = 0
        # Copies, for a forward may change what it is given, and an iteration may be run again.
        self._others = (copy.copy(batch) for batch in others)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._taken < self._own:
            self._taken += 1
            return next(self._iterator)
        return next(self._others)

    def end(self) -> None:
        """Read and drop the batches given away, but none on a stage whose forwards read nothing."""
        while 0 < self._taken < self._each:
            self._taken += 1
            next(self._iterator)
