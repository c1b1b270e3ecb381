"""Sixteen bytes from each rank to each other one as soon as its first gradients are ready.

They show who is late (measure/arrivals.py), and carry what the sender runs: two that run
different all-reduces find it out, instead of adding wrong numbers. Where the host learns of the
moment later, as on a GPU, they carry how much later. A rank may leave out iterations
(MeasuredIterations).
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass

import torch

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.base import Transport, Work

# The iteration, the mark of what runs, the iteration until which all are measured, and the seconds
# since its gradients were ready: NaN if unknown.
_FORM = struct.Struct("<3If")
_AHEAD = 3  # posted receives: two messages may be unread, the last one's and this iteration's
_KEPT = 4  # iterations that are kept
_WORD, _TAGS = 1 << 32, 1 << 31


@dataclass
class _Mine:
    """An entry records an iteration that has begun here. `ready`: the moment; NaN if unknown."""

    ready: float
    mark: int
    sent: bool


class ArrivalMessages:
    """A rank's arrival messages show when its gradients, and those of others, were ready.

    `transport`: for these messages alone. `me`: the rank, of so many `ranks`. `differs`: a rank
    that was found to run something else, and the iteration; None while there is none. `until`: the
    iteration until which some rank measures all of them, as far as messages have come.
    """

    def __init__(self, transport: Transport, me: int, ranks: int) -> None:
        self._transport = transport
        self._others = [rank for rank in range(ranks) if rank != me]
        self._sent = 0
        self._sends: deque[list[Work]] = deque(maxlen=_KEPT)
        self._posted = {rank: deque[tuple[torch.Tensor, Work]]() for rank in self._others}
        self._received = dict.fromkeys(self._others, 0)
        self._lost: dict[int, PeerLost] = {}
        self._mine: dict[int, _Mine] = {}  # the last ones
        # By iteration and rank: the moment in which it was ready there, and its mark.
        self._theirs: dict[int, dict[int, tuple[float, int]]] = defaultdict(dict)
        self._reading = threading.Lock()
        self.differs: tuple[int, int] | None = None
        self.until = 0
        for rank in self._others:
            for number in range(_AHEAD):
                self._post(rank, number)

    def ready(
        self, iteration: int, mark: int, moment: float | None, until: int = 0, sends: bool = True
    ) -> None:
        """Send that the first gradients of `iteration` were ready at `moment`; None: unknown.

        `mark`: of what runs. `moment`: on the monotonic clock. `until`: the iteration before which
        this rank measures all of them. `sends`: it measures this one; else nothing is sent. Raises
        PeerLost for a rank that can be sent nothing.
        """
        known = math.nan if moment is None or not sends else moment
        with self._reading:
            self._mine[iteration] = _Mine(known, mark % _WORD, sends)
            for kept in self._mine, self._theirs:
                for old in [one for one in kept if one <= iteration - _KEPT]:
                    del kept[old]
        if not sends:
            return
        form = _FORM.pack(iteration, mark % _WORD, until, time.monotonic() - known)
        frame = torch.frombuffer(bytearray(form), dtype=torch.uint8)
        number, self._sent = self._sent, self._sent + 1
        self._sends.append(
            [self._transport.isend(frame, rank, number % _TAGS) for rank in self._others]
        )

    def look(self) -> None:
        """Take the messages that have come. Any thread may."""
        with self._reading:
            for rank in self._others:
                while self._posted[rank] and self._posted[rank][0][1].done():
                    self._take(rank)

    def _take(self, rank: int) -> None:
        frame, work = self._posted[rank].popleft()
        try:
            came = work.wait(0.0).completed
        except PeerLost as error:
            self._lost[rank] = error
            self._posted[rank].clear()
            return
        iteration, mark, until, since = _FORM.unpack(frame.numpy().tobytes())
        self._theirs[iteration][rank] = came - since, mark
        self.until = max(self.until, until)
        self._received[rank] += 1
        self._post(rank, self._received[rank] + _AHEAD - 1)

    def seen(self, iteration: int) -> dict[int, float]:
        """Return, by rank, how many seconds later than here its message of `iteration` came.

        `iteration`: one of the last. Ranks whose message is not here are left out. Any thread may
        ask. Raises PeerLost for a rank whose messages cannot come any more, in an iteration that
        is measured.
        """
        self.look()
        with self._reading:
            if (mine := self._mine.get(iteration)) is None:
                return {}
            theirs = self._theirs.get(iteration, {})
            for rank, (_, mark) in theirs.items():
                if mark != mine.mark:
                    self.differs = self.differs or (rank, iteration)
            for rank, error in self._lost.items():
                if mine.sent and rank not in theirs:
                    raise error
            seen = {rank: moment - mine.ready for rank, (moment, _) in theirs.items()}
        return {rank: later for rank, later in seen.items() if math.isfinite(later)}

    def _post(self, rank: int, number: int) -> None:
        frame = torch.zeros(_FORM.size, dtype=torch.uint8)
        self._posted[rank].append((frame, self._transport.irecv(frame, rank, number % _TAGS)))
