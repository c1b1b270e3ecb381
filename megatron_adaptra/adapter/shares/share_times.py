"""How long a replica's schedule takes, without what it waits for other replicas.

It begins with the first forward, after the barrier of Megatron's timers, and ends before gradients
are finalised. One wait for others is in it: with `--overlap-param-gather` the first forward waits
for parameters, whose gather all replicas begin together, after their steps.

All ranks exchange it by their vote on the next iteration. The search for counts takes it while that
iteration fills its pipeline: ranks wait for messages then anyway.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs
from megatron_adaptra.device.base import Device, Mark

REPORTED = 2  # forwards of an iteration that have begun when the one before is reported


class Timed(NamedTuple):
    """A Timed gives the `seconds` of this rank's schedule in an `iteration` with these `counts`."""

    iteration: int
    counts: tuple[int, ...]
    seconds: float


class ScheduleTimes:
    """A ScheduleTimes measures one rank on a `device`; times on a GPU come one iteration later."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._first: Mark | None = None
        self._last: Mark | None = None
        self._forwards = 0
        self._report: Callable[[], None] | None = None  # still to be called in this iteration
        self._ran: deque[tuple[int, tuple[int, ...], Mark, Mark]] = deque(maxlen=2)

    def begin(self, arguments: ScheduleArgs, report: Callable[[], None]) -> ScheduleArgs:
        """Return the same `arguments` of Megatron's schedule, with forwards that are timed.

        `report`: is called while the pipeline fills.
        """
        forward_step = arguments["forward_step_func"]
        self._forwards, self._report = 0, report
        self._first = self._last = None

        @functools.wraps(forward_step)
        def seen(*args: Any, **kwargs: Any) -> Any:
            self._forwards += 1
            if self._first is None:
                self._first = self._device.mark()
            if self._forwards == REPORTED:
                self._reported()
            return forward_step(*args, **kwargs)

        return {**arguments, "forward_step_func": seen}

    def finalizing(
        self, native: Callable[..., Any], over: Callable[[], None]
    ) -> Callable[..., Any]:
        """Wrap Megatron's function that finalises gradients, `native`, to call `over` before it."""

        @functools.wraps(native)
        def seen(*args: Any, **kwargs: Any) -> Any:
            self._last = self._device.mark()
            over()
            return native(*args, **kwargs)

        return seen

    def end(self, iteration: int, counts: tuple[int, ...]) -> None:
        """End `iteration`, in which replicas have run so many microbatches each, `counts`."""
        self._reported()  # routes may leave a rank with one forward
        last = self._last or self._device.mark()
        if self._first is not None:
            self._ran.append((iteration, counts, self._first, last))

    def _reported(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            report()

    def known(self, iteration: int) -> Timed | None:
        """Return the newest iteration whose time all ranks can know at the end of `iteration`.

        None where it is not known here, which is rare.
        """
        newest = iteration - self._device.behind
        for ran, counts, first, last in self._ran:
            began, ended = first.at(), last.at()
            if ran == newest and began is not None and ended is not None:
                return Timed(ran, counts, ended - began)
        return None
