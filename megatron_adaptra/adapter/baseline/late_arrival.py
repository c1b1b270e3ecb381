"""An emulated late rank: its gradients are ready, and wait before they are reduced.

It stands before Megatron's own end of an iteration, in stock Megatron and with the plugin alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any


class LateArrival:
    """A late arrival delays a rank's reduction of gradients by `seconds`, in some `iterations`.

    `iteration`: the one under way.
    """

    def __init__(self, seconds: float, iterations: Container[int]) -> None:
        self.iteration = 0
        self._seconds, self._iterations = seconds, iterations

    def before(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `finalize_model_grads_func` that calls `finalize`, late in those iterations."""

        def late(*args: Any, **kwargs: Any) -> Any:
            if self.iteration in self._iterations:
                time.sleep(self._seconds)
            return finalize(*args, **kwargs)

        return late
