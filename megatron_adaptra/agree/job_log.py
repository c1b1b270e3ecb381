"""The log of a job: lines that any rank has for people, written by rank 0."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base import waits
from megatron_adaptra.base.log import LogFile, LogOnce, log_line
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.opened import OpenFindings

LOOK = 0.25  # seconds between two looks for lines of other ranks ...
LONGEST_LOOK = 60.0  # ... doubled up to these while the store does not answer
PATIENCE = 10.0  # seconds for a line whose number is there, until it is left out
_COUNT = "count"
_serials = itertools.count()  # of the logs of this process, which may activate the plugin again


class JobLog:
    """A job log brings lines for people, and events for a file, from all ranks to rank 0.

    They go through torch's store; on rank 0 a thread looks for them. A line that does not reach the
    store, or comes once this rank closes, is written where it was made. So do texts that are shown:
    of each key the last one.

    Args:
        rank: this rank.
        connect: connects to torch's store, for keys of this log alone, once it is needed; None to
            write each line where it is made.
        path: of the file to which rank 0 appends events, as JSON lines; None for none.
        write: writes a line for people.

    `open`: on rank 0, the findings of all ranks; of one that another explains the event is written,
    and no line. `each_look`: is called on the thread of rank 0 after each look; None for nothing.
    """

    def __init__(
        self, rank: int, connect: Callable[[], KeyValueStore] | None, path: Path | None,
        write: Callable[[str], None] = log_line,
    ) -> None:  # fmt: skip
        self._rank, self._connect, self._path, self._write = rank, connect, path, write
        self.open, self._numbers = OpenFindings(), itertools.count()
        self.each_look: Callable[[], None] | None = None
        self._shown: dict[str, str] = {}  # on rank 0, its own
        self._connected: KeyValueStore | None = None
        self._file: LogFile | None = None
        self._once = LogOnce()
        self._read = 0  # lines of others that rank 0 has dealt with
        self._missing: dict[int, float] = {}  # numbers without a line, and since when
        self._closing = threading.Event()
        self._one, self._writing = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None

    @classmethod
    def started(cls, rank: int, path: Path | None) -> JobLog:
        """Make the log of this rank, and look for lines of other ranks if that is rank 0.

        All ranks call it equally often: each log has keys of its own in the store.
        """
        prefix = f"adaptra/lines/{next(_serials)}/"
        log = cls(rank, lambda: KeyValueStore(prefix), path)
        log.start()
        return log

    def start(self) -> None:
        """Begin to look for lines of other ranks, on rank 0."""
        if self._rank == 0:
            self._thread = threading.Thread(target=self._look, name="adaptra-lines", daemon=True)
            self._thread.start()

    def say(self, line: str, event: Mapping[str, Any] | None = None, once: bool = False) -> None:
        """Have rank 0 write a `line`, "" for none, and append the `event`; on any thread.

        `once`: it is not written again where some rank has had it written in this way.
        Waits for the store, four times `waits.STORE` seconds at most, on other ranks.
        """
        if self._rank == 0:
            self._take(line, event, once)
        elif self._closing.is_set() or not self._send(json.dumps([line, event, once])):
            self._write_line(line, once=False)

    def new_book(self, first: int = 0) -> FindingBook:
        """Make a book of findings of this rank, which are written here; `first`: see there."""
        return FindingBook(self._rank, self.say, self._numbers, first)

    def show(self, key: str, text: str) -> bool:
        """Show rank 0 a `text` under a `key` of this rank's; return whether it has got there.

        Waits as `say` does.
        """
        if self._rank == 0:
            self._shown[key] = text
            return True
        store = None if self._closing.is_set() else self._store()
        return store is not None and store.put(f"shown/{key}", text)

    def shown(self, keys: Iterable[str]) -> dict[str, str] | None:
        """Return, on rank 0, the texts of those of `keys` that have one; waits for the store.

        None where it does not answer.
        """
        own = {key: self._shown[key] for key in keys if key in self._shown}
        names = {f"shown/{key}": key for key in keys if key not in own}
        if not names:
            return own
        if (store := self._store()) is None or (found := store.get_all(names)) is None:
            return None
        return own | {names[name]: text for name, text in found.items()}

    def end_here(self) -> None:
        """Write what is still to come where it is made: rank 0 may look for nothing any more.

        Rank 0 itself looks until `close`.
        """
        if self._rank:
            self._closing.set()

    def close(self) -> None:
        """End the thread and the connection; write what other ranks have sent until now."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(waits.CLOSE)
        if self._connected is not None:
            self._connected.close()
        if self._file is not None:
            self._file.close()

    def _send(self, text: str) -> bool:
        store = self._store()
        if store is None or (number := store.add(_COUNT)) is None:
            return False
        return store.put(str(number), text)

    def _store(self) -> KeyValueStore | None:
        with self._one:
            if self._connected is None and self._connect is not None:
                try:
                    self._connected = self._connect()
                except Exception:
                    return None
            return self._connected

    def _write_line(self, line: str, once: bool) -> None:
        if once:
            self._once.line(line, write=self._write)
        elif line:
            self._write(line)

    # On the thread of rank 0.

    def _look(self) -> None:
        pause = LOOK
        while True:
            last = self._closing.wait(pause)
            began = time.monotonic()
            try:
                self._take_sent(last)
                with self._writing:
                    for line, event in self.open.unexplained(began, last):
                        self._put(line, event)
                answers = time.monotonic() < began + waits.STORE
                if self.each_look is not None:
                    self.each_look()
            except Exception as error:
                log_line(f"lines of other ranks are not written any more: {error!r}")
                return
            if last:
                return
            pause = LOOK if answers else min(2 * pause, LONGEST_LOOK)

    def _take_sent(self, last: bool) -> None:
        """Write the lines that are there, in their order; `last`: wait for none that is missing."""
        if (store := self._store()) is None:
            return
        numbers = range(self._read + 1, int(store.get(_COUNT) or 0) + 1)
        if not numbers or (found := store.get_all(map(str, numbers))) is None:
            return
        now = time.monotonic()
        for number in numbers:
            if str(number) not in found:  # a number is there before its line
                self._missing.setdefault(number, now)
        for number in numbers:
            text = found.get(str(number))
            if text is None and not last and now < self._missing[number] + PATIENCE:
                return
            self._missing.pop(number, None)
            self._read = number
            if text is not None:
                store.delete(str(number))
                self._take(*json.loads(text))

    def _take(self, line: str, event: Mapping[str, Any] | None, once: bool) -> None:
        with self._writing:
            if event is not None and event.get("kind") == "finding":
                line, event = self.open.see(line, event)
            self._put(line, event, once)

    def _put(self, line: str, event: Mapping[str, Any] | None, once: bool = False) -> None:
        self._write_line(line, once)
        if event is None:
            return
        if self._path is not None:
            path, self._path = self._path, None  # tried once
            self._file = LogFile(path, "findings")
        if self._file is not None:
            self._file.write(json.dumps(event))
