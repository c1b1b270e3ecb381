"""Small values from every member of a group to every other, in one delay of the slowest link.

A backend's all-reduce passes partial results round a ring or up a tree: over a slow link it takes
two delays or more, and over gloo twice that, for nothing moves before the receiver has said that it
is ready. Here each member sends its value to all others at once, into receives that were posted
long ago.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.errors import PeerLost, reason_of

_HEAD = struct.Struct("<qq")  # the exchange's number, payload bytes
_RING = 1 << 20  # exchanges before a tag comes back
# Nobody can be more than one exchange ahead: to end one it needs a message of everybody's.
_AHEAD = 2


class Exchange:
    """One member's side. All members make the same calls in the same order.

    `group`: a c10d backend of all members on the CPU. `names[i]`: for errors. `nbytes`:
    the most that a member has to say. `channel`: keeps several exchanges over one group apart.
    """

    def __init__(
        self, group: Any, names: Sequence[str], nbytes: int, timeout: float, channel: int = 0
    ) -> None:
        self._group, self._names, self._timeout = group, tuple(names), timedelta(seconds=timeout)
        self.me = group.rank()
        self._peers = [i for i in range(len(names)) if i != self.me]
        self._first_tag, self._number = channel * _RING, 0
        self._told = torch.empty(0, dtype=torch.uint8)
        size = _HEAD.size + nbytes
        self._outgoing: list[tuple[torch.Tensor, list[tuple[int, dist.Work | str]]]] = [
            (torch.empty(size, dtype=torch.uint8), []) for _ in range(_AHEAD + 1)
        ]
        self._posted: dict[int, deque[tuple[torch.Tensor, dist.Work | str]]] = {
            peer: deque() for peer in self._peers
        }
        for number in range(_AHEAD):
            for peer in self._peers:
                self._post(peer, torch.empty(size, dtype=torch.uint8), number)

    def swap(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Tell everybody `payload`, bytes on the CPU; what each member told, mine included.

        Raises PeerLost, with the member's name, for one from which nothing comes in time.
        """
        self.tell(payload)
        return self.hear()

    def tell(self, payload: torch.Tensor) -> None:
        """The first half of a swap, which waits for nobody; `hear` is the other."""
        number = self._number
        self._number += 1
        frame, sends = self._outgoing[number % len(self._outgoing)]
        for peer, send in sends:
            self._await(send, peer, f"take exchange {number}")
        _HEAD.pack_into(frame.numpy(), 0, number, payload.numel())
        end = _HEAD.size + payload.numel()
        frame[_HEAD.size : end] = payload
        tag = self._tag(number)
        sends[:] = [(peer, self._try(self._group.send, frame, peer, tag)) for peer in self._peers]
        self._told = payload

    def hear(self) -> list[torch.Tensor]:
        """What each member told; waits for all of them."""
        number = self._number - 1
        values = [self._told] * len(self._names)
        for peer in self._peers:
            buffer, work = self._posted[peer].popleft()
            self._await(work, peer, f"send exchange {number}")
            said, size = _HEAD.unpack_from(buffer.numpy())
            if said != number:
                raise PeerLost(f"{self._names[peer]} sent exchange {said} instead of {number}")
            values[peer] = buffer[_HEAD.size : _HEAD.size + size].clone()
            self._post(peer, buffer, number + _AHEAD)
        return values

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
