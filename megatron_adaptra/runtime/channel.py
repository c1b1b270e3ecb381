"""Small JSON messages between the leader of a pipeline and its other stages."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch

from megatron_adaptra.transport.base import Transport, Work

_FRAME = 4096  # bytes that always travel; what does not fit follows as a second message
_HEAD = 8  # of these, the length of the whole
_TAKEN_WITHIN = 60.0  # seconds


class Channel:
    """Ordered messages to and from one `peer` of a transport."""

    def __init__(self, transport: Transport, peer: int) -> None:
        self._transport, self.peer = transport, peer
        self._sent = self._received = 0
        self._works: list[Work] = []
        self._sending = threading.Lock()  # the training thread reports, the control thread answers

    def send(self, message: dict[str, Any]) -> None:
        """Send `message`, which JSON can hold. Returns at once unless eight are on their way.

        Raises PeerLost if the oldest of these has not been taken after 60 seconds.
        """
        with self._sending:
            self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        frame = bytearray(_FRAME)
        frame[:_HEAD] = len(data).to_bytes(_HEAD, "little")
        first, rest = data[: _FRAME - _HEAD], data[_FRAME - _HEAD :]
        frame[_HEAD : _HEAD + len(first)] = first
        self._put(bytes(frame))
        if rest:
            self._put(rest)

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next message. Raises PeerLost when none comes in `timeout` seconds."""
        frame = self._get(_FRAME, timeout)
        length = int.from_bytes(frame[:_HEAD], "little")
        data = frame[_HEAD : _HEAD + length]
        if len(data) < length:
            data += self._get(length - len(data), timeout)
        message: dict[str, Any] = json.loads(data)
        return message

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until the peer has what was sent, `timeout` seconds for each message.

        Raises PeerLost for one that it does not take.
        """
        for work in self._works:
            work.wait(timeout)
        self._works = []

    def _put(self, data: bytes) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._works.append(self._transport.isend(tensor, self.peer, self._sent))
        self._sent += 1
        # Gloo wants a send to be waited for before its memory goes; old ones are long done.
        if len(self._works) > 8:
            self._works.pop(0).wait(_TAKEN_WITHIN)

    def _get(self, size: int, timeout: float) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        work = self._transport.irecv(buffer, self.peer, self._received)
        self._received += 1
        work.wait(timeout)
        return bytes(buffer.numpy().tobytes())
