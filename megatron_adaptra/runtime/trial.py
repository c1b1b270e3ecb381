"""What came of a change of plan: measured iterations after it, compared with those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median, median_low
from typing import Generic, NamedTuple

from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.runtime.change import Change, K, P
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.telemetry.report import StageReport

BEFORE, AFTER = 2, 4  # iterations whose medians are compared; the first one on a plan is in neither
LONGER = 8  # iterations for which that is tried again where stages took longer for a moment
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


class Compared(NamedTuple):
    """Iterations before and after a change of plan.

    `typical`: their medians. `nearest`: the longest one before it, and the shortest one after it as
    that would have been if stages took no longer than before.
    """

    typical: Outcome
    nearest: Outcome


class History:
    """What the last iterations have taken."""

    def __init__(self) -> None:
        self._measured: deque[tuple[int, Measured]] = deque(maxlen=BEFORE + 1 + AFTER + LONGER)
        self._last: tuple[int, float] | None = None  # observed: its number, and its `microbatch`

    def add(self, iteration: int, reports: Collection[StageReport], seconds: float | None) -> None:
        """Take all `reports` of `iteration`; `seconds`: of the one before, None if not known."""
        last = self._last
        if seconds is not None and last is not None and last[0] == iteration - 1:
            self._measured.append((iteration - 1, Measured(seconds, last[1])))
        self._last = iteration, _microbatch_seconds(reports)

    def compare(self, since: int) -> Compared | None:
        """The last iterations and those before `since`, the first one on a new plan.

        None where an iteration is not known, or the stages themselves have become slower.
        """
        old = [m for i, m in self._measured if since - BEFORE <= i < since]
        new = [m for i, m in self._measured if since < i][-AFTER:]
        if len(old) < BEFORE or len(new) < AFTER:
            return None
        was, now = (median(m.microbatch for m in row) for row in (old, new))
        if now > (1 + STEADY) * was:
            return None
        longer = now / was if was else 1.0
        before, after = [m.seconds for m in old], [m.seconds for m in new]
        return Compared(
            # The second of four: one or two that something else has held up do not decide.
            Outcome(median(before), median_low(after)),
            Outcome(max(before), min(after) / max(1.0, longer)),
        )


def _microbatch_seconds(reports: Collection[StageReport]) -> float:
    """What the ops of one microbatch took on the slowest stage, by the wall clock.

    On crowded cores that grows with what else runs there, which is no fault of a plan.
    """
    walls = [report.wall for report in reports]
    return max(
        wall.get("F", 0.0) + (wall.get("B") or wall.get("I", 0.0) + wall.get("W", 0.0))
        for wall in walls
    )


class Backoff:
    """For how long a kind of change that has failed is not tried again; twice as long each time.

    Args:
        longest: iterations.
    """

    def __init__(self, longest: int = LONGEST_BLOCK) -> None:
        self._length, self._until, self._longest = FIRST_BLOCK, 0, longest

    def failed(self, iteration: int) -> None:
        """The change has made iterations slower, as is known in `iteration`."""
        self._until = iteration + self._length
        self._length = min(2 * self._length, self._longest)

    def passed(self) -> None:
        """It has not."""
        self._length = FIRST_BLOCK

    def blocks(self, iteration: int) -> bool:
        """Whether it is not to be tried in `iteration`."""
        return iteration < self._until


class Trials(Generic[P, K]):
    """Which change has made iterations slower, and which kind of plan is not tried for now.

    Args:
        start: the schedule to come back to; changes to it and from it are kinds of their own.
        rule: which says what is slower.

    `since`: the first iteration of the plan in force. `slower`: the change that is to be undone,
    and what was measured.
    """

    def __init__(self, start: Schedule, rule: ReplanPolicy) -> None:
        self.start, self.since = start, 0
        self.slower: tuple[Change[P, K], Outcome] | None = None
        self._rule, self._history = rule, History()
        self._trial: Change[P, K] | None = None  # in force, not yet compared with what was before
        self._to_start, self._from_start = Backoff(), Backoff()

    def observe(
        self, iteration: int, reports: Collection[StageReport], seconds: float | None, changed: bool
    ) -> None:
        """Compare the iterations on a new plan with those before, once there are enough.

        Args:
            iteration: its number.
            reports: of all workers.
            seconds: of the iteration before; None if not known.
            changed: something is other than before, so that a comparison shows nothing of the plan.
        """
        self._history.add(iteration, reports, seconds)
        change = self._trial
        if change is None or iteration < self.since:
            return
        if changed or iteration > self.since + AFTER + LONGER:
            self._trial = None
        compared = None if changed else self._history.compare(self.since)
        if compared is None:
            return
        backoff = self._backoff(change.plan.schedule)
        if not self._is_slower(change, compared.typical):
            self._trial = None
            backoff.passed()
        elif self._is_slower(change, compared.nearest):
            self._trial = None
            self.slower = change, compared.typical
            backoff.failed(iteration)
        # Else they differ by as much as they have become longer: the next ones may show why.

    def _is_slower(self, change: Change[P, K], outcome: Outcome) -> bool:
        expected = outcome.before + change.plan.predicted - change.current.predicted
        return self._rule.slower(outcome.before, outcome.after, expected)

    def swapped(self, change: Change[P, K], iteration: int) -> None:
        """`change` is in force from `iteration` on."""
        self.since = iteration
        self._trial, self.slower = change if change.trial else None, None

    def blocks(self, schedule: Schedule, iteration: int) -> bool:
        """Whether a `schedule` is of a kind that has turned out slower before this `iteration`."""
        return self._backoff(schedule).blocks(iteration)

    def blocks_leaving(self, schedule: Schedule, iteration: int) -> bool:
        """Whether no other kind of plan may follow a `schedule` in this `iteration`."""
        at_start = schedule.same_as(self.start)
        return (self._from_start if at_start else self._to_start).blocks(iteration)

    def blocks_any(self, iteration: int) -> bool:
        """Whether some kind of plan is not to be tried in this `iteration`."""
        return self._to_start.blocks(iteration) or self._from_start.blocks(iteration)

    def postpones(self, in_force: Schedule, iteration: int, every: int) -> bool:
        """Whether what has changed is to wait while a kind of plan is blocked in this `iteration`.

        New changes wait, too: what has failed is the model's prediction, and the next plan would be
        made by the same model. What flaps would bring in, each time, a plan that loses. With a plan
        `in_force` that is not the start, one of `every` iterations does not wait.
        """
        if not self.blocks_any(iteration):
            return False
        only = in_force.same_as(self.start) and self._from_start.blocks(iteration)
        return only or iteration % every != 0

    def _backoff(self, schedule: Schedule) -> Backoff:
        return self._to_start if schedule.same_as(self.start) else self._from_start
