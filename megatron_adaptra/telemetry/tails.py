"""What the tail of the next iterations will take, from those of the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 6  # iterations: Megatron logs some of them only, and a logged one has a longer tail
PASSES = 4  # delays of a backend's small all-reduce: there and back, each after a word (measured)
STALE = 1.1  # an exchange over a link of that delay may be measured a little short of it
KEEP = 1.25  # an exchange of ours is in use while it costs less than so many times the backend


class TailModel:
    """Fed with the first stage's tails: the first stage is the last to end its pipeline.

    What stages do together is kept apart from each stage's own work: it depends on the links.
    """

    def __init__(self) -> None:
        self._work: deque[float] = deque(maxlen=WINDOW)
        self._crossings: deque[list[tuple[float, float]]] = deque(maxlen=WINDOW)

    def update(self, tail: Mapping[str, Any]) -> None:
        """`tail`: as an IterationRecord has it."""
        crossings = tail["crossings"]
        self._work.append(max(0.0, tail["seconds"] - sum(taken for taken, _, _ in crossings)))
        self._crossings.append([(backend, direct) for _, backend, direct in crossings])

    @property
    def work(self) -> float:
        """Seconds without any crossing; the mean, for only some iterations are logged."""
        return sum(self._work) / len(self._work) if self._work else 0.0

    def exchanges(self, delay: float) -> tuple[float, ...]:
        """Seconds of each crossing once the way it takes has settled, `delay` on the slowest link.

        As many as the iterations had on average, each of the mean length.
        """
        return self._mean([[_settled(*one, delay) for one in row] for row in self._crossings])

    def native(self, delay: float) -> tuple[float, ...]:
        """The same through the backend alone, as stock Megatron does it."""
        return self._mean([[_native(*one, delay) for one in row] for row in self._crossings])

    @staticmethod
    def _mean(rows: list[list[float]]) -> tuple[float, ...]:
        seconds = [one for row in rows for one in row if one > 0]
        if not seconds:
            return ()
        count = max(1, round(len(seconds) / len(rows)))
        return (sum(seconds) / len(rows) / count,) * count


def _native(backend: float, direct: float, delay: float) -> float:
    """The backend may not have been tried since a link got slow, but then the exchange tells."""
    return PASSES * delay if backend < delay <= STALE * direct else backend


def _settled(backend: float, direct: float, delay: float) -> float:
    """An exchange that has not been tried yet takes one delay."""
    expected = direct if direct >= 0 else delay
    return backend if 0 < backend * KEEP < expected else expected
