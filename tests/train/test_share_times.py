"""When an iteration of a share of microbatches is measured, and when that is reported."""

from __future__ import annotations

import functools

import pytest

from megatron_adaptra.device.base import HOST


@pytest.mark.parametrize(("forwards", "reported"), [(1, "end"), (2, "F1"), (8, "F1")])
def test_an_iteration_is_reported_while_the_next_one_fills_its_pipeline(
    forwards: int, reported: str
) -> None:
    """Where a rank runs one forward, when its backward is over."""
    from megatron_adaptra.adapter.shares.share_times import ScheduleTimes

    times, events = ScheduleTimes(HOST), list[str]()

    for iteration in range(3):
        events.append(f"iteration {iteration}")
        report = f"report of {iteration - 1}"
        arguments = times.begin(
            {"forward_step_func": events.append}, functools.partial(events.append, report)
        )
        for microbatch in range(forwards):
            arguments["forward_step_func"](f"F{microbatch}")
        events.append("end")
        times.end(iteration, (forwards, 4))
        timed = times.known(iteration)
        assert timed is not None
        assert timed[:2] == (iteration, (forwards, 4))
    for iteration in range(1, 3):
        at = events.index(f"report of {iteration - 1}")
        assert at > events.index(f"iteration {iteration}")
        around = events[at - 1] if reported == "end" else events[at + 1]
        assert around == reported
    assert "report of 2" not in events
