"""The time that Python's garbage collector takes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping


class GarbageTime:
    """A garbage time counts the CPU seconds of garbage collections in this process, once made."""

    def __init__(self) -> None:
        self._seconds = seconds = [0.0, 0.0]  # of all threads; of the one that makes this
        thread, begun = threading.get_ident(), [0.0]

        # A function of its own: a method in gc.callbacks would keep this object for ever.
        def seen(phase: str, _: Mapping[str, int]) -> None:
            now = time.thread_time()
            if phase == "start":
                begun[0] = now
                return
            seconds[0] += now - begun[0]
            if threading.get_ident() == thread:
                seconds[1] += now - begun[0]

        self._seen = seen
        gc.callbacks.append(seen)

    @property
    def total(self) -> float:
        """The seconds so far; any thread that collects stops all others that run Python."""
        return self._seconds[0]

    @property
    def own(self) -> float:
        """The seconds so far of the thread that has made this."""
        return self._seconds[1]

    def close(self) -> None:
        """Stop counting; may be called twice."""
        if self._seen in gc.callbacks:
            gc.callbacks.remove(self._seen)

    def __del__(self) -> None:
        self.close()
