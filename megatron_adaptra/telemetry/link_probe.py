"""Small messages between neighbours that only measure their links.

While Megatron's own messages are in use, none of ours measures a link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_adaptra.transport.base import Stamps, Transport, Work

NBYTES = 8
AHEAD = 4  # receives that stand posted: of a very slow link several probes are under way
KEPT = 64  # sends whose works are kept
TAGS = 1 << 30


@dataclass
class _Neighbour:
    expected: deque[Work] = field(default_factory=deque)
    posted: int = 0


class LinkProbes:
    """Of one stage. All stages call `exchange` equally often.

    Args:
        transport: for messages in the host's memory; `close` closes it.
        neighbours: stages to measure the links with, in both directions.
    """

    def __init__(self, transport: Transport, neighbours: Sequence[int]) -> None:
        self._transport = transport
        self._sent: deque[Work] = deque(maxlen=KEPT)
        self._number = 0
        self._neighbours = {stage: _Neighbour() for stage in neighbours}
        for stage in neighbours:
            self._post(stage)

    def exchange(self) -> None:
        """Send one to each neighbour. Raises PeerLost."""
        tag = self._number % TAGS
        self._number += 1
        for stage in self._neighbours:
            self._sent.append(self._transport.isend(_blank(), stage, tag))

    def take(self) -> list[tuple[int, Stamps]]:
        """What has come since the last call, with its source. Raises PeerLost."""
        found = []
        for stage, neighbour in self._neighbours.items():
            while neighbour.expected and neighbour.expected[0].done():
                found.append((stage, neighbour.expected.popleft().wait(0.0)))
            self._post(stage)
        return found

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def _post(self, stage: int) -> None:
        neighbour = self._neighbours[stage]
        while len(neighbour.expected) < AHEAD:
            work = self._transport.irecv(_blank(), stage, neighbour.posted % TAGS)
            neighbour.expected.append(work)
            neighbour.posted += 1


def _blank() -> torch.Tensor:
    return torch.zeros(NBYTES, dtype=torch.uint8)
