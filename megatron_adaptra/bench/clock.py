"""One clock for all ranks, that of rank 0, whether they are on one machine or on several."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from megatron_adaptra.bench.options import Options
from megatron_adaptra.execute.process_location import ProcessLocation, clock_ids

_PAUSE = 1e-3  # seconds until all ranks start, beside what a word takes to all of them
_QUESTIONS = 50  # to rank 0: the answer that came soonest says most


class Clock:
    """Seconds of rank 0's monotonic clock, and ranks that start at the same moment.

    `machines`: by rank, the same text for ranks of one machine. Collective: all ranks make one.
    A rank of another machine finds out what its own clock lacks as NTP does, right to half of what
    a message to rank 0 takes longer than one back.
    """

    def __init__(self, options: Options) -> None:
        locations: list[ProcessLocation] = [ProcessLocation.here()] * options.ranks
        dist.all_gather_object(locations, ProcessLocation.here())
        self.machines = clock_ids(locations)
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
        """Wait for the moment at which all ranks start; that moment, also on a rank that is late.

        gloo takes as many steps to say when, each of which crosses a link there and back.
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
    """What `rank` adds to its clock; 0 on rank 0, which it asks."""
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
