"""How long a replica's schedule takes, without what it waits for other replicas.

It begins with the first forward, after the barrier of Megatron's timers, and ends before gradients
are finalised. What is in it of others: with `--overlap-param-gather` the first forward waits for
parameters, whose gather all replicas begin together, after their steps.

It is reported in the iteration after. At its own end all ranks are busy with a step that the next
one waits for; while a pipeline fills they wait for messages.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs
from megatron_adaptra.device.base import Device, Mark

REPORTED = 2  # forwards of an iteration that have begun when the one before is reported


class ScheduleTimes:
    """Of one rank. On a GPU, marks of `device` are read when it has passed them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._first: Mark | None = None
        self._last: Mark | None = None
        self._forwards = 0
        self._report: Callable[[], None] | None = None  # still to be called in this iteration
        self._unread: deque[tuple[int, int, Mark, Mark]] = deque()

    def begin(self, arguments: ScheduleArgs, report: Callable[[], None]) -> ScheduleArgs:
        """The same `arguments` of Megatron's schedule, whose forwards are seen.

        `report`: is called while the pipeline fills, to `take` what is known.
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
        """Megatron's function that finalises gradients, `native`: backwards are `over` before."""

        @functools.wraps(native)
        def seen(*args: Any, **kwargs: Any) -> Any:
            self._last = self._device.mark()
            over()
            return native(*args, **kwargs)

        return seen

    def end(self, iteration: int, microbatches: int) -> None:
        """That was `iteration`, of so many `microbatches`."""
        self._reported()  # routes may leave a rank with one forward
        last = self._last or self._device.mark()
        if self._first is not None:
            self._unread.append((iteration, microbatches, self._first, last))

    def _reported(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            report()

    def take(self) -> list[tuple[int, float, int]]:
        """Iterations whose times are known by now: number, seconds, microbatches."""
        found = []
        while self._unread:
            iteration, microbatches, first, last = self._unread[0]
            began, ended = first.at(), last.at()
            if began is not None and ended is not None:
                found.append((iteration, ended - began, microbatches))
            elif not (first.fault or last.fault):
                break
            self._unread.popleft()
        return found
