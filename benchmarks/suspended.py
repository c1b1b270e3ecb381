"""Really slow ranks: processes that are suspended for a share of each period (SIGSTOP, SIGCONT)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path


def ranks_of(pid: int) -> Iterator[tuple[int, int]]:
    """Rank and process id of all descendants of `pid` that have a rank."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            parents, at = [], int(entry.name)
            while at > 1:
                at = int(
                    (Path("/proc") / str(at) / "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
                parents.append(at)
        except (OSError, ValueError, IndexError):
            continue
        rank = next((e[5:] for e in environment if e.startswith(b"RANK=")), b"")
        if pid in parents and rank.isdigit():
            yield int(rank), int(entry.name)


def suspend(pids: Sequence[int], over: threading.Event, period: float, share: float) -> None:
    """Let processes run for a `share` of each `period` (seconds) only, until it is `over`.

    All of them run at the end, and it ends when one of them has ended.
    """
    with contextlib.suppress(PermissionError):  # else it wakes late, the later the busier cores are
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    with contextlib.suppress(ProcessLookupError):
        while not over.is_set():
            for word, seconds in (
                (signal.SIGSTOP, period * (1 - share)), (signal.SIGCONT, period * share),
            ):  # fmt: skip
                for pid in pids:
                    os.kill(pid, word)
                over.wait(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
