"""GPUs that wait for their hosts are reported, once."""

from __future__ import annotations

import pytest
from telemetry.records import report

from megatron_adaptra.measure.starvation import WINDOW, Starvation


def logged(*rows: tuple[float, float], seconds: float = 0.2) -> list[str]:
    """Each row: seconds for which the GPUs of two stages had nothing to do."""
    starvation = Starvation(2)
    return [
        starvation.update([report(s, starved=one) for s, one in enumerate(row)], seconds)
        for row in rows
    ]


def test_the_stage_that_waits_most_is_named_once() -> None:
    lines = logged(*[(0.03, 0.05)] * (3 * WINDOW))
    assert lines[: WINDOW - 1] == [""] * (WINDOW - 1)
    assert lines[WINDOW - 1].startswith("the GPU of stage 1 has nothing to do for 25% of an ")
    assert set(lines[WINDOW:]) == {""}


@pytest.mark.parametrize("row", [(0.0, 0.0), (0.01, 0.019)])
def test_what_every_host_takes_is_not_logged(row: tuple[float, float]) -> None:
    assert set(logged(*[row] * 20)) == {""}


def test_an_iteration_now_and_then_is_not_logged() -> None:
    assert set(logged(*[(0.0, 0.1), (0.0, 0.0), (0.0, 0.0)] * 8)) == {""}
