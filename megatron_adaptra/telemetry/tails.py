"""What the tail of the next iterations will take, from those of the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 6  # iterations: Megatron logs some of them only, and a logged one has a longer tail
PASSES = 4  # delays of a backend's small all-reduce: there and back, each after a word (measured)
NEAR = 1.1  # an exchange over a link of that delay may be measured a little short of it
# An exchange of ours stays while it costs less than this share of what the backend costs: on a
# healthy network they take the same time, but everybody telling everybody is more work for CPUs.
KEEP = 0.8


class TailModel:
    """Fed with the first stage's tails: the first stage is the last to end its pipeline.

    What stages do together is kept apart from each stage's own work: it depends on the links.
    """

    def __init__(self) -> None:
        self._work: deque[float] = deque(maxlen=WINDOW)
        self._done: deque[list[str]] = deque(maxlen=WINDOW)  # the crossings of an iteration
        self._costs: dict[str, tuple[float, float]] = {}  # backend's and direct, as known now

    def update(self, tail: Mapping[str, Any]) -> None:
        """`tail`: as an IterationRecord has it."""
        crossings = tail["crossings"]
        self._work.append(max(0.0, tail["seconds"] - sum(taken for _, taken, _, _ in crossings)))
        self._done.append([name for name, *_ in crossings])
        self._costs.update({name: (backend, direct) for name, _, backend, direct in crossings})

    @property
    def work(self) -> float:
        """Seconds without any crossing; the mean, for only some iterations are logged."""
        return sum(self._work) / len(self._work) if self._work else 0.0

    def exchanges(self, delay: float) -> tuple[float, ...]:
        """Seconds of each crossing once the way it takes has settled, `delay` on the slowest link.

        As many as the iterations had on average, each of the mean length.
        """
        rows = []
        for row in self._done:
            seconds = [_settled(*self._costs[name], delay) for name in row]
            if row and _untried(*self._costs[row[0]], delay):
                # The first stage is the last to get there: what the others say is there by then.
                seconds[0] -= delay
            rows.append(seconds)
        return _mean(rows)

    def native(self, delay: float) -> tuple[float, ...]:
        """The same through the backend alone, as stock Megatron does it."""
        return _mean([[_native(*self._costs[name], delay) for name in row] for row in self._done])


# A way that has not been taken since a link got slow is known by what the other one takes.


def _native(backend: float, direct: float, delay: float) -> float:
    return PASSES * delay if backend < delay <= NEAR * direct else backend


def _untried(backend: float, direct: float, delay: float) -> bool:
    return direct < 0 or 0 < direct < delay <= backend / 2


def _settled(backend: float, direct: float, delay: float) -> float:
    """An exchange that has not been tried yet takes one delay."""
    expected = delay if _untried(backend, direct, delay) else direct
    return backend if 0 < backend * KEEP < expected else expected


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    count = round(sum(one > 0 for row in rows for one in row) / max(1, len(rows)))
    total = sum(max(0.0, one) for row in rows for one in row) / max(1, len(rows))
    return (total / max(1, count),) * max(1, count) if total else ()
