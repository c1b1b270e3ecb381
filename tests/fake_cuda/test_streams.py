"""Streams, events and hardware queues of the fake: as CUDA's, so that what hangs there hangs here.

Kernels take 1 ms of the fake's own time, which a busy machine does not stretch; what is compared
with it is a hundred times longer or shorter. Where the host is held up, another run shows it.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_runs import run_script
from patience import in_some_run

pytestmark = pytest.mark.large


def scenario(name: str, **options: Any) -> Any:
    (found,) = run_script("streams_script.py", name, kernel_us=1000, **options)
    return found


def test_launches_return_at_once_and_events_have_the_streams_time() -> None:
    def run() -> Any:
        found = scenario("in_order", queues=8)
        assert found["took"] >= 0.5
        assert (found["then"], found["stream"]) == (0, 0)
        return found

    in_some_run(
        run,
        lambda found: (
            found["launching"] < 0.5  # of 500 ms
            and found["took"] < 0.7
            and found["asked"] == [600, 600]
            and found["early"] == 600
        ),
    )


def test_a_stream_waits_for_an_event_as_it_was_recorded_before() -> None:
    def run() -> Any:
        found = scenario("waits", queues=8)
        assert found["b"] >= 0.1
        return found

    # Not for what was recorded afterwards, at 0.4.
    in_some_run(run, lambda found: found["b"] < 0.25 and found["a"] == 600)


@pytest.mark.parametrize(("queues", "behind"), [(1, True), (32, False)])
def test_a_stream_that_waits_holds_up_what_shares_its_queue(queues: int, behind: bool) -> None:
    def run() -> Any:
        found = scenario("queues", queues=queues)
        assert found["until"] >= 0.2 or not behind
        return found

    in_some_run(run, lambda found: (found["until"] >= 0.2) is behind and found["one"] < 0.1)


def test_a_full_queue_blocks_the_host() -> None:
    assert scenario("depth", depth=100)["launching"] > 0.3
    in_some_run(lambda: scenario("depth", depth=1000), lambda found: found["launching"] < 0.3)


def test_the_device_is_waited_for_as_a_whole() -> None:
    assert scenario("synchronised", queues=8) == {
        "cuCtxSynchronize": [0, 0],
        "cuMemFree_v2": [0, 0],
    }
    freed = {"cuCtxSynchronize": [0, 0], "cuMemFree_v2": [600, 600]}
    in_some_run(
        lambda: scenario("synchronised", queues=8, free_waits=0), lambda found: found == freed
    )


def test_the_default_stream_is_ordered_with_blocking_streams_alone() -> None:
    def run() -> Any:
        found = scenario("legacy", queues=8)
        assert found["default"] >= 0.1
        assert found["after"] >= 0.2
        return found

    in_some_run(run, lambda found: found["free"] < 0.05)


def test_a_function_of_the_host_runs_in_its_streams_order() -> None:
    assert scenario("host_functions") == {"before": 600, "main": [False]}


def test_mistakes_are_answered_as_by_a_real_driver() -> None:
    assert scenario("mistakes") == {
        "untimed": 400, "unrecorded": 400, "no stream": 400, "no event": 400, "destroyed": 400,
        "no device": 101, "no context": 201,
        "name": "CUDA_ERROR_NOT_READY", "text": "device not ready",
    }  # fmt: skip
