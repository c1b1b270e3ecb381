"""The findings that are open in a job, as rank 0 learns of them: each fault gets one line."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_adaptra.diagnose.finding import (
    CHANGED,
    CLOSED,
    GARBAGE,
    HOST,
    LATE,
    REPLICA,
    WORKER,
)

# Iterations for which a finding that is closed still explains others: they need some, too, to be
# sure that all is well.
EXPLAINED = 8
# Iterations for which a late rank has no line yet: who is late is often known sooner than why.
HELD = 4
_ITERATION_MS = 1e3  # where a finding does not know what an iteration takes

Event = Mapping[str, Any]


class _Open(NamedTuple):
    """An open finding: its kind, its ranks, their replicas, what it is about, and beside what.

    Findings of one kind `about` the same are one: a busy host is found by several leaders, each
    with ranks of its own, and garbage is collected by the whole job.
    """

    what: str
    ranks: frozenset[int]
    replicas: frozenset[int]
    about: frozenset[Any]
    beside: str

    @classmethod
    def of(cls, event: Event) -> _Open:
        what, places = event["what"], event["where"]
        ranks = frozenset(place["rank"] for place in places)
        about: frozenset[Any] = ranks
        if what == HOST:
            about = frozenset(place["host"] for place in places)
        elif what == GARBAGE:
            about = frozenset()
        workers = [place["worker"] for place in places if place["worker"]]
        replicas = frozenset(int(worker.partition(".")[0]) for worker in workers)
        return cls(what, ranks, replicas, about, event["beside"])


class _LeftOut(NamedTuple):
    """A _LeftOut keeps the line and event of a finding that the one named `because` explains.

    `because`: "" while none does, but one may soon. `ended`: when that one was first seen to be
    open no more, or this one to be held, in seconds of a clock; None: not yet.
    """

    line: str
    event: Event
    because: str
    ended: float | None = None


class OpenFindings:
    """An OpenFindings decides which findings of all ranks get a line, and knows the open ones.

    A finding gets none while another one explains it: one of the same kind about the same, found by
    another rank; of a late rank, any other finding on workers or links of that replica alone; of a
    slow replica, that all its workers are; of its only worker, that the replica is. Events name the
    other one (`because`). A late rank that none explains is held for HELD iterations, as its reason
    may be found meanwhile; if it recovers in them nothing is written. Any thread may call it.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._left_out: dict[str, _LeftOut] = {}
        self._lock = threading.Lock()

    def see(self, line: str, event: Event) -> tuple[str, Event | None]:
        """Return the `line` and the `event` of a finding as they are to be written.

        "": no line; None: no event.
        """
        with self._lock:
            return self._see(line, event)

    def unexplained(self, now: float, last: bool = False) -> list[tuple[str, Event]]:
        """Return the lines and events of findings that no other one explains any more.

        Args:
            now: seconds of a clock; a finding explains others for EXPLAINED iterations after its
                end.
            last: no reason can be found any more.
        """
        over = []
        with self._lock:
            for name, left in self._left_out.items():
                iteration = (left.event["iteration_ms"] or _ITERATION_MS) / 1e3
                if not left.because:
                    since = now if left.ended is None else left.ended
                    self._left_out[name] = left._replace(ended=since)
                    if last or now >= since + HELD * iteration:
                        over.append((left.line, left.event))
                elif left.because in self._open:
                    self._left_out[name] = left._replace(ended=None)
                elif left.ended is None:
                    self._left_out[name] = left._replace(ended=now)
                elif now >= left.ended + EXPLAINED * iteration:
                    over.append((left.line, {**left.event, "state": CHANGED}))
            seen = [self._see(line, event, over=True) for line, event in over]
            return [(line, event) for line, event in seen if event is not None]

    def explains(self, replica: int) -> tuple[str, ...]:
        """Return the names of open findings on workers or links of this `replica` alone."""
        with self._lock:
            found = [
                name for name, one in self._open.items()
                if one.what not in (LATE, REPLICA) and one.replicas == {replica}
            ]  # fmt: skip
        return tuple(found)

    def _see(self, line: str, event: Event, over: bool = False) -> tuple[str, Event | None]:
        """Open, close or leave out a finding. `over`: there is no more waiting for its reason."""
        name, one = event["id"], _Open.of(event)
        left = self._left_out.get(name)
        if event["state"] == CLOSED:
            self._open.pop(name, None)
            self._left_out.pop(name, None)
            if left is None:
                return line, event
            return "", _because(event, left.because) if left.because else None
        if name not in self._open:
            if because := self._explanation(name, one):
                self._left_out[name] = _LeftOut(line, event, because)
                return "", _because(event, because)
            if one.what == LATE and not over and (left is None or not left.because):
                self._left_out[name] = left or _LeftOut(line, event, "")
                return "", None
        self._left_out.pop(name, None)
        self._open[name] = one
        return line, event

    def _explanation(self, name: str, one: _Open) -> str:
        slow: dict[int, str] = {}  # by rank, the finding that its worker is slow
        for other_name, other in list(self._open.items()):
            if (other.what, other.about) == (one.what, one.about):
                if _by(name) and _by(name) == _by(other_name) and one.beside == other.beside:
                    del self._open[other_name]  # its end did not reach this rank
                    continue
                return other_name
            same = other.replicas == one.replicas
            if one.what == LATE and other.what != LATE and same:
                return other_name
            if one.what == WORKER and other.what == REPLICA and one.ranks == other.ranks:
                return other_name
            if other.what == WORKER:
                slow |= dict.fromkeys(other.ranks, other_name)
        return slow[min(one.ranks)] if one.what == REPLICA and one.ranks <= slow.keys() else ""


def _because(event: Event, name: str) -> Event:
    return {**event, "because": [name]}


def _by(name: str) -> int:
    """Return the rank that has found the finding of this `name`."""
    return int(name.partition("-")[0])
