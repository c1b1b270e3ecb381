"""One clock for all ranks, that of rank 0, whether they are on one machine or on several."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_adaptra.bench.options import Options
from megatron_adaptra.execute.process_location import ProcessLocation, clock_ids
from megatron_adaptra.transport.connect import gather

W = TypeVar("W")
_PAUSE = 1e-3  # seconds until all ranks start, after a message has reached all of them
_QUESTIONS = 50  # to rank 0: the answer that came soonest gives the offset


def in_turns(ways: Sequence[W], rounds: int) -> Iterator[tuple[int, W]]:
    """Give the number of each of `rounds` and each of `ways`; another one is first in each."""
    for number in range(rounds):
        for at in range(len(ways)):
            yield number, ways[(number + at) % len(ways)]


class Clock:
    """A clock gives the seconds of rank 0's monotonic clock, and starts ranks at one moment.

    `machines`: by rank, the same text for ranks of one machine. Collective: all ranks make one.
    A rank of another machine finds the offset of its clock as NTP does: the error is half of the
    difference between the times of a message to rank 0 and of one back.
    """

    def __init__(self, options: Options) -> None:
        self.machines = clock_ids(gather(ProcessLocation.here()))
        delay = max((rule.delay for rule in options.rules), default=0.0)
        self._ahead = delay * 4 * options.ranks
        self._offset = 0.0
        for rank, machine in enumerate(self.machines):
            if machine != self.machines[0] and dist.get_rank() in (0, rank):
                self._offset = _offset_to(rank)

    def now(self) -> float:
        """Seconds, the same on all ranks."""
        return time.monotonic() + self._offset

    def start_together(self) -> float:
        """Wait until all ranks start; return that moment, the same on a rank that comes late.

        gloo agrees on it in a step per rank, each of which crosses a link there and back.
        """
        begin = self.latest(self.now() + _PAUSE + self._ahead)
        time.sleep(max(0.0, begin - self.now()))
        return begin

    def latest(self, moment: float) -> float:
        """The latest `moment` of all ranks."""
        each = torch.tensor([moment], dtype=torch.float64)
        dist.all_reduce(each, dist.ReduceOp.MAX)
        return float(each)


def _offset_to(rank: int) -> float:
    """Return the seconds that `rank` adds to its clock to get rank 0's; rank 0 itself gets 0."""
    word = torch.zeros(1, dtype=torch.float64)
    nearest, offset = math.inf, 0.0
    for _ in range(_QUESTIONS):
        if dist.get_rank() == 0:
            dist.recv(word, rank)
            word[0] = time.monotonic()
            dist.send(word, rank)
        else:
            asked = time.monotonic()
            dist.send(word, 0)
            dist.recv(word, 0)
            answered = time.monotonic()
            if answered - asked < nearest:
                nearest, offset = answered - asked, float(word) - (asked + answered) / 2
    return offset
