"""The seconds of an operation on the device it runs on, which the host learns later, if at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from megatron_adaptra.device.base import Device, Mark

# Seconds; None while they are not known, and for ever where the device does not report it.
Taken = Callable[[], float | None]


def timed(clock: Device, call: Callable[[], object]) -> Taken:
    """Run `call` between two marks of `clock`, whose errors are dropped; those of `call` are not.

    Returns a function that gives the seconds between the marks.
    """
    marks: list[Mark] = []
    with contextlib.suppress(Exception):
        marks.append(clock.mark())
    call()
    with contextlib.suppress(Exception):
        marks.append(clock.mark())

    def taken() -> float | None:
        with contextlib.suppress(Exception):
            begin, end = (mark.at() for mark in marks)
            if begin is not None and end is not None:
                return end - begin
        return None

    return taken
