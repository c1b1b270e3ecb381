"""When an iteration of a share of microbatches is measured, and when that is reported."""

from __future__ import annotations

import pytest

from megatron_adaptra.device.host import HOST


@pytest.mark.parametrize(("forwards", "reported"), [(1, "end"), (2, "F1"), (8, "F1")])
def test_an_iteration_is_reported_while_the_next_one_fills_its_pipeline(
    forwards: int, reported: str
) -> None:
    """Where a rank runs one forward, when its backward is over."""
    from megatron_adaptra.adapter.sync.share_times import ScheduleTimes

    times, events = ScheduleTimes(HOST), list[str]()

    def report() -> None:
        events.extend(f"report of {iteration}" for iteration, _, _ in times.take())

    for iteration in range(3):
        events.append(f"iteration {iteration}")
        arguments = times.begin({"forward_step_func": events.append}, report)
        for microbatch in range(forwards):
            arguments["forward_step_func"](f"F{microbatch}")
        events.append("end")
        times.end(iteration, forwards)
    for iteration in range(1, 3):
        at = events.index(f"report of {iteration - 1}")
        assert at > events.index(f"iteration {iteration}")
        around = events[at - 1] if reported == "end" else events[at + 1]
        assert around == reported
    assert "report of 2" not in events
