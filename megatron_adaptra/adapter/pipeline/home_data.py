"""Batches of every replica: a stage that runs a microbatch of another replica reads that one's.

Megatron's replicas read one dataset by turns, by a sampler that knows its replica. So any of them
can read what belongs to another: the same sampler with the other's number, at the same place.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeGuard

from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.ir.op import Op


class ReadsHomes(Protocol):
    """A data iterator of this kind gives one iteration's batches of other replicas, too."""

    def of_home(self, home: int) -> Iterator[Any]:
        """Return the batches of replica `home` in the same iteration, from the first one on."""


def reads_homes(iterator: Any) -> TypeGuard[ReadsHomes]:
    """Return whether a data `iterator`, or the one it wraps, can give another replica's batches."""
    return hasattr(iterator, "of_home")  # isinstance of a protocol overlooks stand-ins


def unreadable(iterator: Any) -> str:
    """Return why no other replica's batch can be read, or an empty string; before an iteration.

    `iterator`: what Megatron hands to its schedule; None where this rank reads nothing.
    """
    if getattr(iterator, "replaying", False):
        return "a checkpoint's iteration is run again"  # whose batches no loader has given
    if iterator is None or reads_homes(iterator) or loader_of(iterator) is not None:
        return ""
    given = getattr(iterator, "counted", iterator).__class__.__name__  # see CountedBatches
    return f"the data come from a {given}, not from Megatron's loader"


class HomeData:
    """A HomeData makes a data iterator for each iteration of one stage.

    `replica`: this stage's own.
    """

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._reads: set[int] = set()  # how many batches forwards of this stage have read

    def begin(self, iterator: Any, microbatches: int) -> IterationData | None:
        """Make the stand-in for Megatron's `iterator` in an iteration of so many `microbatches`."""
        return None if iterator is None else IterationData(self, iterator, microbatches)


class IterationData:
    """An iterator gives the batches of an iteration, by home and microbatch, at Megatron's `next`.

    Made by HomeData, as its `data`, for Megatron's `iterator` and so many `microbatches`. `at` goes
    before each forward.
    """

    def __init__(self, data: HomeData, iterator: Any, microbatches: int) -> None:
        self._data, self._iterator, self._count = data, iterator, microbatches
        self._others = _others(iterator, microbatches)
        self._rows: dict[int, list[Any]] = {data._replica: []}
        self._sources: dict[int, Iterator[Any]] = {data._replica: iterator}
        self._op: Op | None = None
        self._read = 0  # by the forward that is under way
        self._own = 0  # forwards of this replica's

    def at(self, op: Op) -> None:
        """Prepare for `op`, the next forward."""
        self._over()
        home = op.home
        if home is not None and home not in self._sources:
            self._sources[home] = self._others(home)
            self._rows[home] = []
        self._op, self._read = op, 0
        self._own += home in (None, self._data._replica)

    def __iter__(self) -> IterationData:
        return self

    def __next__(self) -> Any:
        assert self._op is not None
        self._read += 1
        home = self._data._replica if self._op.home is None else self._op.home
        if self._read > 1:
            return next(self._sources[home])
        return self._batch(home, self._op.microbatch)

    def end(self) -> None:
        """Read this replica's batches to the last, as others may have run some of them."""
        self._over()
        if self._own < self._count and self._data._reads != {0}:
            self._batch(self._data._replica, self._count - 1)

    def _over(self) -> None:
        if self._op is not None:
            self._data._reads.add(self._read)

    def _batch(self, home: int, microbatch: int) -> Any:
        row = self._rows[home]
        while len(row) <= microbatch:
            row.append(next(self._sources[home]))
        return row[microbatch]


def _others(iterator: Any, microbatches: int) -> Callable[[int], Iterator[Any]]:
    """Return a function from home to its batches in the iteration that is about to begin.

    `iterator`, `microbatches`: see HomeData.begin. The function raises ScheduleError for data that
    cannot be read for another replica.
    """
    if reads_homes(iterator):
        return iterator.of_home
    if (loader := loader_of(iterator)) is None:
        return functools.partial(_refuse, iterator)
    # Now: by the time that a batch is wanted, this replica may have read some of its own.
    replaying = getattr(iterator, "replaying", False)
    first = loader._num_yielded - (microbatches if replaying else 0)
    return functools.partial(loader_batches, loader, first)


def _refuse(iterator: Any, home: int) -> Iterator[Any]:
    raise ScheduleError(f"replica {home}: {unreadable(iterator)}")


def loader_batches(loader: Any, first: int, home: int) -> Iterator[Any]:
    """Yield replica `home`'s batches of the dataset of torch's `loader`, from number `first` on.

    Batches are read where they are wanted, without the loader's own processes. The sampler begins
    at that number: to walk there would take seconds after a day of training.
    """
    sampler = copy.copy(loader._index_sampler)
    sampler.data_parallel_rank = home
    sampler.consumed_samples += first * sampler.micro_batch_times_data_parallel_size
    for indices in sampler:
        yield loader._collate_fn([loader._dataset[i] for i in indices])


def loader_of(iterator: Any) -> Any:
    """Return the iterator of torch's loader in Megatron's `iterator`, if it has Megatron's sampler.

    Else None: another replica's batches cannot be known.
    """
    inner = getattr(iterator, "iterable", iterator)  # of Megatron's RerunDataIterator
    needed = ("_index_sampler", "_dataset", "_collate_fn", "_num_yielded")
    if not all(hasattr(inner, name) for name in needed):
        return None
    sampler = inner._index_sampler
    places = ("data_parallel_rank", "consumed_samples", "micro_batch_times_data_parallel_size")
    megatrons = type(sampler).__name__ == "MegatronPretrainingSampler"
    return inner if megatrons and all(hasattr(sampler, name) for name in places) else None
