"""Lost and refused connections of an endpoint: records for telemetry, lines for the log."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_adaptra.base.log import GOES_ON, LogFile, log_line

_MOST = 1000  # events that are kept


@dataclass(frozen=True)
class Event:
    """`at`: monotonic seconds. `rank`: the peer; None for a process that has not proved to be one.

    `what`: "lost", a path has failed; "back", a path carries again; "gone", all that is under way
    with the peer fails; "refused", a path that the peer wanted; "stranger", a process that
    is not of the job was refused, the first one. `side`: where it failed, "here" or "there".
    """

    at: float
    rank: int | None
    what: str
    side: str
    why: str


class Events:
    """An Events keeps the events of rank `me`. `log`: the file of their JSON lines; None for none.

    `last`: the newest events. `strangers`: how many were turned away.
    """

    def __init__(self, me: int, log: Path | None = None) -> None:
        self._me, self._log = me, log
        self._file: LogFile | None = None  # made when there is something to write
        self._lock = threading.Lock()
        self._logged: set[int] = set()
        self._rails = True  # no device has refused one
        self.last: deque[Event] = deque(maxlen=_MOST)
        self.strangers = 0

    def note(self, what: str, rank: int | None, why: str = "", side: str = "there") -> None:
        """Keep an Event of `what`, `rank`, `why`, `side`; the first loss of each peer is logged."""
        with self._lock:
            first = what == "lost" and rank is not None and rank not in self._logged
            if first and rank is not None:
                self._logged.add(rank)
            event = Event(time.monotonic(), rank, what, side, why)
            self.last.append(event)
            if self._log is not None:
                self._file = self._file or LogFile(self._log, "connections")
                known = {"time": time.time(), "of": self._me, **asdict(event)}
                self._file.write(json.dumps(known))
        if first:
            log_line(f"a connection to rank {rank} is lost, {GOES_ON} without it: {why}")

    def no_rail(self, rank: int, why: str) -> None:
        """Log once, since it is tried again, `why` a device opens no path to `rank` over RDMA."""
        with self._lock:
            first, self._rails = self._rails, False
        if first:
            log_line(f"no path to rank {rank} over RDMA, {GOES_ON} without it: {why}")

    def stranger(self, why: str) -> None:
        """Count a connection that was refused because of `why`; the first is noted and logged."""
        self.strangers += 1
        if self.strangers == 1:
            log_line(f"a stranger to this job was turned away, {GOES_ON}: {why}")
            self.note("stranger", None, why)

    def close(self) -> None:
        """Log how many strangers there were, and end the file."""
        if self.strangers > 1:
            log_line(f"{self.strangers} strangers to this job were turned away, {GOES_ON}")
        if self._file is not None:
            self._file.close()
