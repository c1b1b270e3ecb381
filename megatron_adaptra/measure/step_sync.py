"""The forecast of the step at the end of the next iterations, from those of the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megatron_adaptra.measure.report import Step

WINDOW = 6  # iterations: Megatron logs some of them only, and a logged one has a longer step
PASSES = 4  # delays of gloo's small all-reduce: there and back, each after a handshake
LEAST_PASSES = 2  # delays of any backend's all-reduce
# An all-gather of ours stays while it costs less than this share of what the backend costs: on a
# healthy network they take the same time, but messages between all pairs are more work for CPUs.
KEEP = 0.8
SLOWER = 1.5  # times the delay at which a cost was measured, which from then on means nothing
ONCE = 3  # times the median; more is not the work of every iteration


Delays = Mapping[tuple[int, int], float]  # seconds per directed link


class _Cost(NamedTuple):
    """A cost holds an operation's seconds, below 0 if never done, and the slowest link's delay."""

    seconds: float = -1.0
    delay: float = 0.0

    def over(self, delay: float, passes: int | None) -> float:
        """Return the seconds over a link of this `delay`, crossed `passes` times in a row.

        A link is found to be slow some iterations late, so the last seconds may be those over the
        slow link. If `passes` is None, a slower link counts there and back, others in proportion.
        """
        if delay > SLOWER * self.delay:
            return max(self.seconds, (passes or LEAST_PASSES) * delay)
        if passes is None:
            return self.seconds * min(1.0, delay / self.delay) if self.delay else self.seconds
        return max(0.0, self.seconds - passes * max(0.0, self.delay - delay))


class StepSyncModel:
    """A model forecasts the step from those of the first stage, which ends its pipeline last.

    What stages do together depends on the links, and is kept apart from each stage's own work.
    `passes`: how often a backend's small all-reduce crosses a slow link; None: not known.
    """

    def __init__(self, passes: int | None = PASSES) -> None:
        self._passes = passes
        self._work: deque[float] = deque(maxlen=WINDOW)
        self._done: deque[list[str]] = deque(maxlen=WINDOW)  # the collectives of an iteration
        self._native: dict[str, _Cost] = {}
        self._direct: dict[str, _Cost] = {}
        self._stages: dict[str, frozenset[int]] = {}
        self._kept: set[str] = set()  # by the backend, whatever the links

    def update(self, step: Step, delays: Delays) -> None:
        """Take another `step`. `delays`: seconds per link."""
        together = sum(one.seconds for one in step.collectives)
        self._work.append(max(0.0, step.seconds - together))
        self._done.append([one.name for one in step.collectives])
        for name, _, native, direct, stages, kept in step.collectives:
            self._stages[name] = frozenset(stages)
            (self._kept.add if kept else self._kept.discard)(name)
            delay = self._slowest(name, delays)
            for costs, seconds in ((self._native, native), (self._direct, direct)):
                known = costs.setdefault(name, _Cost())
                if seconds >= 0 and seconds != known.seconds:
                    costs[name] = _Cost(seconds, delay)

    @property
    def work(self) -> float:
        """The seconds of a stage's own work.

        This is a mean, as only some iterations are logged, without what was done only once.
        """
        usual = [seconds for seconds in self._work if seconds <= ONCE * median(self._work)]
        return sum(usual) / max(1, len(usual))

    def sync(self, delays: Delays) -> tuple[float, ...]:
        """Return the seconds of collectives over links with these `delays`, by the faster path.

        There are as many as iterations had on average, each of the mean length.
        """
        rows = []
        for row in self._done:
            # The first stage comes last: values of the others' first collective are there by then.
            ours = [name for name in row if name not in self._kept]
            awaited = [name for name in ours if self._direct[name].seconds != 0.0]
            rows.append([self._expected(n, delays, n in awaited[1:]) for n in row])
        return _mean(rows)

    def native(self, delays: Delays) -> tuple[float, ...]:
        """Return the seconds of collectives by the backend alone, as in stock Megatron."""
        return _mean([[self._backend(name, delays) for name in row] for row in self._done])

    def _slowest(self, name: str, delays: Delays) -> float:
        """Return the delay of the slowest link between the stages that take part."""
        stages = self._stages[name]
        known = (d for link, d in delays.items() if not stages or stages.issuperset(link))
        return max(known, default=0.0)

    def _backend(self, name: str, delays: Delays) -> float:
        cost, delay = self._native[name], self._slowest(name, delays)
        return cost.over(delay, self._passes) if cost.seconds >= 0 else 0.0

    def _expected(self, name: str, delays: Delays, waits: bool) -> float:
        """Return a collective's seconds: by our all-gather or, if that gains little, the backend.

        An all-gather of ours takes one delay if the stage `waits`, and none if it finds all values
        there. 0 seconds are those of one that no stage waits for.
        """
        cost, backend = self._direct[name], self._backend(name, delays)
        if name in self._kept:
            return backend
        if cost.seconds == 0.0:
            return 0.0
        expected = max(0.0, cost.over(self._slowest(name, delays), 1) if waits else cost.seconds)
        return backend if 0 < backend * KEEP < expected else expected


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    count = round(sum(one > 0 for row in rows for one in row) / max(1, len(rows)))
    total = sum(one for row in rows for one in row) / max(1, len(rows))
    return (total / max(1, count),) * max(1, count) if total else ()
