"""Processes that end: a child with its parent, and all that a command has started with the command.

Linux knows who descends from whom; elsewhere only the command itself is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILLED = 10.0  # seconds that a killed process may take to go


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `signum` when its parent dies (Linux; else nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))


def become_subreaper() -> None:
    """Inherit the orphans of our descendants: a rank whose torchrun is gone is still ours."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def process_tree() -> dict[int, list[int]]:
    """Return the children of each living process. It looks at all, which takes milliseconds."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    return children


def descendants(pid: int | None = None, tree: Mapping[int, list[int]] | None = None) -> set[int]:
    """The living processes below `pid`; None: below this one. `tree`: a process_tree to look in."""
    children = process_tree() if tree is None else tree
    found: set[int] = set()
    todo = [os.getpid() if pid is None else pid]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """End the block by SystemExit, which cleans up, at SIGTERM, if on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of process `pid` until now; 0 where the kernel gives none."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@contextlib.contextmanager
def started(
    command: Sequence[str], grace: float, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Run `command` in a session of its own; nothing that it has started outlives the block.

    `grace`: seconds between SIGTERM and SIGKILL. `options`: those of subprocess.Popen. A process
    that has lost its parent is found only by a subreaper. Nothing else may start children here
    meanwhile: they would be taken for the command's.
    """
    others = descendants()
    process = subprocess.Popen(
        command,
        start_new_session=True,
        # SIGTERM, for torchrun passes it on to its ranks, which are in sessions of their own.
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
        **options,
    )
    try:
        yield process
    finally:
        _end(process, others, grace)


def _end(process: subprocess.Popen[Any], others: Collection[int], grace: float) -> None:
    for signum, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, _KILLED)):
        deadline = time.monotonic() + patience
        signalled: set[int] = set()
        while left := _left(process, others):
            for pid in left - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            signalled |= left
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not _one_ends(left, seconds):
                break
    process.wait(_KILLED)


def _left(process: subprocess.Popen[Any], others: Collection[int]) -> set[int]:
    own = {process.pid} if process.poll() is None else set()
    return own | descendants().difference(others)


def _one_ends(pids: Collection[int], seconds: float) -> bool:
    """Wait until one of `pids` has ended; return False if none has after `seconds`."""
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            stack.callback(os.close, fd)
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(1e3 * seconds))
