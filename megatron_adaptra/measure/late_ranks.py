"""Late ranks of a data-parallel group, and slow paths between its ranks: which, and how much.

Changes are found with the chart, gate and confirmation of links, and count only once most of the
last iterations agree: a plan for a late rank pays only if that rank stays late for long. Lateness
that moves from rank to rank is counted for none of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.measure.arrivals import Pair, Seen, after_the_first, arrivals, by_path
from megatron_adaptra.measure.detect import ABSOLUTE, DelayChart
from megatron_adaptra.measure.rotation import Rotation
from megatron_adaptra.measure.statistics import Floats, medians

WINDOW = 8  # the last iterations, ...
AGREE = 6  # ... of which so many have to agree about a rank
_TRIPS = 5  # last round trips, whose median, or least one, is the path's
_PATHS = 256  # paths watched in one iteration, about: 3 ms of a core


class LateRanks:
    """A detector watches ranks 0 to `ranks` - 1 of a group.

    `now`: by rank, the seconds by which it came late by its own fault to the last reduction.
    `buffer`: seconds of that buffer through a port. `rotation`: more iterations have to agree while
    lateness moves from rank to rank.

    Raises:
        BadInput: fewer than two ranks.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 2:
            raise BadInput("ranks", ranks, "at least 2: a rank is late for another one")
        self.ranks = ranks
        self.buffer, self._turn = 0.0, 0
        self.now: dict[int, float] = {}
        self._own = OwnLateness()
        self._late = [Watched() for _ in range(ranks)]
        self._paths: dict[Pair, Watched] = {}
        # Seconds of the last message [source, target], of the last round trips [one, other, n], and
        # of one on a path that is well; nan, nan and inf where there was none yet.
        self._recent = np.full((ranks, ranks), np.nan)
        self._trips = np.full((ranks, ranks, _TRIPS), np.nan)
        self._least = np.full((ranks, ranks), np.inf)
        self.rotation = Rotation()

    def update(self, seen: Seen, buffer: float, between: Mapping[int, float] | None = None) -> bool:
        """Take one iteration; return whether lateness or a path is no longer as planned for.

        Args:
            seen: by receiver and source, the seconds from the receiver's own arrival until the
                message came; below 0 where it had come before. Some may be missing; those of
                unknown ranks, and impossible ones, are left out.
            buffer: seconds of the buffer through a port; lateness that is small beside them means
                nothing.
            between: by rank, the seconds from the end of the last all-reduce there to its arrival,
                which show its own lateness; None where ends are not known.

        The result stays true until `accept`, or until all is as before.

        Raises:
            BadInput: a buffer that takes no time.
        """
        if not buffer > 0:
            raise BadInput("seconds of a buffer", buffer, "above 0")
        self.buffer = buffer
        now = arrivals(by_path(seen, self.ranks), self._least, self._recent)
        self._take_trips(now.round_trips)
        late_now = now.late
        if between is not None:
            late_now = self._own.of(now.late, between, ABSOLUTE * buffer, now.doubts)
        self.rotation.update({r for r, late in late_now.items() if late > ABSOLUTE * buffer})
        least = 2 * AGREE if self.rotation.rotating else AGREE
        self.now = late_now
        for rank, late in late_now.items():
            self._late[rank].update(late, buffer, least)
        self._look_at(now.delays)
        return any(one.changed for one in self._all())

    def _look_at(self, delays: Floats) -> None:
        """Watch the paths with `delays`: in a large group about _PATHS at a time, by turns."""
        seen = ~np.isnan(delays)
        self._recent[seen] = delays[seen]
        common = medians(delays.ravel())
        ways = np.flatnonzero(seen)
        turns = max(1, -(-len(ways) // _PATHS))
        self._turn += 1
        for way in ways[ways % turns == self._turn % turns].tolist():
            path = self._paths.setdefault(divmod(way, self.ranks), Watched())
            more = max(0.0, (delays.flat[way] - common).item())
            path.update(more, self.buffer, AGREE)

    def _all(self) -> list[Watched]:
        return [*self._late, *self._paths.values()]

    def _take_trips(self, now: Floats) -> None:
        """Take round trips; those of a healthy path are the least median, which only decreases."""
        took = ~np.isnan(now)
        self._trips[took] = np.column_stack([self._trips[took, 1:], now[took]])
        enough = ~np.isnan(self._trips[..., 0])
        self._least[enough] = np.minimum(self._least, medians(self._trips))[enough]

    def late(self) -> tuple[float, ...]:
        """Return, by rank, the seconds that it comes after the first one; 0 for one in time."""
        return tuple(one.value for one in self._late)

    def slow_paths(self) -> dict[Pair, float]:
        """Return, by source and target, the seconds beyond an ordinary path's that matter."""
        return {way: path.value for way, path in sorted(self._paths.items()) if path.value}

    def delay(self) -> float:
        """Return the seconds of a message on an ordinary path; 0 until one was measured.

        They are half of a path's least round trip lately: a rank that waits for a core sees
        messages late, but none before it has come. The excess of the median trip over the least one
        is in doubt, and deducted from it.
        """
        trips = self._trips[~np.isnan(self._trips[..., -1])]
        certain = np.maximum(0.0, 2 * np.fmin.reduce(trips, axis=-1) - medians(trips))
        return float(np.median(certain)) / 2 if len(certain) else 0.0

    def alarms(self) -> list[int]:
        """Return the ranks whose last sample is out of its chart."""
        return [rank for rank, one in enumerate(self._late) if one.chart.alarm]

    def changes(self, names: Sequence[int]) -> list[str]:
        """Describe the changes since the last `accept`, for a decision; `names`: global ranks."""
        found = []
        for rank, one in enumerate(self._late):
            if one.changed:
                words = f"comes {1e3 * one.value:.0f} ms late" if one.value else "comes in time"
                found.append(f"rank {names[rank]} {words}")
        for (a, b), path in sorted(self._paths.items()):
            if path.changed:
                words = f"{1e3 * path.value:.0f} ms more than" if path.value else "as long as"
                found.append(f"path {names[a]}>{names[b]} takes {words} others")
        return found

    def note(self) -> str | None:
        """Return, once, a note that lateness moves and no plan helps against that; else None."""
        if not self.rotation.to_note():
            return None
        return "another rank is late in each iteration: no plan helps, gradients stay with native"

    def accept(self) -> None:
        """Note that the plan in force is made for the changes, too."""
        for one in self._all():
            one.accept(self.buffer)


class Watched:
    """A watch follows the lateness of one rank or the excess of one path: seconds per iteration."""

    def __init__(self) -> None:
        self.chart = DelayChart()
        self.named = 0.0  # seconds planned for
        self.changed = False  # whether they have changed for good
        self.value = 0.0  # seconds now
        self._samples: deque[float] = deque(maxlen=2 * WINDOW)

    def update(self, seconds: float, buffer: float, agree: int) -> None:
        """Take `seconds`; a change counts if `agree` of the last samples support it.

        `buffer`: seconds; what is small beside them means nothing.
        """
        self._samples.append(seconds)
        confirmed = self.chart.update(seconds, buffer)
        self.changed, self.value = False, self.named
        if not confirmed:
            return
        new = median(self.chart.outside)
        new = new if new >= ABSOLUTE * buffer else 0.0
        window = list(self._samples)[-WINDOW * agree // AGREE :]
        speak = sum(abs(s - new) < abs(s - self.named) for s in window)
        if speak >= agree and new != self.named:
            self.changed, self.value = True, new

    def accept(self, buffer: float) -> None:
        """Take the present value as the one planned for. `buffer`: see `update`."""
        if self.changed:
            self.chart.accept(buffer)
            self.named, self.changed = self.value, False


class OwnLateness:
    """A filter finds each rank's own lateness, without what the last all-reduce has caused.

    A rank for which an all-reduce ends later comes later to the next one, and under another plan it
    does not. So its own lateness is the time that it takes longer than others between two
    all-reduces. But where ranks wait for each other in between, for the mean of a loss, that time
    includes the wait, and their own lateness is what shows at the next arrival. Both follow from
    the same seconds; the one that stays the same when all-reduces end at other times shows whether
    a program has such waits.

    `free`: True where ranks seem not to wait for each other between all-reduces.
    """

    def __init__(self) -> None:
        self.free = False
        self._evidence = 0.0  # seconds; above 0 where ranks are free
        # Of the last iteration, by rank: its lateness, if certain, and its seconds in between.
        self._last: tuple[dict[int, float], dict[int, float]] = ({}, {})

    def of(
        self,
        came: Mapping[int, float],
        between: Mapping[int, float],
        matters: float,
        doubts: Mapping[int, float],
    ) -> dict[int, float]:
        """Return, by rank, its own seconds after the first ranks in one iteration.

        Args:
            came: by rank, the seconds that it came after the first ones.
            between: by rank, the seconds from the end of the last all-reduce there to its arrival.
            matters: seconds; changes by less are chance.
            doubts: by rank, the seconds by which `came` may be wrong, as where messages waited for
                a core. A rank with more than `matters` is not used to find out who is `free`.
        """
        took = after_the_first({rank: between[rank] for rank in came if rank in between})
        sure = {rank: late for rank, late in came.items() if doubts.get(rank, 0.0) <= matters}
        self._compare(sure, took, matters)
        self._last = sure, took
        if self.free:
            return {rank: took.get(rank, late) for rank, late in came.items()}
        return {rank: min(late, took.get(rank, late)) for rank, late in came.items()}

    def _compare(
        self, came: Mapping[int, float], took: Mapping[int, float], matters: float
    ) -> None:
        """Update `free`: a rank that gets late changes both, another all-reduce end only one."""
        came_before, took_before = self._last
        ranks = came.keys() & came_before.keys() & took.keys() & took_before.keys()
        came_by, took_by = (
            sum(x for r in ranks if (x := abs(now[r] - before[r])) > matters)
            for now, before in ((came, came_before), (took, took_before))
        )
        limit = 2 * matters  # so that one all-reduce that ends very differently shows it
        self._evidence = max(-limit, min(limit, self._evidence + came_by - took_by))
        if abs(self._evidence) > matters:  # else as before
            self.free = self._evidence > 0
