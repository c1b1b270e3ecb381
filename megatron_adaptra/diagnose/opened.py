"""The findings that are open in a job, as rank 0 learns of them: each fault is one of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_adaptra.diagnose.finding import CLOSED, LATE, OPENED, REPLICA


class _Open(NamedTuple):
    """An open finding: its kind, the ranks where it is, and their replicas."""

    what: str
    ranks: frozenset[int]
    replicas: frozenset[int]


class OpenFindings:
    """An OpenFindings decides which findings of all ranks are new, and knows those that are open.

    A finding is left out, from its opening to its closing, where another one explains it: one of
    the same kind at the same ranks, found by another rank; or, of a late rank, any other finding on
    workers or links of that replica alone. Any thread may call it.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._left_out: set[str] = set()
        self._lock = threading.Lock()

    def takes(self, event: Mapping[str, Any]) -> bool:
        """Return whether the `event` is to be written; others than those of findings are."""
        if event.get("kind") != "finding":
            return True
        name, state, places = event["id"], event["state"], event["where"]
        one = _Open(
            event["what"],
            frozenset(place["rank"] for place in places),
            frozenset(int(p["worker"].partition(".")[0]) for p in places if p["worker"]),
        )
        with self._lock:
            if state == OPENED and self._explained(one):
                self._left_out.add(name)
            left_out = name in self._left_out
            if state == CLOSED:
                self._left_out.discard(name)
                self._open.pop(name, None)
            elif not left_out:
                self._open[name] = one
        return not left_out

    def explains(self, replica: int) -> tuple[str, ...]:
        """Return the names of open findings on workers or links of this `replica` alone."""
        with self._lock:
            found = [
                name for name, one in self._open.items()
                if one.what not in (LATE, REPLICA) and one.replicas == {replica}
            ]  # fmt: skip
        return tuple(found)

    def _explained(self, one: _Open) -> bool:
        for other in self._open.values():
            if (other.what, other.ranks) == (one.what, one.ranks):
                return True
            if one.what == LATE and other.what != LATE and other.replicas == one.replicas:
                return True
        return False
