"""Waits for batches are timed whatever Megatron hands over as its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.device.base import HOST
from megatron_adaptra.execute.guarded_probe import GuardedProbe


@pytest.fixture
def timed() -> Any:
    pytest.importorskip("megatron.core")
    from megatron_adaptra.adapter.pipeline.counted_batches import timed

    return timed


class Loader:
    """As torch's: more than an iterator."""

    _num_yielded = 0

    def __init__(self) -> None:
        self._batches = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self._num_yielded += 1
        return next(self._batches)


def run_again() -> Any:
    from megatron.core.rerun_state_machine import RerunDataIterator

    return RerunDataIterator(Loader())


@pytest.mark.parametrize("kind", [Loader, run_again, lambda: iter("abc")])
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_iterators_of_all_kinds_are_timed(kind: Any, chunks: int, timed: Any) -> None:
    probe = GuardedProbe(Guard(), 0, HOST)
    probe.begin(0)
    each = [kind() for _ in range(max(1, chunks))]
    given = {"data_iterator": each if chunks else each[0], "seq_length": 8}
    made = timed(given, probe)
    assert made["seq_length"] == 8
    data = made["data_iterator"]
    assert isinstance(data, list) == bool(chunks)
    found = data if chunks else [data]
    for old, new in zip(each, found, strict=True):
        assert isinstance(new, type(old))
        assert iter(new) is new
        assert len(list(new)) == 3
        with pytest.raises(StopIteration):
            next(new)
        if isinstance(old, Loader):
            assert new._num_yielded == old._num_yielded == 5
    record = probe.pipeline_ends()
    assert record is not None
    assert record.loading is not None
    assert record.loading >= 0
    probe.close()


@pytest.mark.parametrize("data", [None, [None, None], {"images": iter(())}, ("a", "b")])
def test_whatever_is_no_iterator_stays_as_it_is(data: Any, timed: Any) -> None:
    probe = GuardedProbe(Guard(), 0, HOST)
    assert timed({"data_iterator": data}, probe)["data_iterator"] == data
    assert timed({}, probe) == {"data_iterator": None}
    probe.close()
