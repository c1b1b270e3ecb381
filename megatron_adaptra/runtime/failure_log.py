"""A failure_log that all ranks share: torch's key-value store, which outlives a dead rank."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_adaptra.runtime.watchdog import FailureLog

_PATIENCE = 2.0  # seconds; the store may have died too


class SharedFailureLog(FailureLog):
    """The first word written stays. Never raises, never blocks for long.

    Every rank enters its process when it makes its log, so that the ranks of one machine can
    tell which of them has died.
    """

    def __init__(self, machine: str) -> None:
        super().__init__()
        self._machine = machine
        store = dist.distributed_c10d._get_default_store().clone()
        self._store = dist.PrefixStore("adaptra/failure_log", store)
        self._store.set(f"process/{dist.get_rank()}", f"{machine} {os.getpid()}")
        self._processes: dict[int, int] = {}

    def meet(self) -> None:
        """Learn the processes of the other ranks; after all have made their failure_log."""
        for rank in range(dist.get_world_size()):
            machine, _, process = self._store.get(f"process/{rank}").decode().rpartition(" ")
            if machine == self._machine:
                self._processes[rank] = int(process)

    def write(self, text: str) -> None:
        super().write(text)
        _within(_PATIENCE, lambda: self._store.compare_set("first", "", text))

    def read(self) -> str:
        found: list[str] = []

        def look() -> None:
            if self._store.check(["first"]):
                found.append(self._store.get("first").decode())

        _within(_PATIENCE, look)
        return found[0] if found else super().read()

    def gone(self) -> list[int]:
        return [rank for rank, process in self._processes.items() if not _alive(process)]


def _within(seconds: float, action: Callable[[], object]) -> None:
    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


_PF_EXITING = 4  # of the kernel's process flags: set before a process that ends closes its sockets


def _alive(process: int) -> bool:
    """Whether a process runs; one that is ending, or has ended and was not collected, does not."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        state, flags = fields[0], int(fields[6])
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X") and not flags & _PF_EXITING
