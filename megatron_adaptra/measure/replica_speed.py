"""The speed of each data-parallel replica, and the replicas that are slow for good.

In each iteration a replica reports how many microbatches it ran, and the seconds they took. Some
seconds are outside of any microbatch. The rest are those of one microbatch, times the microbatches
that it ran plus those whose time it takes to fill and drain its pipeline.

Which replicas are slow is found as for the workers of a stage (measure/slow_workers.py): each
has the others for a control group, and a chart with a gate and a confirmation. A new set of slow
replicas counts only once it has stayed the same for some iterations. Slowness that moves from one
replica to another is counted for none of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.measure.detect import apart
from megatron_adaptra.measure.host_use import HostUse
from megatron_adaptra.measure.rotation import Rotation
from megatron_adaptra.measure.slow_workers import SLOW, SlowWorkers
from megatron_adaptra.plan.shares.counts import Speed

WINDOW = 8  # iterations whose median is expected next: the least error, docs/evidence/shares.md
HOLDS = 3  # iterations in a row that show the same set, before it counts, ...
HOLDS_ROTATING = 12  # ... and as many where slowness has moved
ROTATES = 0.15  # share of iterations in which slowness moves: every sixth
APART = 1.35  # times as long as others in one iteration: slow there, and no noise
AROUND = 4  # iterations before and after a change of counts, from which seconds outside follow
PRIOR = 4.0  # squared difference of counts at which half of what it shows is believed
MOST_OUTSIDE = 0.9  # of an iteration
_KIND = "microbatch"
_LEAST, _MOST = 1e-9, 1e9  # seconds; others are nonsense


@dataclass(frozen=True)
class ReplicaRow:
    """A row holds one `iteration`, which `took` so many seconds from start to start, if known.

    `microbatches`: by replica, how many it ran. `seconds`: by replica, from its first microbatch to
    the end of its last one on its last rank, before other replicas are waited for. `uses`: by
    replica, of the host of its rank that waits most for a core; None if none does.
    """

    iteration: int
    microbatches: tuple[int, ...]
    seconds: tuple[float, ...]
    uses: tuple[HostUse | None, ...]
    took: float | None = None


class ReplicaSpeeds:
    """A ReplicaSpeeds finds how fast the replicas 0 to `replicas` - 1 are.

    Args:
        replicas: at least 2.
        fill: the seconds that it takes to fill and drain a pipeline, in seconds of a microbatch:
            0 for one stage, stages - 1 for equal ones.

    `each`: by replica, seconds of a microbatch in the last iteration; of two, beside the faster.

    Raises:
        BadInput: too few replicas, or a fill below 0.
    """

    def __init__(self, replicas: int, fill: float = 0.0) -> None:
        if replicas < 2:
            raise BadInput("replicas", replicas, "at least 2: a replica is slow beside others")
        if not 0 <= fill < math.inf:
            raise BadInput("microbatches to fill a pipeline", fill, "a finite number, at least 0")
        self.replicas = replicas
        self._fill = fill
        self._lines: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(replicas)]
        self._outside = Outside(replicas, fill)
        self._workers = SlowWorkers(1, replicas)
        self._rotation = Rotation(ROTATES)
        self._decided: dict[int, float] = {}
        self._found: dict[int, float] = {}
        self._held = 0
        self.each: dict[int, float] = {}

    def update(self, samples: Mapping[int, tuple[float, int]]) -> bool:
        """Take one iteration; return whether the slow replicas are others than planned for.

        Args:
            samples: by replica, the seconds that its microbatches took, and how many there were.
                One may be missing; impossible ones are left out.

        The result stays true until `accept`, or until all is as before. A replica that is slower or
        faster than planned for by less than SLOW times is no change.

        Raises:
            BadInput: there is no such replica.
        """
        for replica in samples:
            if replica not in range(self.replicas):
                raise BadInput("replica", replica, f"0 to {self.replicas - 1}")
        rows = {r: row for r, row in samples.items() if _LEAST < row[0] < _MOST and row[1] >= 1}
        self._outside.update(rows)
        each = {r: self.microbatch(*row) for r, row in rows.items()}
        for replica, seconds in each.items():
            self._lines[replica].append(seconds)
        if each:
            usual = sorted(each.values())[(len(each) - 1) // 2]
            self._rotation.update({r for r, seconds in each.items() if seconds >= APART * usual})
            if self.replicas == 2:
                # No majority shows which one has changed, as where other programs come and go, and
                # counts depend only on the ratio of the two: one is fast or the other slow.
                each = {r: seconds / usual for r, seconds in each.items() if len(each) == 2}
            self._workers.update({r: {_KIND: seconds} for r, seconds in each.items()})
        self.each = each
        found = {r: factor for r, factor in self._workers.slow().items() if factor >= SLOW}
        self._held = self._held + 1 if self._alike(found, self._found) else 1
        self._found = found
        if self._held >= HOLDS and self._alike(found, self._decided):
            self._workers.accept()  # also changes too small to count as slow
        return self._changed()

    def microbatch(self, seconds: float, count: int) -> float:
        """Return the seconds of one microbatch of a replica that ran `count` in `seconds`."""
        outside = min(self._outside.seconds, MOST_OUTSIDE * seconds)
        return (seconds - outside) / (count + self._fill)

    def _now(self) -> dict[int, float]:
        """Return the slow replicas; none while another one is slow every few iterations."""
        return {} if self.moves else self._found

    @property
    def moves(self) -> bool:
        """True while another replica is slow every few iterations."""
        return self._rotation.rotating and self._held < HOLDS_ROTATING

    def _changed(self) -> bool:
        settled = self._held >= HOLDS or self.moves
        return settled and not self._alike(self._now(), self._decided)

    @staticmethod
    def _alike(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
        """Return whether the same replicas are slow in both, and about as slow."""
        return one.keys() == other.keys() and not any(apart(one[r], other[r], SLOW) for r in one)

    @property
    def known(self) -> bool:
        """True once each replica has been measured."""
        return all(self._lines)

    def slow(self) -> dict[int, float]:
        """Return, by slow replica, how many times as long as the others it takes.

        While a change waits for `accept`, they are the new factors, else those planned for.
        """
        return dict(self._now() if self._changed() else self._decided)

    def speeds(self) -> tuple[Speed, ...]:
        """Return, by replica, the speed that is expected in the next iterations.

        Replicas that are not slow all count as the median of them, so that chance moves nothing.

        Raises:
            BadInput: a replica has not been measured yet.
        """
        for replica, line in enumerate(self._lines):
            if not line:
                raise BadInput("replica", replica, "it has to be measured in an iteration")
        now = [median(line) for line in self._lines]
        slow = self.slow()
        usual = median(now[replica] for replica in range(self.replicas) if replica not in slow)
        each = [now[r] if r in slow else usual for r in range(self.replicas)]
        outside = self._outside.seconds
        return tuple(Speed(seconds, outside + self._fill * seconds) for seconds in each)

    def alarms(self) -> list[int]:
        """Return the replicas whose last sample is out of its chart."""
        return [r for r, chart in self._workers.charts.items() if chart.alarm]

    def changes(self) -> list[str]:
        """Describe the changes since `accept`, one text per replica, in words for a decision."""
        if not self._changed():
            return []
        words, found = [], self._now()
        for replica in range(self.replicas):
            now, before = found.get(replica, 1.0), self._decided.get(replica, 1.0)
            if (now == 1) != (before == 1) or apart(now, before, SLOW):
                takes = f"takes {now:.1f} times as long as the others"
                words.append(f"replica {replica} {takes if now != 1 else 'has recovered'}")
        return words

    def note(self) -> str | None:
        """Return, once, a note that nothing helps as slowness moves between replicas; else None."""
        if not self._rotation.to_note():
            return None
        return "another replica is slow in each iteration: each keeps its own microbatches"

    def accept(self) -> None:
        """Note that the plan in force is made for the replicas as they are now."""
        if not self._changed():
            return
        self._decided = dict(self._now())
        if not self.moves:
            self._workers.accept()


class Outside:
    """An Outside finds the seconds of an iteration that do not depend on its microbatches.

    As long as counts stay the same, these cannot be known. When a count changes and the speed does
    not, m and then n microbatches of p seconds take c + p (m + fill) and c + p (n + fill). All
    changes of all replicas count, weighted by the square of m - n: chance then changes c less.

    Args:
        replicas: how many there are.
        fill: see ReplicaSpeeds.
    """

    def __init__(self, replicas: int, fill: float = 0.0) -> None:
        self._fill = fill
        self._rows: list[deque[tuple[float, int]]] = [
            deque(maxlen=2 * AROUND) for _ in range(replicas)
        ]
        self._sum = self._weight = 0.0

    @property
    def seconds(self) -> float:
        """The seconds outside of microbatches; 0 as long as nothing is known."""
        return max(0.0, self._sum / (self._weight + PRIOR))

    def update(self, samples: Mapping[int, tuple[float, int]]) -> None:
        """Take the `samples` of an iteration: by replica, seconds and microbatches."""
        for replica, sample in samples.items():
            rows = self._rows[replica]
            rows.append(sample)
            before, after = list(rows)[:AROUND], list(rows)[AROUND:]
            counts = [{count for _, count in half} for half in (before, after)]
            if len(after) < AROUND or any(len(some) > 1 for some in counts):
                continue
            (m,), (n,) = counts
            if m == n:
                continue
            first, then = median(s for s, _ in before), median(s for s, _ in after)
            constant = (first * (n + self._fill) - then * (m + self._fill)) / (n - m)
            weight = float((n - m) ** 2)
            self._sum += weight * constant
            self._weight += weight
