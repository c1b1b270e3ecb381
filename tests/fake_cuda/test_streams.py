"""Streams, events and hardware queues of the fake: as CUDA's, so that what hangs there hangs here.

Kernels take 1 ms of the fake's own time, which a busy machine does not stretch; what is compared
with it is a hundred times longer or shorter.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_runs import run_script


def scenario(name: str, **options: Any) -> Any:
    (found,) = run_script("streams_script.py", name, kernel_us=1000, **options)
    return found


def test_launches_return_at_once_and_events_have_the_streams_time() -> None:
    found = scenario("in_order", queues=8)
    assert found["launching"] < 0.5  # of 500 ms
    assert found["asked"] == [600, 600]
    assert found["early"] == 600
    assert 0.5 <= found["took"] < 0.7
    assert (found["then"], found["stream"]) == (0, 0)


def test_a_stream_waits_for_an_event_as_it_was_recorded_before() -> None:
    found = scenario("waits", queues=8)
    assert 0.1 <= found["b"] < 0.25, "not for what was recorded afterwards, at 0.4"
    assert found["a"] == 600


@pytest.mark.parametrize(("queues", "behind"), [(1, True), (32, False)])
def test_a_stream_that_waits_holds_up_what_shares_its_queue(queues: int, behind: bool) -> None:
    found = scenario("queues", queues=queues)
    assert (found["until"] >= 0.2) is behind, found
    assert found["one"] < 0.1


def test_a_full_queue_blocks_the_host() -> None:
    assert scenario("depth", depth=100)["launching"] > 0.3
    assert scenario("depth", depth=1000)["launching"] < 0.3


def test_the_device_is_waited_for_as_a_whole() -> None:
    assert scenario("synchronised", queues=8) == {
        "cuCtxSynchronize": [0, 0],
        "cuMemFree_v2": [0, 0],
    }
    freed = scenario("synchronised", queues=8, free_waits=0)
    assert freed == {"cuCtxSynchronize": [0, 0], "cuMemFree_v2": [600, 600]}


def test_the_default_stream_is_ordered_with_blocking_streams_alone() -> None:
    found = scenario("legacy", queues=8)
    assert found["free"] < 0.05
    assert found["default"] >= 0.1
    assert found["after"] >= 0.2


def test_a_function_of_the_host_runs_in_its_streams_order() -> None:
    assert scenario("host_functions") == {"before": 600, "main": [False]}


def test_mistakes_are_answered_as_by_a_real_driver() -> None:
    assert scenario("mistakes") == {
        "untimed": 400, "unrecorded": 400, "no stream": 400, "no event": 400, "destroyed": 400,
        "no device": 101, "no context": 201,
        "name": "CUDA_ERROR_NOT_READY", "text": "device not ready",
    }  # fmt: skip
