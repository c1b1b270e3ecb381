"""Batches by home and microbatch: of loaders like Megatron's, of iterators that know homes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_adaptra.adapter.pipeline.home_data import HomeData, IterationData, unreadable
from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.ir.op import Kind, Op

REPLICAS, EACH = 3, 4


class MegatronPretrainingSampler:
    """Megatron's, as far as it matters here: replicas take turns."""

    def __init__(self, consumed_samples: int, replica: int, size: int = 2) -> None:
        self.consumed_samples, self.data_parallel_rank, self.size = consumed_samples, replica, size
        self.micro_batch_times_data_parallel_size = REPLICAS * size
        self.end = 400

    def __iter__(self) -> Iterator[list[int]]:
        at = self.consumed_samples + self.data_parallel_rank * self.size
        while at < self.end:
            yield list(range(at, at + self.size))
            at += self.micro_batch_times_data_parallel_size

    def __len__(self) -> int:
        return 1000


class Samples(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class RerunDataIterator:
    """Megatron's: it can give the last iteration's batches once more."""

    def __init__(self, iterable: Any) -> None:
        self.iterable, self.saved, self.replaying, self.at = iterable, [], False, 0

    def __next__(self) -> Any:
        if self.replaying:
            self.at += 1
            return self.saved[self.at - 1]
        self.saved.append(next(self.iterable))
        return self.saved[-1]

    def rewind(self) -> None:
        self.replaying, self.at = True, 0

    def advance(self) -> None:
        self.saved, self.replaying = [], False


def loader(replica: int, workers: int = 0, consumed: int = 12) -> RerunDataIterator:
    sampler = MegatronPretrainingSampler(consumed, replica)
    made = torch.utils.data.DataLoader(Samples(), batch_sampler=sampler, num_workers=workers)
    return RerunDataIterator(iter(made))


def ran(data: IterationData, ops: str) -> list[list[int]]:
    """What the forwards of `ops` read."""
    found = []
    for op in map(Op.parse, ops.split()):
        data.at(op)
        found.append(next(data).tolist())
    data.end()
    return found


def batch(home: int, number: int, consumed: int = 12) -> list[int]:
    """By the formula of Megatron's sampler: batch `number` of a replica, from the start on."""
    first = consumed + (number * REPLICAS + home) * 2
    return [first, first + 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_every_replica_reads_what_another_would(workers: int) -> None:
    data, iterator = HomeData(1), loader(1, workers)
    assert unreadable(iterator) == ""
    plans = [
        "F0@1 F1@1 F2@1 F3@1",  # at home
        "F0@1 F0@2 F1@2 F3@0 F2@1",  # some of two others, some of its own not
        "F0@0 F1@0 F2@0 F3@0",  # another's alone
        "F3@2",
        "F0@1 F1@1 F2@1 F3@1",
        "F2@2 F3@2",
    ]
    for i, plan in enumerate(plans):
        ops = [Op.parse(text) for text in plan.split()]
        wanted = [batch(op.home or 0, i * EACH + op.microbatch) for op in ops]
        assert ran(data.begin(iterator, EACH), plan) == wanted, plan
        iterator.advance()


def test_an_iteration_that_is_run_again_reads_the_same() -> None:
    data, iterator = HomeData(0), loader(0)
    plan = "F0@0 F1@0 F0@1 F3@2"
    first = ran(data.begin(iterator, EACH), plan)
    iterator.rewind()
    assert ran(data.begin(iterator, EACH), plan) == first
    iterator.advance()
    assert ran(data.begin(iterator, EACH), "F0@1") == [batch(1, EACH)]


def test_a_place_far_into_the_data_is_not_walked_to() -> None:
    iterator, far = loader(0), 10**12  # which no walk reaches
    iterator.iterable._index_sampler.end = 100 * far
    iterator.iterable._num_yielded = far
    data = HomeData(0).begin(iterator, EACH)
    data.at(Op(Kind.F, 1, home=2))
    assert next(data).tolist() == batch(2, far + 1)


def test_a_stage_that_reads_nothing_takes_nothing() -> None:
    data, iterator = HomeData(0), loader(0)
    one = data.begin(iterator, EACH)
    one.at(Op(Kind.F, 0, home=1))
    one.end()
    assert iterator.saved == []
    assert HomeData(0).begin(None, EACH) is None


def test_what_nobody_can_read_for_another_is_named() -> None:
    data = HomeData(0)
    generator = (x for x in range(9))
    assert "come from a generator, not from Megatron's loader" in unreadable(generator)
    one = data.begin(generator, 2)
    one.at(Op.parse("F0@0"))
    assert next(one) == 0
    with pytest.raises(ScheduleError, match="replica 1: the data come from a generator"):
        one.at(Op.parse("F1@1"))
