"""The log of the package: lines on standard error, and lines of a file.

A line that cannot be written is lost: it neither ends nor holds up the caller.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PATIENCE = 2.0  # seconds that a line waits for a reader of standard error who has stopped
_ATOMIC = 4096  # bytes that a pipe takes as a whole, without waiting, once it is ready
_WAITING = 1000  # lines that wait for a disk
GOES_ON = "training goes on"  # in a line that is no reason why a training has ended
_CLOSE = 10.0  # seconds that `close` waits for a disk

_stuck = False  # nobody reads standard error: no line waits again until one has got through


def log_line(text: str) -> None:
    """Write `text` as one line, whole even when many ranks write at once; never raises OSError.

    Waits two seconds at most, and only the first time that nobody reads.
    """
    global _stuck
    if sys.__stderr__ is None:  # closed at the start: descriptor 2 is something else's by now
        return
    left = f"adaptra: {text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):
        ready = select.poll()
        ready.register(2, select.POLLOUT)
        end = time.monotonic() + (0.0 if _stuck else _PATIENCE)
        while left and ready.poll(max(0.0, 1e3 * (end - time.monotonic()))):
            with contextlib.suppress(BlockingIOError):  # another rank was faster
                left = left[os.write(2, left[:_ATOMIC]) :]
    _stuck = bool(left)


class LogOnce:
    """A once-only log writes each text once, if this process `speaks`, as that of rank 0 does."""

    def __init__(self, speaks: bool = True) -> None:
        self._speaks, self._written = speaks, set[str]()

    def line(
        self,
        text: str,
        more: str = "",
        write: Callable[[str], None] | None = None,
        about: str = "",
    ) -> None:
        """Write `text` as a line, and `more`, unless `text` has been written; by `write` if any.

        `about`: the subject, of which one text is enough whatever its figures; "" for the text.
        """
        if self._speaks and (about or text) not in self._written:
            self._written.add(about or text)
            (write or log_line)(text + more)


class LogFile:
    """A log file appends lines at `path`, in a thread of its own: a disk may hang, or be full.

    The file is opened at once, as a trial, and again for every line. Lines that cannot be written
    are lost, and standard error gets one line on that, which calls them `what`. A file of more than
    `most` bytes is replaced by those of its lines that `shorten` leaves; no other process may write
    to it then.
    """

    def __init__(
        self,
        path: Path,
        what: str,
        most: int = 0,
        shorten: Callable[[list[bytes]], list[bytes]] | None = None,
    ) -> None:
        self._path, self._what = path, what
        self._most, self._shorten = most, shorten
        with contextlib.suppress(OSError):  # the script that trains may go to another folder
            self._path = path.absolute()
        self._lines: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._lines.put(b"")
        self._thread = threading.Thread(target=self._run, name="adaptra-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Append `line` soon; nothing if a thousand lines wait already."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(f"{line}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Wait, ten seconds at most, until all lines are written."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_CLOSE)

    def _run(self) -> None:
        reported = False
        while (line := self._lines.get()) is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                if not line and self._shorten is not None:  # at first: of a job that was killed
                    self._partial.unlink(missing_ok=True)
                # A FIFO is not waited for.
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(self._path, flags, 0o666)
                try:
                    # Else another job's line under way would be taken for one of a full disk.
                    self._lock(fd, fcntl.LOCK_EX)
                    size = os.fstat(fd).st_size
                    if line and size and os.pread(fd, 1, size - 1) != b"\n":  # a disk was full
                        line = b"\n" + line
                    size += len(line)
                    while line:
                        line = line[os.write(fd, line) :]
                    if self._shorten is not None and size > self._most:
                        self._replace(self._shorten(self._path.read_bytes().splitlines(True)))
                finally:
                    self._lock(fd, fcntl.LOCK_UN)  # closing does not, when a fork has it too
                    os.close(fd)
            except (OSError, ValueError) as error:  # ValueError: no name of a file
                if not reported:
                    reason = getattr(error, "strerror", None) or error
                    log_line(f"{self._what} cannot be logged in {str(self._path)!r}: {reason}")
                reported = True

    def _replace(self, lines: list[bytes]) -> None:
        """Replace the whole file at once: a reader sees the old lines or the new ones."""
        self._partial.write_bytes(b"".join(lines))
        os.replace(self._partial, self._path)

    @property
    def _partial(self) -> Path:
        return self._path.with_name(f".{self._path.name}.partial")

    @staticmethod
    def _lock(fd: int, how: int) -> None:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(fd, how)
