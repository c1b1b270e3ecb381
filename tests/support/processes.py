"""Processes of a test that live on, found by a word on their command line."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def living(mark: str) -> dict[int, str]:
    """Process -> its RANK (empty without one) of all whose command line has the mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if mark in (entry / "cmdline").read_text() and state != "Z":
                variables = (entry / "environ").read_text().split("\0")
                ranks = [text[5:] for text in variables if text.startswith("RANK=")]
                found[int(entry.name)] = "".join(ranks)
    return found


def outliving(mark: str) -> dict[int, str]:
    """Those that live on for two minutes: the end of a process that is not ours is no event."""
    deadline = time.monotonic() + 120
    while (left := living(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
