"""Megatron's timers, which an exception of ours would leave running: they refuse a second start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stopped_on(error: type[Exception], timers: Any) -> Iterator[None]:
    """When the body raises such an error, stop the timers it has started. `timers`: or None."""
    before = _running(timers)
    try:
        yield
    except error:
        for timer in _running(timers) - before:
            timer.stop()
        raise


def _running(timers: Any) -> set[Any]:
    known = getattr(timers, "_timers", {}).values()
    return {timer for timer in known if getattr(timer, "_started", False)}
