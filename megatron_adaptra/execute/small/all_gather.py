"""An asynchronous all-gather of a few bytes, in one delay of the slowest link.

A backend's all-reduce passes partial results round a ring or up a tree: over a slow link it takes
two delays or more, and over gloo twice that, for nothing moves before the receiver has announced
that it is ready. Here values are sent at once, into receives that were posted two all-gathers
before.
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

from megatron_adaptra.base.errors import AdaptraError, PeerLost, reason_of

_HEAD = struct.Struct("<qq")  # number of the all-gather, payload bytes; negative: text of an error
_ERROR_BYTES = 256  # at most, of such a text
_TAGS = 1 << 20  # all-gathers before a tag comes back
# Nobody can be further ahead: to end an all-gather one needs a value of each member.
_AHEAD = 2
_CLOSE = timedelta(seconds=10)
_Sends = list[tuple[int, "dist.Work | str"]]  # to whom, and the send, or why there is none


class AllGather(ABC):
    """One member's side of all-gathers over one group; all members make the same calls in order.

    `me`: this member's index. All methods raise PeerLost, which names the member, if a member sends
    or takes nothing for the timeout of the group.
    """

    me: int
    _in_flight = False

    def run(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Gather `payload` (flat, uint8, on the CPU) of all members; returned by member."""
        self.start(payload)
        return self.wait()

    @abstractmethod
    def start(self, payload: torch.Tensor) -> None:
        """Send this member's `payload`, and return without waiting for any other member.

        At most one all-gather is in flight: `wait` comes before the next `start`, which raises
        AdaptraError otherwise.
        """

    @abstractmethod
    def wait(self) -> list[torch.Tensor]:
        """Wait for the payloads of all members; returned by member, this one's included."""

    def _leave(self) -> None:
        """The beginning of `start`. `wait` clears `_in_flight`."""
        if self._in_flight:
            raise AdaptraError("an all-gather starts while the one before it is still in flight")
        self._in_flight = True

    @abstractmethod
    def close(self) -> None:
        """Wait, ten seconds at most for each member, until they have what was sent."""


class FlatAllGather(AllGather):
    """Each member sends its payload to every other one.

    Args:
        group: a c10d backend on the CPU, of all members.
        names: of the members, by number, for errors.
        nbytes: of the longest payload.
        timeout: seconds that `wait` waits for each member's payload, and that `start` waits for
            each member to take the payload of three all-gathers ago.
        channel: keeps several all-gathers over one group apart.
        targets, sources: numbers of the members to send to and to receive from; None: all others.
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
        self._first_tag, self._next_start, self._next_wait = channel * _TAGS, 0, 0
        self._payload = torch.empty(0, dtype=torch.uint8)  # this member's, of the one in flight
        size = _HEAD.size + max(nbytes, _ERROR_BYTES)
        self._outgoing: list[tuple[torch.Tensor, _Sends]] = [
            (torch.empty(size, dtype=torch.uint8), []) for _ in range(_AHEAD + 1)
        ]
        self._posted: dict[int, deque[tuple[torch.Tensor, dist.Work | str]]] = {
            peer: deque() for peer in self._sources
        }
        for number in range(_AHEAD):
            for peer in self._sources:
                self._post(peer, torch.empty(size, dtype=torch.uint8), number)

    def start(self, payload: torch.Tensor) -> None:
        """Send `payload`, which must not change until the next `start`.

        Without sources there is nothing to wait for, and so nothing in flight.
        """
        if self._sources:
            self._leave()
        frame, sends = self._outgoing[self._next_start % len(self._outgoing)]
        before = self._next_start - len(self._outgoing)  # it has used this frame
        for peer, send in sends:
            self._await(send, peer, f"take all-gather {before}")
        sends[:] = self._send(frame, payload, payload.numel())
        self._payload = payload

    def send_error(self, error: PeerLost) -> None:
        """Send `error` in place of a payload: the `wait` of the member that gets it raises it.

        Returns when it is on its way, or after the timeout.
        """
        text = torch.frombuffer(bytearray(str(error).encode()[:_ERROR_BYTES]), dtype=torch.uint8)
        frame = torch.empty(_HEAD.size + _ERROR_BYTES, dtype=torch.uint8)
        for peer, send in self._send(frame, text, -text.numel()):
            with contextlib.suppress(PeerLost):
                self._await(send, peer, "take an error")

    def wait(self) -> list[torch.Tensor]:
        """Raise PeerLost for a missing payload, or an error in its place."""
        number = self._next_wait
        self._next_wait += 1
        self._in_flight = False
        values = [self._payload] * len(self._names)
        for peer in self._sources:
            buffer, work = self._posted[peer].popleft()
            self._await(work, peer, f"send its part of all-gather {number}")
            got, size = _HEAD.unpack_from(buffer.numpy())
            value = buffer[_HEAD.size : _HEAD.size + abs(size)].clone()
            if got != number:
                raise PeerLost(f"{self._names[peer]} sent all-gather {got} instead of {number}")
            if size < 0:
                raise PeerLost(bytes(value.tolist()).decode(errors="replace"))
            values[peer] = value
            self._post(peer, buffer, number + _AHEAD)
        return values

    def close(self) -> None:
        """Raise nothing where a member is lost."""
        self._timeout = min(self._timeout, _CLOSE)
        for _, sends in self._outgoing:
            for peer, send in sends:
                with contextlib.suppress(PeerLost):
                    self._await(send, peer, "take the last all-gather")
            sends.clear()
        self._posted.clear()

    def _send(self, frame: torch.Tensor, payload: torch.Tensor, size: int) -> _Sends:
        _HEAD.pack_into(frame.numpy(), 0, self._next_start, size)
        end = _HEAD.size + payload.numel()
        frame[_HEAD.size : end] = payload
        tag, used = self._tag(self._next_start), frame[:end]
        self._next_start += 1
        return [(peer, self._try(self._group.send, used, peer, tag)) for peer in self._targets]

    def _post(self, peer: int, buffer: torch.Tensor, number: int) -> None:
        work = self._try(self._group.recv, buffer, peer, self._tag(number))
        self._posted[peer].append((buffer, work))

    def _tag(self, number: int) -> int:
        return self._first_tag + number % _TAGS

    @staticmethod
    def _try(move: Any, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work | str:
        """A peer may have ended after the last one; it matters once something is missing."""
        try:
            work: dist.Work = move([buffer[:]], peer, tag)
            return work
        except (RuntimeError, PeerLost) as error:
            return str(error)

    def _await(self, work: dist.Work | str, peer: int, what: str) -> None:
        error = work if isinstance(work, str) else ""
        if not isinstance(work, str):
            try:
                work.wait(self._timeout)
            except (RuntimeError, PeerLost) as raised:
                error = str(raised)
        if error:
            raise PeerLost(f"waited for {self._names[peer]} to {what}: {reason_of(error)}")
