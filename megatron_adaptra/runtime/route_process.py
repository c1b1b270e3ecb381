"""The search for routes in a process of its own, which shares no interpreter with the training.

It computes for half a second. On a thread of the leader it would hold Python's lock, for which ops
of the leader's rank, and so all other ranks, would wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time

from megatron_adaptra import waits
from megatron_adaptra.errors import RouteSearchFailed
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.package import command

_CHUNK = 1 << 16


class RouteProcess:
    """Started with the first search, and kept for the next ones; one that fails is replaced.

    Of one thread, but for `close`. The kernel ends the process with the thread that has started it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __call__(self, conditions: ReplicaConditions, sends: str, ops: int) -> list[Schedule]:
        """As `plan.route_server.search`, of which this waits `waits.SEARCH` seconds at most.

        Raises:
            RouteSearchFailed: there was no answer, or it was an error.
        """
        request = {"conditions": conditions.to_json(), "sends": sends, "ops": ops}
        try:
            answer = json.loads(self._exchange(json.dumps(request).encode() + b"\n"))
            if "error" in answer:
                raise RouteSearchFailed(answer["error"])
            return [Schedule.parse(text) for text in answer["schedules"]]
        except (OSError, ValueError) as error:
            self._end()
            raise RouteSearchFailed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the process; a search that runs fails."""
        self._closed = True
        self._end()

    def _exchange(self, request: bytes) -> bytes:
        """The line that answers a `request`. Raises OSError.

        The request may be more than the pipe holds, and its reader may have been stopped.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin.fileno(), process.stdout.fileno()
        until, rest, answer = time.monotonic() + waits.SEARCH, memoryview(request), b""
        while rest or not answer.endswith(b"\n"):
            left = until - time.monotonic()
            readable, writable, _ = select.select([back], [to] if rest else [], [], max(0.0, left))
            if left <= 0 or not (readable or writable):
                raise TimeoutError(f"process {process.pid} has not answered in {waits.SEARCH:g} s")
            if writable:
                rest = rest[os.write(to, rest) :]
            if readable:
                part = os.read(back, _CHUNK)
                if not part:
                    raise ConnectionError(f"process {process.pid} has ended")
                answer += part
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise OSError("the training has ended")
        if self._process is None:
            self._process = subprocess.Popen(
                command("megatron_adaptra.plan.route_server"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0,
            )  # fmt: skip
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
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
