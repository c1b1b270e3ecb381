"""Failure logs, in which ranks record who was lost, so that all of them name the culprit."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base import waits


class FailureLog:
    """A failure log keeps the first entry of a job, in torch's store, which outlives a dead rank.

    Without a `store` it keeps that of one process. It never raises. HangWatch has entries of
    its own in the same `store`: one more connection of each rank would be many for a large job.
    """

    def __init__(self, store: KeyValueStore | None = None) -> None:
        self.store, self._text = store, ""
        self._visible_pids: Mapping[int, int] = {}
        self._serial = 0

    @classmethod
    def shared(cls) -> FailureLog:
        """Make the log of all ranks of this job."""
        return cls(KeyValueStore("adaptra/failure_log/"))

    def connected(self, serial: int, visible_pids: Mapping[int, int]) -> None:
        """Begin a log, as the ranks have connected to each other for the `serial`-th time.

        `visible_pids`: process ids, by global rank, of the processes that this one can see: a death
        among them is reported.
        """
        self._serial, self._visible_pids = serial, visible_pids

    def close(self) -> None:
        """End the connection; from now on this rank writes and reads its own entries alone."""
        if self.store is not None:
            self.store.close()

    def write(self, text: str) -> None:
        """Write `text`, one sentence, unless there is an entry already.

        Waits for the store for two seconds at most.
        """
        self._text = self._text or text
        if self.store is not None:
            self.store.put_first(f"{self._serial}/first", text)

    def read(self) -> str:
        """Return the first entry of any rank, or an empty string.

        It is this one's own if the store is silent for 2 s.
        """
        found = None if self.store is None else self.store.get(f"{self._serial}/first")
        return found or self._text

    def missing(self) -> dict[str, list[int]]:
        """Return the ranks here whose process "died" (or is ending), or is "stopped"."""
        found: dict[str, list[int]] = {}
        for rank, pid in self._visible_pids.items():
            if state := state_of(pid):
                found.setdefault(state, []).append(rank)
        return found

    def end_of_waits(self, rank: int, peer: int, text: str, seconds: float) -> str:
        """Return the text of the last rank in a chain: `rank` waits for `peer`, that for a third.

        `text`: that of `rank`. The others have `seconds` to write theirs, since ranks that wait
        for the same culprit did not begin at the same moment.
        """
        if self.store is None:
            return text
        self.store.put(f"{self._serial}/waits/{rank}", json.dumps([peer, text]))
        end, passed = time.monotonic() + seconds, {rank}
        while time.monotonic() < end and peer not in passed and not self.read():
            found = self.store.get(f"{self._serial}/waits/{peer}")
            if found is None:
                time.sleep(waits.LOOK_UP)  # torch's own wait for a key complains on stderr
                continue
            passed.add(peer)
            peer, text = json.loads(found)
        return text


_PF_EXITING = 4  # of the kernel's process flags: set before a process that ends closes its sockets


def state_of(pid: int) -> str:
    """Return why process `pid` does nothing, "died" or "stopped"; empty for one that may run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, flags = fields[0], int(fields[6])
    except (OSError, IndexError):
        return "died"
    if state in ("Z", "X") or flags & _PF_EXITING:
        return "died"
    return "stopped" if state in ("T", "t") else ""
