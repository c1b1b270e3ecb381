"""Over a rendezvous transport a message also waits for the word that its receive is posted."""

from __future__ import annotations

import pytest

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.iteration_record import IterationRecord, OpTime
from megatron_adaptra.transport.base import Stamps


def stage(number: int, source: int, there: float, back: float, posted: list[float]) -> dict:
    """A report whose message i was sent at 1 + i / 100 s and awaited from `posted[i]` on."""
    record = IterationRecord(number, 1, 0.0)
    for i, when in enumerate(posted):
        sent = 1.0 + i / 100
        arrived = max(sent, when + back) + there  # what gloo does
        record.messages.append((source, Op(Kind.F, i), Stamps(sent, when, arrived, arrived)))
    record.ops = [OpTime(Op(Kind.F, 0), 0.0, 0.01, 0.01), OpTime(Op(Kind.B, 0), 0.01, 0.03, 0.02)]
    return record.report()


@pytest.mark.parametrize(("there", "back"), [(0.04, 0.04), (0.04, 0.0), (0.02, 0.05), (0.0, 0.0)])
@pytest.mark.parametrize("early", [0.1, 0.02, 0.005])
def test_the_wait_for_the_word_is_not_taken_for_delay(
    there: float, back: float, early: float
) -> None:
    """Gradients' receives stand posted for long, activations' only `early` seconds ahead."""
    estimator = Estimator(12, ["a", "a"], None, 0, rendezvous=True)
    at = [1.0 + i / 100 - early for i in range(12)]
    reports = [
        stage(0, 1, back, there, [0.0] * 12),
        stage(1, 0, there, back, at),
    ]
    for _ in range(4):
        estimator.update(reports)
    assert estimator.charts[0, 1].estimate == pytest.approx(there, abs=1e-3)
    assert estimator.charts[1, 0].estimate == pytest.approx(back, abs=1e-3)


def test_where_both_receives_are_late_the_round_trip_is_halved() -> None:
    estimator = Estimator(12, ["a", "a"], None, 0, rendezvous=True)
    at = [1.0 + i / 100 for i in range(12)]
    for _ in range(4):
        estimator.update([stage(0, 1, 0.04, 0.04, at), stage(1, 0, 0.04, 0.04, at)])
    for chart in estimator.charts.values():
        assert chart.estimate == pytest.approx(0.04, abs=1e-3)
