"""The status that charts of a training show: of its plans, and of the delays of its links."""

from __future__ import annotations

from typing import Any

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator

KEPT_DELAYS = 512  # iterations


class DelayRows(dict[int, dict[str, float]]):
    """A table of delays has, by iteration, the seconds of each link.

    Rows span the training, KEPT_DELAYS at most: of a long one every second iteration, or every
    fourth, and so on.
    """

    _every = 1  # of so many iterations one is kept

    def keep(self, iteration: int, delays: dict[str, float]) -> None:
        """Keep the `delays` of an `iteration`, if it is one of those that are kept."""
        if iteration % self._every == 0:
            self[iteration] = delays
        if len(self) > KEPT_DELAYS:
            self._every *= 2
            for left_out in [i for i in self if i % self._every]:
                del self[left_out]


def status_of(
    iteration: int,
    estimator: Estimator | ReplicaEstimator,
    log: DecisionLog[PlanDecision],
    measured: bool,
) -> dict[str, Any]:
    """Return the status after an `iteration`.

    `delays` in seconds per link, `alarms` the links that are out of their charts, and of the last
    decision the predicted seconds of an iteration and their lower bound. `measured`: delays are.
    """
    status = {
        "iteration": iteration, "delays": estimator.delays() if measured else {},
        "alarms": estimator.alarms(), "replans": log.committed,
    }  # fmt: skip
    if (last := log.last) is not None:
        status["predicted"] = (last.refreshed_ms or last.predicted_ms) / 1e3
        status["lower_bound"] = last.lower_bound_ms / 1e3
    return status
