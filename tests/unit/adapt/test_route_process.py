"""The search for routes in a process of its own: the same routes, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from megatron_adaptra.adapt.routes.remedy import RouteProcess
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PlanningFailed
from megatron_adaptra.base.processes import descendants
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.server import search

OPS = 5_000
REPLICAS = 60
SLOW = ReplicaConditions(Conditions(4, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2), 2, slow={3: 2.0})
# Of many replicas, each of whose workers reaches all others at its own speed.
LARGE = ReplicaConditions(
    Conditions(1, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2),
    REPLICAS,
    paths={
        (2 * a, 2 * b + 1): LinkState((a + 1) / (b + 3))
        for a in range(REPLICAS)
        for b in range(REPLICAS)
    },
)


@pytest.fixture
def process() -> Iterator[RouteProcess]:
    process = RouteProcess()
    yield process
    process.close()
    assert process._process is None


def pid(process: RouteProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_it_finds_what_a_search_in_this_process_finds(process: RouteProcess) -> None:
    assert list(process(SLOW, "rendezvous", OPS)) == search(SLOW, "rendezvous", OPS)
    first = pid(process)
    assert process(SLOW, "eager", OPS) == search(SLOW, "eager", OPS)
    assert pid(process) == first
    assert os.getpriority(os.PRIO_PROCESS, first) > os.getpriority(os.PRIO_PROCESS, 0)


def test_an_error_of_the_search_is_in_words_and_the_process_goes_on(process: RouteProcess) -> None:
    with pytest.raises(PlanningFailed, match="sideways"):
        process(SLOW, "sideways", OPS)
    first = pid(process)
    assert process(SLOW, "eager", OPS)
    assert pid(process) == first


def test_a_process_that_was_killed_is_replaced(process: RouteProcess) -> None:
    process(SLOW, "eager", OPS)
    first = pid(process)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(PlanningFailed):
        process(SLOW, "eager", OPS)
    assert process(SLOW, "eager", OPS) == search(SLOW, "eager", OPS)
    assert pid(process) != first


def test_one_that_does_not_answer_is_given_up(
    process: RouteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(SLOW, "eager", OPS)
    first = pid(process)
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(waits, "SEARCH", 0.2)
    with pytest.raises(PlanningFailed, match=rf"process {first} has not answered in 0.2 s"):
        process(SLOW, "eager", OPS)
    assert first not in descendants()


def test_a_request_larger_than_the_pipe_does_not_wait_for_one_that_does_not_read(
    process: RouteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(SLOW, "eager", OPS)
    first = pid(process)
    os.kill(first, signal.SIGSTOP)
    # Else a write that waits would do so for ever.
    failing = threading.Timer(20, os.kill, (first, signal.SIGKILL))  # a write may have no end
    failing.start()
    monkeypatch.setattr(waits, "SEARCH", 0.2)
    try:
        with pytest.raises(PlanningFailed, match=rf"process {first} has not answered in 0.2 s"):
            process(LARGE, "eager", OPS)
    finally:
        failing.cancel()


@pytest.mark.long
def test_a_request_larger_than_the_pipe_is_answered(process: RouteProcess) -> None:
    assert process(LARGE, "eager", OPS) == search(LARGE, "eager", OPS)


def test_after_the_end_there_is_no_search(process: RouteProcess) -> None:
    process(SLOW, "eager", OPS)
    first = pid(process)
    process.close()
    assert first not in descendants()
    with pytest.raises(PlanningFailed, match="the training has ended"):
        process(SLOW, "eager", OPS)


def test_it_ends_with_the_thread_that_has_started_it() -> None:
    process = RouteProcess()
    thread = threading.Thread(target=process, args=(SLOW, "eager", OPS))
    thread.start()
    thread.join()
    assert process._process is not None
    assert process._process.wait(60) == -signal.SIGKILL
    process.close()
