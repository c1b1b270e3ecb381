"""A planner in a process of its own, which shares no interpreter with the training.

It computes for up to half a second. On a thread of the leader it would hold Python's lock, for
which ops of the leader's rank, and so all other ranks, would wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PlanningFailed
from megatron_adaptra.base.package import command

_MODULE = "megatron_adaptra.plan.server"
_CHUNK = 1 << 16
_LONGEST = 1 << 28  # bytes of an answer; a longer one is an error

T = TypeVar("T")


class PlanningProcess:
    """A planning process answers requests: one process for all of them, replaced if it fails.

    One thread asks; any may call `close`. The kernel ends the process with the thread that has
    started it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._asking = threading.Lock()  # its holder may close the pipes
        self._number = 0

    def ask(self, request: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Return the answer to a request, for which this waits `waits.SEARCH` seconds at most.

        Args:
            request: as an object for json.dump.
            read: makes the result of the answer; raises an error for a malformed answer.

        Raises:
            PlanningFailed: there was no answer, or it was an error, or nonsense.
        """
        with self._asking:
            try:
                answer = self._answer(request)
                refused = answer.get("error")
                found = read(answer) if refused is None else None
            except Exception as error:
                self._end()
                raise PlanningFailed(f"{type(error).__name__}: {error}") from error
        if found is None:
            raise PlanningFailed(str(refused))
        return found

    def close(self) -> None:
        """End the process; a request that waits for its answer fails."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        if self._asking.acquire(timeout=waits.CLOSE):
            self._end()
            self._asking.release()

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises OSError; for a malformed one others, such as ValueError."""
        number, self._number = self._number, self._number + 1
        line = self._exchange(json.dumps({**request, "number": number}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(line)
        if answer["number"] != number:  # to a request that was given up
            raise ValueError(f"the answer to request {answer['number']}, not {number}")
        return answer

    def _exchange(self, request: bytes) -> bytes:
        """Return the line that answers a `request`. Raises OSError.

        The request may be more than the pipe holds, and its reader may have been stopped.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin.fileno(), process.stdout.fileno()
        until, rest, answer = time.monotonic() + waits.SEARCH, memoryview(request), bytearray()
        while rest or not answer.endswith(b"\n"):
            left = until - time.monotonic()
            readable, writable, _ = select.select([back], [to] if rest else [], [], max(0.0, left))
            if left <= 0 or not (readable or writable):
                raise TimeoutError(f"process {process.pid} has not answered in {waits.SEARCH:g} s")
            if writable:
                try:
                    rest = rest[os.write(to, rest) :]
                except BrokenPipeError as error:
                    raise ConnectionError(f"process {process.pid} has ended") from error
            if readable:
                part = os.read(back, _CHUNK)
                if not part:
                    raise ConnectionError(f"process {process.pid} has ended")
                answer += part
            if len(answer) > _LONGEST:
                raise ConnectionError(f"process {process.pid} answers without end")
        return bytes(answer)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None and not self._closed:
            self._process = subprocess.Popen(
                command(_MODULE),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0,
            )  # fmt: skip
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        if self._closed or self._process is None:  # maybe since it was looked at
            raise OSError("the training has ended")
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for end in (process.stdin, process.stdout):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(waits.CLOSE)
