"""Small JSON messages between the leader of a pipeline and its other stages."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import BadMessage, PeerLost
from megatron_adaptra.transport.base import Transport, Work

_FRAME = 4096  # bytes: all frames have one size, so that what a frame says can break no receive
_HEAD = struct.Struct("<QQ")  # bytes of the message from here on; frames taken from the other side
_ROOM = _FRAME - _HEAD.size
LONGEST = 32 << 20  # bytes of a message
WINDOW = 256  # frames that the peer has not taken yet: then nothing is sent
ANY_RUN = -1  # the run of a message that says something of the connection alone
_CONFIRM = 64  # frames after which the peer gets a confirmation


class Channel:
    """A channel carries ordered messages to and from one `peer`; one thread may receive.

    Nothing here waits for the peer but `receive`, `flush` and `reopen`. `relink`: connects the
    transport anew, and returns whether it has before an event is set. `lost`: why no message can
    come, or empty. `last_frame`: when the last frame came, on the monotonic clock.
    """

    def __init__(
        self,
        transport: Transport,
        peer: int,
        relink: Callable[[threading.Event], bool] | None = None,
    ) -> None:
        self._transport, self.peer, self._relink = transport, peer, relink
        self._sending, self._reopening = threading.Lock(), threading.Lock()
        self._frame = torch.empty(_FRAME, dtype=torch.uint8)
        self._begin()

    def _begin(self) -> None:
        self.lost, self.last_frame = "", time.monotonic()
        self._works: deque[Work] = deque()  # sends that the peer has not taken, as far as is known
        self._sent = self._taken = 0  # frames, and those of them that the peer has taken
        self._received = self._confirmed = 0  # frames, and those of them that the peer knows of
        self._posted: Work | None = None  # the receive of the next frame
        self._data, self._left = bytearray(), 0  # of a message that has come in part

    @property
    def renews(self) -> bool:
        """True where the channel can be opened again when it is lost."""
        return self._relink is not None

    def reopen(self, over: threading.Event) -> bool:
        """Wait until a lost connection is whole again, or `over` is set; return whether it is.

        Messages that were under way are lost.
        """
        with self._reopening:
            if self.lost and (self._relink is None or not self._relink(over)):
                return False
            with self._sending:
                if self.lost:
                    self._begin()
            return True

    def send(self, message: dict[str, Any]) -> bool:
        """Send `message`, which JSON can hold; any thread may. False when it cannot be sent now.

        That is so where the peer does not take earlier messages, or is lost. Raises BadMessage for
        one of more than 32 MiB.
        """
        data = json.dumps(message).encode()
        if len(data) > LONGEST:
            raise BadMessage(f"a message of {len(data)} bytes; at most {LONGEST} can be sent")
        with self._sending:
            if self.lost or self._sent - self._taken >= WINDOW:
                return False
            try:
                self._forget_taken()
                for at in range(0, len(data), _ROOM):
                    self._put(len(data) - at, data[at : at + _ROOM])
            except PeerLost as error:
                self.lost = str(error)
                return False
        return True

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Return the next message; None if none comes within `timeout` seconds: ask again.

        Raises BadMessage for one that is no JSON object, after which others may come; PeerLost when
        none can come any more.
        """
        if self.lost:
            raise PeerLost(self.lost)
        deadline = time.monotonic() + timeout
        try:
            while self._frame_arrives(max(0.0, deadline - time.monotonic())):
                if self._take_frame(self._frame.numpy().tobytes()):
                    return _parsed(self._data)
        except PeerLost as error:
            self.send({"kind": "lost", "run": ANY_RUN})  # the other direction may be whole
            self.lost = self.lost or str(error)
            raise
        return None

    def flush(self) -> None:
        """Wait until the peer has what was sent, `waits.CLOSE` seconds in all.

        Raises PeerLost for what it does not take.
        """
        deadline = time.monotonic() + waits.CLOSE
        with self._sending:
            while self._works:
                self._works.popleft().wait(max(0.01, deadline - time.monotonic()))

    def _put(self, left: int, part: bytes) -> None:
        # Read once: more may come meanwhile, of which this frame says nothing.
        frame, received = bytearray(_FRAME), self._received
        _HEAD.pack_into(frame, 0, left, received)
        frame[_HEAD.size : _HEAD.size + len(part)] = part
        self._confirmed = received
        tensor = torch.frombuffer(frame, dtype=torch.uint8)
        self._sent += 1  # before it is: the answer may come at once
        self._works.append(self._transport.isend(tensor, self.peer, self._sent - 1))

    def _forget_taken(self) -> None:
        """Wait for sends that are over, as Gloo asks for before their memory is freed."""
        while self._works and self._sent - len(self._works) < self._taken:
            self._works.popleft().wait(waits.CLOSE)

    def _frame_arrives(self, timeout: float) -> bool:
        """Wait `timeout` seconds for a frame; return whether it came, else keep its receive."""
        if self._posted is None:
            self._posted = self._transport.irecv(self._frame, self.peer, self._received)
        try:
            self._posted.wait(timeout)
        except PeerLost:
            if not self._posted.done():
                return False
            self._posted.wait(0.0)  # it came at the last moment, or is lost indeed
        self._posted = None
        self._received += 1
        self.last_frame = time.monotonic()
        return True

    def _take_frame(self, frame: bytes) -> bool:
        """Add a frame to the message; return whether that is complete."""
        left, taken = _HEAD.unpack_from(frame)
        if not 0 < left <= LONGEST or self._left not in (0, left) or taken > self._sent:
            raise PeerLost(f"from {self.peer}: a frame that cannot be ({left}, {taken})")
        if not self._left:
            self._data = bytearray()
        self._taken = max(self._taken, taken)
        part = frame[_HEAD.size : _HEAD.size + left]
        self._data += part
        self._left = left - len(part)
        if self._received - self._confirmed >= _CONFIRM:
            self.send({"kind": "alive", "run": ANY_RUN})
        return self._left == 0


def _parsed(data: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"no JSON: {str(error)[:80]}") from error
    if not isinstance(message, dict):
        raise BadMessage(f"a {type(message).__name__}, no object")
    return message
