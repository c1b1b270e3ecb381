"""GPUs that wait for their hosts are reported, once."""

from __future__ import annotations

import pytest
from measure.records import report

from megatron_adaptra.adapt.schedules.advice import STARVED_ITERATIONS, Starvation


def logged(*rows: tuple[float, float], seconds: float = 0.2) -> list[str]:
    """Each row: seconds for which the GPUs of two stages had nothing to do."""
    starvation = Starvation(2)
    return [
        starvation.update([report(s, starved=one) for s, one in enumerate(row)], seconds)
        for row in rows
    ]


def test_the_stage_that_waits_most_is_named_once() -> None:
    lines = logged(*[(0.03, 0.05)] * (3 * STARVED_ITERATIONS))
    assert lines[: STARVED_ITERATIONS - 1] == [""] * (STARVED_ITERATIONS - 1)
    assert lines[STARVED_ITERATIONS - 1].startswith("the GPU of stage 1 has nothing to do for 25%")
    assert set(lines[STARVED_ITERATIONS:]) == {""}


@pytest.mark.parametrize("row", [(0.0, 0.0), (0.01, 0.019)])
def test_what_every_host_takes_is_not_logged(row: tuple[float, float]) -> None:
    assert set(logged(*[row] * 20)) == {""}


def test_an_iteration_now_and_then_is_not_logged() -> None:
    assert set(logged(*[(0.0, 0.1), (0.0, 0.0), (0.0, 0.0)] * 8)) == {""}
