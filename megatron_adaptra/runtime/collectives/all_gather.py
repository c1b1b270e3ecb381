"""Small values from every member of a group to every other, in one delay of the slowest link.

A backend's all-reduce passes partial results round a ring or up a tree: over a slow link it takes
two delays or more, and over gloo twice that, for nothing moves before the receiver has said that it
is ready. Here values are sent at once, into receives that were posted long ago.
"""

from __future__ import annotations

import contextlib
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.errors import PeerLost, reason_of

_HEAD = struct.Struct("<qq")  # the exchange's number, payload bytes; negative: of a loss, in words
_LOSS = 256  # bytes of those words
_RING = 1 << 20  # exchanges before a tag comes back
# Nobody can be more than one exchange ahead: to end one it needs to hear of everybody.
_AHEAD = 2
_Sends = list[tuple[int, "dist.Work | str"]]  # to whom, and how it goes


class AllGather(ABC):
    """One member's side. All members make the same calls in the same order.

    `me`: this one's number. Raises PeerLost, with the name of the member, for one from which
    nothing comes in time.
    """

    me: int

    def swap(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Tell everybody `payload`, bytes on the CPU; what each member told, mine included."""
        self.tell(payload)
        return self.hear()

    @abstractmethod
    def tell(self, payload: torch.Tensor) -> None:
        """The first half of a swap, which waits for nobody; `hear` is the other."""

    @abstractmethod
    def hear(self) -> list[torch.Tensor]:
        """What each member told; waits for all of them."""


class FlatAllGather(AllGather):
    """Each member tells its value to all others.

    `group`: a c10d backend of all members on the CPU. `names[i]`: for errors. `nbytes`:
    the most that a member has to say. `channel`: keeps several exchanges over one group apart.
    `targets`, `sources`: whom this one tells, and hears; without them all others.
    """

    def __init__(
        self,
        group: Any,
        names: Sequence[str],
        nbytes: int,
        timeout: float,
        channel: int = 0,
        targets: Sequence[int] | None = None,
        sources: Sequence[int] | None = None,
    ) -> None:
        self._group, self._names, self._timeout = group, tuple(names), timedelta(seconds=timeout)
        self.me = group.rank()
        others = [i for i in range(len(names)) if i != self.me]
        self._targets = others if targets is None else targets
        self._sources = others if sources is None else sources
        self._first_tag, self._number_told, self._number_heard = channel * _RING, 0, 0
        self._told = torch.empty(0, dtype=torch.uint8)
        size = _HEAD.size + max(nbytes, _LOSS)
        self._outgoing: list[tuple[torch.Tensor, _Sends]] = [
            (torch.empty(size, dtype=torch.uint8), []) for _ in range(_AHEAD + 1)
        ]
        self._posted: dict[int, deque[tuple[torch.Tensor, dist.Work | str]]] = {
            peer: deque() for peer in self._sources
        }
        for number in range(_AHEAD):
            for peer in self._sources:
                self._post(peer, torch.empty(size, dtype=torch.uint8), number)

    def tell(self, payload: torch.Tensor) -> None:
        frame, sends = self._outgoing[self._number_told % len(self._outgoing)]
        for peer, send in sends:
            self._await(send, peer, f"take exchange {self._number_told}")
        sends[:] = self._send(frame, payload, payload.numel())
        self._told = payload

    def tell_loss(self, loss: PeerLost) -> None:
        """In place of a value: whoever hears it raises the same. Returns when it is on its way."""
        words = torch.frombuffer(bytearray(str(loss).encode()[:_LOSS]), dtype=torch.uint8)
        frame = torch.empty(_HEAD.size + _LOSS, dtype=torch.uint8)
        for peer, send in self._send(frame, words, -words.numel()):
            with contextlib.suppress(PeerLost):
                self._await(send, peer, "take the news")

    def hear(self) -> list[torch.Tensor]:
        number = self._number_heard
        self._number_heard += 1
        values = [self._told] * len(self._names)
        for peer in self._sources:
            buffer, work = self._posted[peer].popleft()
            self._await(work, peer, f"send exchange {number}")
            said, size = _HEAD.unpack_from(buffer.numpy())
            value = buffer[_HEAD.size : _HEAD.size + abs(size)].clone()
            if said != number:
                raise PeerLost(f"{self._names[peer]} sent exchange {said} instead of {number}")
            if size < 0:
                raise PeerLost(bytes(value.tolist()).decode(errors="replace"))
            values[peer] = value
            self._post(peer, buffer, number + _AHEAD)
        return values

    def _send(self, frame: torch.Tensor, payload: torch.Tensor, size: int) -> _Sends:
        _HEAD.pack_into(frame.numpy(), 0, self._number_told, size)
        end = _HEAD.size + payload.numel()
        frame[_HEAD.size : end] = payload
        tag, said = self._tag(self._number_told), frame[:end]
        self._number_told += 1
        return [(peer, self._try(self._group.send, said, peer, tag)) for peer in self._targets]

    def _post(self, peer: int, buffer: torch.Tensor, number: int) -> None:
        work = self._try(self._group.recv, buffer, peer, self._tag(number))
        self._posted[peer].append((buffer, work))

    def _tag(self, number: int) -> int:
        return self._first_tag + number % _RING

    @staticmethod
    def _try(move: Any, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work | str:
        """A peer may be gone after the last exchange; it matters once something is missing."""
        try:
            work: dist.Work = move([buffer[:]], peer, tag)
            return work
        except RuntimeError as error:
            return str(error)

    def _await(self, work: dist.Work | str, peer: int, what: str) -> None:
        error = work if isinstance(work, str) else ""
        if not isinstance(work, str):
            try:
                work.wait(self._timeout)
            except RuntimeError as raised:
                error = str(raised)
        if error:
            raise PeerLost(f"waited for {self._names[peer]} to {what}: {reason_of(error)}")
