"""The interface of every point-to-point engine: tagged messages that never block the sender.

Messages are matched by tag, not by order. Every message carries the moment it was sent, so that
the receiver can distinguish a slow link from a late sender (`Stamps`). Clocks: CLOCK_MONOTONIC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Buffer = Any  # contiguous memory: a torch tensor, or in tests anything memoryview() takes


@dataclass(frozen=True)
class Traits:
    """A Traits describes the abilities of a transport.

    `rendezvous`: nothing moves before the receive is posted. `memory`: where messages may be, as
    torch names devices.
    """

    name: str
    rendezvous: bool
    memory: tuple[str, ...]


@dataclass
class Stamps:
    """Moments of a message in seconds of the monotonic clock; 0.0 for one that is still to come.

    `sent` on the sender's clock; `posted` and `completed` on the receiver's; `wanted` when compute
    first asked for the message. `eager`: it moved when it was sent, and so may be there before its
    receive is posted. `nbytes`: of the message, 0 where that is not known.
    """

    sent: float = 0.0
    posted: float = 0.0
    completed: float = 0.0
    wanted: float = 0.0
    eager: bool = False
    nbytes: int = 0

    @property
    def delay(self) -> float:
        """Seconds on the way: from when it could move to when it was there."""
        return self.completed - (self.sent if self.eager else max(self.sent, self.posted))


class Work(Protocol):
    """A send or a receive under way."""

    stamps: Stamps

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""

    def wait(self, timeout: float) -> Stamps:
        """Block until it is over.

        Args:
            timeout: seconds for this call; the message itself stays under way.

        Raises:
            PeerLost: it failed or was aborted, or the timeout, with peer and tag.
        """

    def abort(self) -> None:
        """Give up: a thread that waits gets PeerLost."""


class Transport(Protocol):
    """A tagged point-to-point engine between a rank and its peers (any integers)."""

    traits: Traits

    def isend(self, buffer: Buffer, peer: int, tag: int) -> Work:
        """Send a copy of a buffer, without blocking.

        Args:
            buffer: may be changed or freed as soon as this returns.
            peer: the receiver.
            tag: 31 bits; unique among the messages under way between two ranks.

        Returns:
            Keep it and wait for it some time: a send whose Work is dropped may be cancelled.

        Raises:
            PeerLost: this side is closed.
        """

    def irecv(self, buffer: Buffer, peer: int, tag: int) -> Work:
        """Post a receive, without blocking.

        Args:
            buffer: contiguous, of the message's size; belongs to the transport until the Work ends.
            peer: the sender.
            tag: as the sender gave it.

        Raises:
            PeerLost: this side is closed.
            ValueError: the buffer is not contiguous.
        """

    def close(self) -> None:
        """Release everything; aborts what is still under way. May be called twice."""
