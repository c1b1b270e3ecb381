"""Descriptors: how many this rank may still open (`ulimit -n`), and what connections take of them.

A process beyond its limit is aborted by gloo, so that all is counted before anything is opened.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Sequence

DEVICE = 5  # descriptors of a gloo device, at most
# From a rank to its neighbours: two links, both ways, both kinds of message, and measuring links.
LINKS = 8 * (1 + DEVICE) + 2
SPARE = 128  # that are kept free: for data, checkpoints, other libraries
_PLENTY = 1 << 30  # where there is no limit


def room() -> int:
    """How many more descriptors this process may open in all (`ulimit -Hn`), less SPARE."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (_PLENTY if hard == resource.RLIM_INFINITY else hard) - _open() - SPARE


def make_room(count: int) -> None:
    """Raise the soft limit of descriptors, if it has to be, for `count` more and SPARE.

    Not above the hard limit: check `room` first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _open() + count + SPARE
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors_left(keys: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...]:
    """By rank, the descriptors left beside a pipeline's links and control; negative: too few.

    `keys`: by rank, the same in one plan group. `rooms`: by rank, how many it may still open.
    """
    sizes, led = Counter(keys), set[int]()
    left = []
    for key, free in zip(keys, rooms, strict=True):
        left.append(free - LINKS - DEVICE - (1 if key in led else sizes[key] - 1))
        led.add(key)
    return tuple(left)


def too_few(left: Sequence[int]) -> str:
    """Why this job cannot have control, or an empty string. `left`: by rank."""
    short = [rank for rank, count in enumerate(left) if count < 0]
    if not short:
        return ""
    rank, more = short[0], len(short) - 1
    others = f", {more} other ranks as well" if more else ""
    return (
        f"rank {rank} would need {-left[short[0]]} more open files than its limit allows{others}: "
        "raise ulimit -Hn"
    )
