"""Where ranks write down who was lost, so that all of them name the culprit."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

_STORE_TIMEOUT = 2.0  # seconds to wait for the key-value store, which may have died, too


class FailureLog:
    """A log of one process alone; SharedFailureLog is that of a job. The first entry stays."""

    def __init__(self) -> None:
        self._text = ""

    def write(self, text: str) -> None:
        """Write `text`, one sentence, unless there is an entry already."""
        self._text = self._text or text

    def read(self) -> str:
        """The entry, or an empty string."""
        return self._text

    def dead_ranks(self) -> list[int]:
        """Global ranks that are known to have died."""
        return []


class SharedFailureLog(FailureLog):
    """In torch's key-value store, which outlives a dead rank. Reading and writing never raise.

    Every rank enters its process when it makes its log, so that the ranks of one machine can tell
    which of them has died. `machine`: the same for ranks that see each other's processes.
    """

    def __init__(self, machine: str) -> None:
        super().__init__()
        self._machine, self._ranks = machine, range(dist.get_world_size())
        store = dist.distributed_c10d._get_default_store().clone()
        self._store = dist.PrefixStore("adaptra/failure_log", store)
        self._store.set(f"process/{dist.get_rank()}", f"{machine} {os.getpid()}")
        self._pids: dict[int, int] = {}  # by global rank, of this machine

    def exchange_pids(self) -> None:
        """Learn the processes of the other ranks, which have to make their logs meanwhile.

        Raises what the store raises after its own timeout.
        """
        for rank in self._ranks:
            machine, _, pid = self._store.get(f"process/{rank}").decode().rpartition(" ")
            if machine == self._machine:
                self._pids[rank] = int(pid)

    def write(self, text: str) -> None:
        """As FailureLog writes `text`; waits for the store for two seconds at most."""
        super().write(text)
        _within(_STORE_TIMEOUT, lambda: self._store.compare_set("first", "", text))

    def read(self) -> str:
        """The first entry of any rank; this one's own if the store does not answer in 2 seconds."""
        found: list[str] = []

        def look() -> None:
            if self._store.check(["first"]):
                found.append(self._store.get("first").decode())

        _within(_STORE_TIMEOUT, look)
        return found[0] if found else super().read()

    def dead_ranks(self) -> list[int]:
        """Ranks of this machine whose process has ended, or is ending."""
        return [rank for rank, pid in self._pids.items() if not _alive(pid)]


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Run `action`, but do not wait for it any longer than that."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


_PF_EXITING = 4  # of the kernel's process flags: set before a process that ends closes its sockets


def _alive(pid: int) -> bool:
    """Whether a process runs; one that is ending, or has ended and was not collected, does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, flags = fields[0], int(fields[6])
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X") and not flags & _PF_EXITING
