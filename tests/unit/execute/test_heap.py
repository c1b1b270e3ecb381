"""What a process holds is set aside from full collections, and given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_adaptra.execute.heap import FrozenHeap


@pytest.fixture
def heap() -> Iterator[FrozenHeap]:
    assert gc.isenabled()
    one = FrozenHeap()
    yield one
    one.close()
    gc.enable()


class Thing:
    """Something that a weak reference can name."""


def cycle() -> weakref.ref[Thing]:
    """Garbage that only the collector finds."""
    one: Any = Thing()
    one.itself = one
    return weakref.ref(one)


def two_iterations(heap: FrozenHeap) -> None:
    held: list[Any] = [[] for _ in range(1000)]  # what came before may be set aside already
    heap.iteration_done()
    before = gc.get_freeze_count()
    heap.iteration_done()
    assert gc.get_freeze_count() >= before + len(held) or not gc.isenabled()


def test_garbage_of_before_and_of_later_is_collected(heap: FrozenHeap) -> None:
    gone = [cycle(), cycle()]
    two_iterations(heap)
    assert gone[0]() is None
    assert gone[1]() is None
    later = cycle()
    gc.collect()
    assert later() is None


def test_a_program_that_plans_its_collections_goes_on_planning_them(heap: FrozenHeap) -> None:
    before = gc.get_freeze_count()
    gc.disable()
    two_iterations(heap)
    assert gc.get_freeze_count() == before
