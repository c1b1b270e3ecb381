"""Batches of another replica are those that Megatron's loader gives that one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from torch.utils.data import DataLoader, Dataset

from megatron_adaptra.adapter.pipeline.home_data import HomeData
from megatron_adaptra.ir.op import Kind, Op

SIZE, REPLICAS, COUNT, ITERATIONS = 2, 2, 4, 3


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


class MegatronPretrainingSampler:
    """Megatron's, in short: replicas take turns from where a checkpoint has left off."""

    def __init__(self, replica: int, consumed: int) -> None:
        self.data_parallel_rank, self.consumed = replica, consumed

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.consumed, 1000, SIZE * REPLICAS):
            own = first + SIZE * self.data_parallel_rank
            yield list(range(own, own + SIZE))


def loader(replica: int, processes: int) -> Any:
    sampler: Any = MegatronPretrainingSampler(replica, consumed=40)
    return iter(DataLoader(Samples(), batch_sampler=sampler, num_workers=processes))


def read(data: Any, microbatches: list[tuple[int, int]]) -> list[list[int]]:
    """What forwards of these homes and microbatches get."""
    found = []
    for home, microbatch in microbatches:
        data.at(Op(Kind.F, microbatch, home=home))
        found.append(next(data).tolist())
    data.end()
    return found


@pytest.fixture
def reruns() -> Iterator[None]:
    """Megatron keeps what it has read in an iteration only if it may run that again."""
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield
    destroy_rerun_state_machine()


@pytest.mark.usefixtures("reruns")
@pytest.mark.parametrize("processes", [0, 2])
def test_any_order_of_homes_reads_what_these_would(processes: int) -> None:
    own, other = (loader(replica, 0) for replica in (0, 1))
    iterator, homes = RerunDataIterator(loader(0, processes)), HomeData(0)
    orders = [
        [(0, 0), (0, 1), (1, 1), (0, 3), (1, 3)],  # one of its own is not read here at all
        [(1, 0), (1, 1), (1, 2), (1, 3)],
        [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 2)],
    ]
    assert len(orders) == ITERATIONS
    for order in orders:
        batches = [[next(rows).tolist() for _ in range(COUNT)] for rows in (own, other)]
        expected = [batches[home][microbatch] for home, microbatch in order]
        for again in (False, True):  # as Megatron runs an iteration whose result it doubts
            if again:
                iterator.rewind()
            data = homes.begin(iterator, COUNT)
            assert read(data, order) == expected, (order, again)
        iterator.advance()


def test_the_first_batch_of_another_replica_may_be_read_last() -> None:
    data = HomeData(1).begin(loader(1, 0), COUNT)
    rows = read(data, [(1, 0), (1, 1), (1, 2), (0, 0)])
    assert rows == [[42, 43], [46, 47], [50, 51], [40, 41]]


@pytest.mark.parametrize("wrapped", [iter, RerunDataIterator])
def test_other_data_are_refused_in_words(wrapped: Any) -> None:
    words = HomeData(0).why_not(wrapped(iter([1, 2])))
    assert "not from Megatron's loader" in words
    assert not HomeData(0).why_not(None)
    assert not HomeData(0).why_not(RerunDataIterator(loader(0, 0)))
