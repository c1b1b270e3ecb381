"""Probes of paths between ranks: the rate from each rank of a group to each other one.

Ranks probe two by two, so that each path has both its ports to itself: in each round a rank
exchanges some messages with one other rank, as in a tournament. How fast messages follow one
another shows the rate, without the delay.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.base import Transport

PIECE = 32 << 10  # bytes; what a shaped port passes at once is not much more
FEWEST, MOST = 16, 256  # pieces of each rank in a round
TAKES = 3e-3  # seconds for which a round's pieces are enough, if that may be so many
LEAST = 2.5e-4  # seconds of a quarter of the pieces: a faster path cannot be measured
PATIENCE = 20.0  # seconds for all rounds of one call; then nothing is measured any more
_WANTS = struct.Struct("<I")  # in each piece: how many this rank wants next time
_TAGS = 1 << 31


class PathProbes:
    """A rank's path probes measure the rate of the path from each other rank to it.

    `transport`: for probes alone. `me`: the rank, of so many `ranks`. `fault`: why nothing is
    measured any more; "" while it is.
    """

    def __init__(self, transport: Transport, me: int, ranks: int) -> None:
        self._transport, self._me, self._ranks = transport, me, ranks
        others = [rank for rank in range(ranks) if rank != me]
        # By rank, how many pieces come from it, go there, and are asked for from the next time on.
        self._gets, self._sends = dict.fromkeys(others, FEWEST), dict.fromkeys(others, FEWEST)
        self._wanted = dict(self._gets)
        self._tag = self._runs = self._most = 0
        self.fault = ""

    def run(self, nbytes: int) -> dict[int, float]:
        """Measure the paths from other ranks to this one: bytes per second, by rank.

        All ranks call it, equally often. It waits for them, `PATIENCE` seconds at most.

        `nbytes`: the most that this rank may receive in a later call, in all; it asks for `FEWEST`
        pieces per path in any case.
        """
        self._most = min(MOST, nbytes // PIECE // max(1, self._ranks - 1))
        found: dict[int, float] = {}
        end = time.monotonic() + PATIENCE
        # Another pair comes first each time, when ranks may still be busy with what they compute.
        meets = deque(rounds(self._me, self._ranks))
        meets.rotate(self._runs)
        self._runs += 1
        for other in meets:
            if self.fault:
                break
            first, self._tag = self._tag, (self._tag + MOST + 1) % _TAGS
            if other is not None:
                try:
                    found[other] = self._exchange(other, first, end)
                except PeerLost as error:
                    self.fault = str(error)
        return found

    def close(self) -> None:
        """End the transport; a call that is under way ends, too."""
        self._transport.close()

    def _exchange(self, other: int, first: int, end: float) -> float:
        """Measure the rate from `other`, with tags from `first` on. Raises PeerLost, also at `end`.

        Each piece carries how many its sender wants next time, by what it measured before.
        """
        transport, tags = self._transport, [(first + i) % _TAGS for i in range(MOST + 1)]
        # Pieces that came before they were waited for would show no rate. Receives are posted in
        # the order of the sends, as gloo matches them.
        word, ready = torch.zeros(2, 1, dtype=torch.uint8)
        both_wait = transport.irecv(ready, other, tags[MOST])
        into = torch.empty(self._gets[other], PIECE, dtype=torch.uint8)
        receives = [transport.irecv(row, other, tag) for row, tag in zip(into, tags, strict=False)]
        sends = [transport.isend(word, other, tags[MOST])]
        both_wait.wait(max(0.0, end - time.monotonic()))
        piece = torch.zeros(PIECE, dtype=torch.uint8)
        wanted = self._wanted[other]
        _WANTS.pack_into(piece.numpy(), 0, wanted)
        sends += [transport.isend(piece, other, tag) for tag in tags[: self._sends[other]]]
        came = [work.wait(max(0.0, end - time.monotonic())).completed for work in receives]
        for work in sends:
            work.wait(max(0.0, end - time.monotonic()))
        rate = rate_of(came)
        (theirs,) = _WANTS.unpack_from(into[0].numpy())
        self._sends[other] = min(MOST, max(FEWEST, theirs))
        self._gets[other] = wanted
        self._wanted[other] = max(FEWEST, min(self._most, round(rate * TAKES / PIECE)))
        return rate


def rate_of(came: Sequence[float]) -> float:
    """Return a path's bytes per second, by the moments in seconds when at least 4 pieces `came`.

    It is by the median time of a quarter of them, from any one on. A port may pass the first ones
    at once; a pause of a busy machine is in few quarters.
    """
    ordered, quarter = sorted(came), len(came) // 4
    spans = [b - a for a, b in zip(ordered, ordered[quarter:], strict=False)]
    return PIECE * quarter / max(LEAST, median(spans))


def rounds(me: int, ranks: int) -> list[int | None]:
    """Return rank `me`'s partner in each round of a tournament of so many `ranks`; None: none.

    In a round each rank is in one pair at most, and each pair meets once (the circle method).
    """
    places = ranks + ranks % 2
    found: list[int | None] = []
    for turn in range(places - 1):
        if me == places - 1:
            other = next(r for r in range(places - 1) if 2 * r % (places - 1) == turn)
        else:
            other = (turn - me) % (places - 1)
            if other == me:
                other = places - 1
        found.append(other if other < ranks else None)
    return found
