"""Reports between ranks, beside their data: their plan, whom they wait for, who is lost.

A rank that waits for a healthy one, which waits for a dead one itself, would name the wrong rank.
So ranks report whom they wait for when one asks, and a rank that has not reported is the lost one.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.base import Transport, Work

_TEXT = 480  # bytes at most
_FRAME = struct.Struct(f"<qqqq{_TEXT}s")  # kind, number, rank, bytes of text, text
_TAGS = 1 << 20  # reports before a tag comes back
_LEAVES = 1.0  # seconds for the last report to leave


class Kind(enum.IntEnum):
    """A kind names the content of a report."""

    PLAN = 0  # `text`: what the rank runs as plan `number`
    WAITS = 1  # in exchange `number` it waits for `rank`
    LOST = 2  # `rank` is lost, for the reason `text`


@dataclass(frozen=True)
class Loss:
    """A loss names the `rank` that is lost, the rank that found it (`by`), and the `reason`."""

    rank: int
    by: int
    reason: str


class Reports:
    """A rank's reports go to all others; `read` takes in theirs. Several threads may use them.

    Args:
        transport: between all ranks, for reports alone.
        me: this rank.
        ranks: how many there are.
    """

    def __init__(self, transport: Transport, me: int, ranks: int) -> None:
        self._transport, self._me = transport, me
        self._lock = threading.RLock()
        self._others = [rank for rank in range(ranks) if rank != me]
        self._sent, self._received = 0, dict.fromkeys(self._others, 0)
        self._sends: list[Work] = []
        self.plans: dict[tuple[int, int], str] = {}  # by number and rank
        self.waits: dict[tuple[int, int], int] = {}  # the rank waited for, by exchange and rank
        self.asked: set[int] = set()  # exchanges in which some rank has waited for too long
        self.closed: set[int] = set()  # ranks that can report nothing any more
        self.loss: Loss | None = None  # the first one
        self._posted: dict[int, tuple[torch.Tensor, Work]] = {}
        for rank in self._others:
            self._post(rank)

    def plan(self, number: int, text: str) -> None:
        """Report the `text` of what this rank runs as plan `number`."""
        with self._lock:
            self.plans[number, self._me] = text
            self._send(Kind.PLAN, number, 0, text)

    def waiting(self, number: int, rank: int) -> None:
        """Report that this rank waits for `rank` in exchange `number`, unless it has."""
        with self._lock:
            if self.waits.get((number, self._me)) != rank:
                self.waits[number, self._me] = rank
                self._send(Kind.WAITS, number, rank)

    def lost(self, number: int, rank: int, reason: str) -> None:
        """Report that `rank` is lost in exchange `number`, for a `reason`, as the first loss known.

        Where a loss is known already, report nothing.
        """
        with self._lock:
            if self.loss is None:
                self.loss = Loss(rank, self._me, reason)
                for send in self._send(Kind.LOST, number, rank, reason):
                    with contextlib.suppress(PeerLost):
                        send.wait(_LEAVES)

    def culprit(self, number: int, rank: int) -> int:
        """Find the rank to name where this one waits for `rank` in exchange `number`.

        It is the last of the chain of waits, which has not reported whom it waits for.
        """
        with self._lock:
            seen = {self._me}
            while rank not in seen and (number, rank) in self.waits:
                seen.add(rank)
                rank = self.waits[number, rank]
            return rank

    def read(self) -> None:
        """Take in all that has come."""
        with self._lock:
            for rank in self._others:
                while rank not in self.closed and self._posted[rank][1].done():
                    self._take(rank)

    def await_one(self, rank: int, seconds: float, number: int = -1) -> None:
        """Read, after waiting some `seconds` for a report of `rank`, or until it can send none.

        Return at once where it is known what `rank` runs as plan `number`, if another thread has
        read that meanwhile.
        """
        with self._lock:
            if (number, rank) in self.plans or rank in self.closed:
                return
            _, work = self._posted[rank]
        with contextlib.suppress(PeerLost):
            work.wait(seconds)
        self.read()

    def close(self) -> None:
        """End the transport; what was reported leaves before."""
        end = time.monotonic() + _LEAVES
        for send in self._sends:
            with contextlib.suppress(PeerLost):
                send.wait(max(0.001, end - time.monotonic()))
        self._transport.close()

    def _take(self, rank: int) -> None:
        frame, work = self._posted[rank]
        try:
            work.wait(0.0)
        except PeerLost:
            self.closed.add(rank)
            return
        self._received[rank] += 1
        self._post(rank)
        kind, number, whom, size, data = _FRAME.unpack(frame.numpy())
        text = data[:size].decode(errors="replace")
        if kind == Kind.PLAN:
            self.plans[number, rank] = text
        elif kind == Kind.WAITS:
            self.asked.add(number)
            self.waits[number, rank] = whom
        elif self.loss is None:
            self.loss = Loss(whom, rank, text)

    def _post(self, rank: int) -> None:
        frame = torch.empty(_FRAME.size, dtype=torch.uint8)
        tag = self._received[rank] % _TAGS
        try:
            self._posted[rank] = frame, self._transport.irecv(frame, rank, tag)
        except PeerLost:
            self.closed.add(rank)

    def _send(self, kind: Kind, number: int, whom: int, text: str = "") -> Sequence[Work]:
        data = text.encode()[:_TEXT]
        packed = bytearray(_FRAME.pack(kind, number, whom, len(data), data))
        frame = torch.frombuffer(packed, dtype=torch.uint8)
        tag, self._sent = self._sent % _TAGS, self._sent + 1
        sends = []
        for rank in self._others:
            with contextlib.suppress(PeerLost):  # it has ended, which its messages show
                sends.append(self._transport.isend(frame, rank, tag))
        self._sends = [*self._sends, *sends][-4 * max(1, len(self._others)) :]
        return sends
