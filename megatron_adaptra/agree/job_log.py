"""The log of a job: lines that any rank has for people, written by rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base.log import LogFile, log_line

LOOK = 0.2  # seconds between two looks for lines of other ranks
AT_ONCE = 100  # lines that one look takes
PATIENCE = 10.0  # seconds for a line whose number is there, until it is left out
_COUNT = "count"


class JobLog:
    """A job log brings lines for people, and events for a file, from all ranks to rank 0.

    They go through torch's store. A line that does not reach it is written where it was made.

    Args:
        rank: this rank.
        store: torch's, with keys of its own; None where it has failed to open.
        path: of the file to which rank 0 appends events, as JSON lines; None for none.
        write: writes a line for people.
    """

    def __init__(
        self, rank: int, store: KeyValueStore | None, path: Path | None,
        write: Callable[[str], None] = log_line,
    ) -> None:  # fmt: skip
        self._rank, self._store, self._path, self._write = rank, store, path, write
        self._file: LogFile | None = None
        self._read = 0  # lines of others that rank 0 has dealt with
        self._looked = -LOOK
        self._waits_since: float | None = None

    def say(self, line: str, event: Mapping[str, Any] | None = None) -> None:
        """Have rank 0 write a `line`, and append the `event`; on any thread.

        Waits for the store, twice `waits.STORE` seconds at most, on other ranks.
        """
        if self._rank == 0:
            self._take(line, event)
        elif not self._send(json.dumps([line, event])):
            self._write(line)

    def _send(self, text: str) -> bool:
        if self._store is None or (number := self._store.add(_COUNT)) is None:
            return False
        return self._store.put(str(number), text)

    def read(self, last: bool = False) -> None:
        """Write what other ranks have sent; on rank 0, as often as it likes. `last`: now."""
        now = time.monotonic()
        if self._rank or self._store is None or (now < self._looked + LOOK and not last):
            return
        self._looked = now
        count = int(self._store.get(_COUNT) or 0)
        for number in range(self._read + 1, min(count, self._read + AT_ONCE) + 1):
            text = self._store.take(str(number))
            if text is None:  # a number is there before its line
                self._waits_since = self._waits_since or now
                if now < self._waits_since + PATIENCE:
                    return
            self._waits_since, self._read = None, number
            if text is not None:
                self._take(*json.loads(text))

    def close(self) -> None:
        """Write what is there, and end the connection."""
        if self._store is not None:
            self.read(last=True)
            self._store.close()
        if self._file is not None:
            self._file.close()

    def _take(self, line: str, event: Mapping[str, Any] | None) -> None:
        self._write(line)
        if event is None:
            return
        if self._path is not None:
            path, self._path = self._path, None  # tried once
            self._file = LogFile(path, "findings")
        if self._file is not None:
            self._file.write(json.dumps(event))
