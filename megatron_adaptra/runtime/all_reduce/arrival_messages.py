"""Twelve bytes from each rank to each other one as soon as its first gradients are ready.

They show who is late (telemetry/arrivals.py), and carry what the sender runs: two that run
different all-reduces find it out, instead of adding wrong numbers. Where that is known later, as
on a GPU, they carry how much later.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_adaptra.telemetry.arrivals import after_the_first
from megatron_adaptra.transport.base import Transport, Work

# The iteration, the mark of what runs, and the seconds since it was ready: no number if unknown.
_FORM = struct.Struct("<2If")
_AHEAD = 2  # a rank is at most one iteration ahead of another one
_KEPT = 4  # iterations that are kept
_WORD, _TAGS = 1 << 32, 1 << 31


@dataclass
class _Iteration:
    ready: float  # no number where that is not known
    mark: int
    receives: dict[int, tuple[torch.Tensor, Work]]
    seen: dict[int, float] = field(default_factory=dict)


class ArrivalMessages:
    """Of rank `me` of so many `ranks`, over a `transport` for nothing else.

    Iterations count up by one from `first` on, on all ranks. `differs`: the rank and the iteration
    in which it was found to run something else; None while there is none.
    """

    def __init__(self, transport: Transport, me: int, ranks: int, first: int = 0) -> None:
        self._transport = transport
        self._others = [rank for rank in range(ranks) if rank != me]
        self._posted: deque[dict[int, tuple[torch.Tensor, Work]]] = deque()
        self._next = first  # to be posted
        self._sends: deque[list[Work]] = deque(maxlen=_KEPT)
        self._begun: dict[int, _Iteration] = {}  # the last ones
        self._reading = threading.Lock()
        self.differs: tuple[int, int] | None = None
        for _ in range(_AHEAD):
            self._post()

    def ready(self, iteration: int, mark: int) -> float:
        """The first gradients of `iteration` are ready here; the moment, by the monotonic clock.

        `mark`: of what runs. Raises PeerLost for a rank that can be sent nothing.
        """
        now = time.monotonic()
        self._send(iteration, mark, now, 0.0)
        return now

    def were_ready(self, iteration: int, mark: int, moment: float | None) -> None:
        """The first gradients of `iteration` were ready here at a `moment`; None: nobody knows.

        By the monotonic clock. `mark`, PeerLost: as of `ready`.
        """
        known = math.nan if moment is None else moment
        self._send(iteration, mark, known, time.monotonic() - known)

    def _send(self, iteration: int, mark: int, ready: float, since: float) -> None:
        form = _FORM.pack(iteration % _WORD, mark % _WORD, since)
        frame = torch.frombuffer(bytearray(form), dtype=torch.uint8)
        self._begun[iteration] = _Iteration(ready, mark % _WORD, self._posted.popleft())
        self._begun.pop(iteration - _KEPT, None)
        self._sends.append(
            [self._transport.isend(frame, rank, iteration % _TAGS) for rank in self._others]
        )
        self._post()

    def seen(self, iteration: int) -> dict[int, float]:
        """By rank, how much later than here its message of `iteration` came, if it has.

        Of one of the last iterations. Any thread may ask. Raises PeerLost for a rank whose messages
        cannot come any more.
        """
        with self._reading:
            if (mine := self._begun.get(iteration)) is None:
                return {}
            for rank, (frame, work) in list(mine.receives.items()):
                if work.done():
                    stamps = work.wait(0.0)
                    del mine.receives[rank]
                    *theirs, since = _FORM.unpack(frame.numpy().tobytes())
                    if theirs != [iteration % _WORD, mine.mark]:
                        self.differs = self.differs or (rank, iteration)
                    later = stamps.completed - since - mine.ready
                    if math.isfinite(later):
                        mine.seen[rank] = later
            return dict(mine.seen)

    def close(self) -> None:
        """End the transport."""
        self._transport.close()

    def _post(self) -> None:
        number, self._next = self._next, self._next + 1
        row: dict[int, tuple[torch.Tensor, Work]] = {}
        for rank in self._others:
            frame = torch.zeros(_FORM.size, dtype=torch.uint8)
            row[rank] = frame, self._transport.irecv(frame, rank, number % _TAGS)
        self._posted.append(row)


def seen_by_rank(seen: Mapping[int, float], me: int, ranks: Sequence[int]) -> dict[int, float]:
    """By global rank, seconds after the first ones; of those whose message has come, and here.

    `seen`: as of ArrivalMessages, at rank `me` of the group. `ranks`: the group's, in its order.
    """
    late = after_the_first({me: 0.0, **seen}) if seen else {}
    return {ranks[rank]: seconds for rank, seconds in late.items()}
