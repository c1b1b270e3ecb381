"""Messages from and to a GPU's memory over the endpoint, as a Transport.

The GPU copies them to pinned memory of the host and from there, on streams of copies, and the
engine moves them between hosts. Large ones go in pieces: one is copied while others are on the
wire. No stream ever waits for a message. `wait` blocks the calling thread until a message has
arrived, and then has its current stream wait for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import DeviceFailed, PeerLost
from megatron_adaptra.base.log import log_line
from megatron_adaptra.device import gpu_bindings
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.transport.base import Stamps, Traits, Transport
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.transport import (
    End,
    EngineReceive,
    EngineSend,
    tag_space_of,
)

if TYPE_CHECKING:
    from megatron_adaptra.transport.engine.bindings import Transfer


class DeviceTransport(Transport):
    """Transport over `endpoint` for tensors in a GPU's memory.

    What was sent may be freed at once: a reference to its memory is kept until the GPU has copied
    it, so that the stream of its producer never waits for that.

    Args:
        endpoint, name, peers, emulator: as for EngineTransport.
        staging: the pinned memory of the messages, and so the GPU.
        me: this rank.
        copies: work launched after a send may write to its buffer again. Each message is then
            copied first, within the GPU and on its producer's stream. CUDA graphs need that: their
            outputs are always at the same address.
        piece: bytes of a message that are copied at a time; 0: as measured to be good.
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
        piece: int = 0,
    ) -> None:
        self.staging, self._device = staging, staging.device
        self.device = torch.device("cuda", self._device.ordinal)
        self._peers, self._emulator = dict(peers), emulator
        self.clones = copies  # messages, before they are sent
        ranks = [end.rank for end in self._peers.values()]
        self._messages = gpu_bindings.open_messages(
            endpoint.engine,
            self._device.handle,
            staging.pinned,
            tag_space_of(name),
            ranks,
            f"rank {me}",
            piece,
        )
        # With the tensor whose memory the GPU still reads or writes.
        self._under_way: list[tuple[Transfer, Any]] = []
        self._closed = False
        self._open_ones = endpoint.transports
        self._open_ones.add(self)
        self._device.users.add(self.close)

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> _Send:
        """Send what the stream has put in `buffer` to `peer` with `tag`.

        Raises PeerLost if this side is closed, DeviceFailed if the driver refuses.
        """
        end = self._open(peer)
        # Another object for the same memory: Megatron empties the tensor that it has sent.
        memory = buffer.detach()
        if not memory.is_contiguous():
            memory = memory.contiguous()
        elif self.clones:
            memory = memory.clone()
        work = _Send(self, end, tag)
        on_copied = self._delay(work, peer, memory.nbytes)
        where = memory.data_ptr(), memory.nbytes, self._device.stream(), on_copied
        try:
            work.handle = self._messages.send(end.rank, tag, *where)
        except RuntimeError as error:
            raise DeviceFailed(f"message {tag} to {end.name}: {error}") from error
        self._under_way.append((work.handle, memory))
        return work

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int) -> _Receive:
        """Receive from `peer` with `tag`, after the stream's work on `buffer`.

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
        if not self._messages.close(waits.CLOSE):
            log_line(
                f"{self._device.name} has not ended its copies after {waits.CLOSE:g} s; the "
                "memory of their messages is kept"
            )
            return
        self._under_way = []
        self._open_ones.discard(self)
        self._device.users.discard(self.close)

    def join(self, handle: Transfer) -> None:
        """Have the current stream wait for the copy of a receive. Raises DeviceFailed."""
        try:
            self._messages.join(handle, self._device.stream())
        except RuntimeError as error:
            raise DeviceFailed(str(error)) from error
        self.sweep()

    def abort(self, end: End, handle: Transfer) -> None:
        """Give a message up. Raises PeerLost if the GPU does not end its copy."""
        if not self._messages.abort(handle, waits.CLOSE):
            raise PeerLost(
                f"{end.name}: {self._device.name} has not ended the copy of a message that was "
                f"given up after {waits.CLOSE:g} s"
            )

    def _open(self, peer: int) -> End:
        end = self._peers[peer]
        if self._closed:
            raise PeerLost(f"{end.name}: this side has closed the transport")
        self.sweep()
        return end

    def _delay(self, work: _Send, peer: int, nbytes: int) -> Callable[[Transfer], None] | None:
        """Return a callback that gives a copied message to the emulator; None without a rule.

        Whether a rule is in force is decided when the message could leave, not at the send.
        """
        emulator = self._emulator
        if emulator is None or all(rule.target != peer for rule in emulator.rules):
            return None
        work.delayed = True

        def on_copied(transfer: Transfer) -> None:
            def deliver() -> None:
                work.delayed = False
                self._messages.release(transfer)

            emulator.hold(peer, nbytes, deliver)

        return on_copied


class _Send(EngineSend):
    handle: Transfer
    delayed = False  # kept back from the engine until the emulator delivers it

    def __init__(self, owner: DeviceTransport, end: End, tag: int) -> None:
        super().__init__(end, tag)
        self._owner = owner

    def done(self) -> bool:
        """Return True once the engine has it, or it was aborted."""
        return self.handle.done() or (self.handle.over() and not self.delayed)

    def abort(self) -> None:
        """Free its memory; raise PeerLost if the GPU still copies it."""
        self._owner.abort(self._end, self.handle)


class _Receive(EngineReceive):
    handle: Transfer

    def __init__(self, owner: DeviceTransport, end: End, tag: int, handle: Transfer) -> None:
        super().__init__(end, tag, handle)
        self._owner = owner

    def wait(self, timeout: float) -> Stamps:
        """Let what the current stream does later see the message.

        `sent` is when the sender's GPU had copied it, or its first piece, `completed` when it was
        in the host's memory: copies that keep up with the link are no part of the delay. Raises
        PeerLost, DeviceFailed if the driver refuses.
        """
        super().wait(timeout)
        self._owner.join(self.handle)
        return self.stamps

    def abort(self) -> None:
        self._owner.abort(self._end, self.handle)
