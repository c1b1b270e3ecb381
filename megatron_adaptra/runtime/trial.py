"""What came of a change of plan: measured iterations after it, compared with those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

from megatron_adaptra.telemetry.report import StageReport

BEFORE, AFTER = 2, 4  # iterations whose medians are compared; the first one on a plan is in neither
STEADY = 0.1  # stages that take longer by a larger share explain slower iterations
FIRST_BLOCK, LONGEST_BLOCK = 50, 6400  # iterations


class Measured(NamedTuple):
    """An iteration: the `seconds` of all of it, and of one microbatch on the slowest stage."""

    seconds: float
    microbatch: float


class Outcome(NamedTuple):
    """Median seconds of an iteration, before and after a change of plan."""

    before: float
    after: float


class History:
    """What the last iterations have taken."""

    def __init__(self) -> None:
        self._measured: deque[tuple[int, Measured]] = deque(maxlen=BEFORE + 1 + AFTER)
        self._last: tuple[int, float] | None = None  # observed: its number, and its `microbatch`

    def add(self, iteration: int, reports: Sequence[StageReport]) -> None:
        """Take all stages' `reports` of `iteration`, which have the seconds of the one before."""
        seconds, last = reports[0].seconds, self._last
        if seconds is not None and last is not None and last[0] == iteration - 1:
            self._measured.append((iteration - 1, Measured(seconds, last[1])))
        self._last = iteration, _microbatch_seconds(reports)

    def compare(self, since: int) -> Outcome | None:
        """Iterations around a change of plan, of which `since` is the first one on the new plan.

        None where an iteration is not known, or the stages themselves have become slower.
        """
        old = [m for i, m in self._measured if since - BEFORE <= i < since]
        new = [m for i, m in self._measured if since < i <= since + AFTER]
        if len(old) < BEFORE or len(new) < AFTER:
            return None
        if median(m.microbatch for m in new) > (1 + STEADY) * median(m.microbatch for m in old):
            return None
        # The second of four: one or two that something else has held up do not decide.
        return Outcome(median(m.seconds for m in old), median_low(m.seconds for m in new))


def _microbatch_seconds(reports: Sequence[StageReport]) -> float:
    """What the ops of one microbatch took on the slowest stage, by the wall clock.

    On crowded cores that grows with what else runs there, which is no fault of a plan.
    """
    walls = [report.wall for report in reports]
    return max(
        wall.get("F", 0.0) + (wall.get("B") or wall.get("I", 0.0) + wall.get("W", 0.0))
        for wall in walls
    )


class Backoff:
    """For how long a kind of change that has failed is not tried again; twice as long each time."""

    def __init__(self) -> None:
        self._length, self._until = FIRST_BLOCK, 0

    def failed(self, iteration: int) -> None:
        """The change has made iterations slower, as is known in `iteration`."""
        self._until = iteration + self._length
        self._length = min(2 * self._length, LONGEST_BLOCK)

    def passed(self) -> None:
        """It has not."""
        self._length = FIRST_BLOCK

    def blocks(self, iteration: int) -> bool:
        """Whether it is not to be tried in `iteration`."""
        return iteration < self._until
