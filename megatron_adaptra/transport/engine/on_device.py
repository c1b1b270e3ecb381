"""Messages from and to a GPU's memory over the endpoint, as the rest of the package knows them.

The GPU copies them to pinned memory of the host and from there, on streams of copies, and the
engine moves them between hosts. No stream ever waits for a message. `wait` blocks the calling
thread until a message has arrived, and then has its current stream wait for the copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from megatron_adaptra import waits
from megatron_adaptra.device import native
from megatron_adaptra.device.base import Copies
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.errors import DeviceFailed, PeerLost
from megatron_adaptra.log import log_line
from megatron_adaptra.transport.base import Stamps, Traits
from megatron_adaptra.transport.emulate import LinkEmulator
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.transport import End, EngineWork, lane_of


class DeviceTransport:
    """Transport over `endpoint` for tensors of the GPU of `staging`; `me`: this rank.

    `name`, `peers`, `emulator`: as for EngineTransport. What was sent may be freed at once, as for
    Transport. A reference to its memory is kept until the GPU has copied it, so that the stream of
    its producer never has to wait for that. It may be written to again by work launched after the
    send only if `copies`: then each message is copied on its producer's stream first, within the
    GPU, which CUDA graphs need whose outputs are always at the same place.
    """

    traits = Traits("engine", False, ("cuda",))

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        peers: Mapping[int, End],
        staging: Staging,
        me: int,
        emulator: LinkEmulator | None = None,
        copies: bool = False,
    ) -> None:
        self.staging, self._device = staging, staging.device
        self.device = torch.device("cuda", self._device.ordinal)
        self._peers, self._emulator, self._copies = dict(peers), emulator, copies
        ranks = [end.rank for end in self._peers.values()]
        self._messages = native.open_messages(
            endpoint.engine, self._device.handle, staging.pinned, lane_of(name), ranks, f"rank {me}"
        )
        self._under_way: list[tuple[native.Transfer, Any]] = []  # and the memory it uses
        self._held: list[_Send] = []  # by the emulator
        self._closed = False
        self._open_ones = endpoint.transports
        self._open_ones.add(self)
        self._device.users.add(self)

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> _Send:
        """As for Transport, with `tag`, of what the current stream has in `buffer` by now.

        Raises PeerLost if this side is closed, DeviceFailed if the driver refuses.
        """
        end = self._open(peer)
        # Another object for the same memory: Megatron empties the tensor that it has sent.
        memory = buffer.detach()
        if not memory.is_contiguous():
            memory = memory.contiguous()
        elif self._copies:
            memory = memory.clone()
        work = _Send(self, end, tag)
        hold = self._holder(work, peer, memory.nbytes)
        where = memory.data_ptr(), memory.nbytes, self._device.stream(), hold
        try:
            work.handle = self._messages.send(end.rank, tag, *where)
        except RuntimeError as error:
            raise DeviceFailed(f"message {tag} to {end.name}: {error}") from error
        self._under_way.append((work.handle, memory))
        return work

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int) -> _Receive:
        """As for Transport, with `tag`; what the current stream does with `buffer` comes first.

        Raises PeerLost if this side is closed, ValueError for memory that is not contiguous,
        DeviceFailed if the driver refuses.
        """
        end = self._open(peer)
        if not buffer.is_contiguous():
            raise ValueError(f"message {tag}: a receive needs contiguous memory")
        memory = buffer.detach()
        where = memory.data_ptr(), memory.nbytes, self._device.stream()
        try:
            handle = self._messages.receive(end.rank, tag, *where)
        except RuntimeError as error:
            raise DeviceFailed(f"message {tag} from {end.name}: {error}") from error
        self._under_way.append((handle, memory))
        return _Receive(self, end, tag, handle)

    def copies(self) -> tuple[Copies, Copies]:
        """What the GPU has copied from its memory, and to it."""
        out, back = self._messages.copies()
        return Copies(*out), Copies(*back)

    def sweep(self) -> None:
        """Let go of memory that the GPU has copied; every call does it."""
        self._under_way = [pair for pair in self._under_way if not pair[0].over()]

    def close(self) -> None:
        """Give up what is under way; waits for copies that the GPU has begun."""
        if self._closed:
            return
        self._closed = True
        if self._emulator is not None:
            self._emulator.close()
        if not self._messages.close(waits.GOODBYE):
            log_line(
                f"{self._device.name} has not ended its copies after {waits.GOODBYE:g} s; the "
                "memory of their messages is kept"
            )
            return
        self._under_way, self._held = [], []
        self._open_ones.discard(self)
        self._device.users.discard(self)

    def join(self, handle: native.Transfer) -> None:
        """Have the current stream wait for the copy of a receive. Raises DeviceFailed."""
        try:
            self._messages.join(handle, self._device.stream())
        except RuntimeError as error:
            raise DeviceFailed(str(error)) from error
        self.sweep()

    def abort(self, end: End, handle: native.Transfer) -> None:
        """Give a message up. Raises PeerLost if the GPU does not end its copy."""
        if not self._messages.abort(handle, waits.GOODBYE):
            raise PeerLost(
                f"{end.name}: {self._device.name} has not ended the copy of a message that was "
                f"given up after {waits.GOODBYE:g} s"
            )

    def _open(self, peer: int) -> End:
        end = self._peers[peer]
        if self._closed:
            raise PeerLost(f"{end.name}: this side has closed the transport")
        self.sweep()
        return end

    def _holder(self, work: _Send, peer: int, nbytes: int) -> native.Held | None:
        """What hands a message to the emulator once it could leave; nothing if no rule is on it."""
        emulator = self._emulator
        if emulator is None or all(rule.target != peer for rule in emulator.rules):
            return None
        self._held = [held for held in self._held if not held.done()]
        self._held.append(work)
        work.held = True

        def ready(transfer: native.Transfer) -> None:
            def deliver() -> None:
                work.held = False
                self._messages.release(transfer)

            emulator.hold(peer, nbytes, deliver)

        return ready


class _Work(EngineWork):
    """What sends and receives have in common."""

    handle: native.Transfer

    def __init__(self, owner: DeviceTransport, end: End, tag: int) -> None:
        super().__init__(end, tag)
        self._owner = owner

    def abort(self) -> None:
        """Whoever waits gets PeerLost; the message's memory is free after this.

        Raises PeerLost if the GPU does not end a copy that it has begun.
        """
        self._owner.abort(self._end, self.handle)


class _Send(_Work):
    """A send. `held`: by the emulator, or will be."""

    held = False

    def __init__(self, owner: DeviceTransport, end: End, tag: int) -> None:
        super().__init__(owner, end, tag)
        self.stamps.sent = time.monotonic()

    def done(self) -> bool:
        """Whether the engine has it, or it was given up."""
        return self.handle.done() or (self.handle.over() and not self.held)

    def wait(self, timeout: float) -> Stamps:
        """As for Work: until all of it has arrived; `sent` is when its producer had ended."""
        if not self._ended(timeout):
            raise PeerLost(f"waited {timeout:g} s to send message {self._tag} to {self._end.name}")
        return self.stamps


class _Receive(_Work):
    """A posted receive."""

    def __init__(self, owner: DeviceTransport, end: End, tag: int, handle: native.Transfer) -> None:
        super().__init__(owner, end, tag)
        self.handle = handle
        self.stamps.posted = time.monotonic()

    def done(self) -> bool:
        """Whether the message is there, or will not come."""
        return self.handle.done()

    def wait(self, timeout: float) -> Stamps:
        """As for Work; what the current stream does later sees the message.

        `sent` is when the sender's GPU had copied it, `completed` when it was in the host's memory:
        the copies are no part of the delay. Raises PeerLost, DeviceFailed if the driver refuses.
        """
        if not self.stamps.wanted:
            self.stamps.wanted = time.monotonic()
        if not self._ended(timeout):
            raise PeerLost(f"waited {timeout:g} s for message {self._tag} from {self._end.name}")
        self._owner.join(self.handle)
        return self.stamps
