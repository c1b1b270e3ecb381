"""Messages between neighbours that only measure their links: small ones, and a few large ones.

A small one shows the delay of a link. While Megatron's own messages are in use, none of ours shows
what our engine makes of its bandwidth, so now and then one is as large as those of the pipeline.

A failure ends only the probes of one link, whose bandwidth is then not known any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.base import Stamps, Transport, Work

NBYTES = 8
AHEAD = 8  # receives posted in advance: on a very slow link several probes are under way
KEPT = 64  # sends whose works are kept, and calls after which a probe is lost
TAGS = 1 << 30  # of the small ones; those of the large ones follow
SHARE = 0.01  # of a link's bytes that large ones may take, ...
FIRST = 5  # ... except the first ones, after which fewer are sent to make up for them


@dataclass
class _Neighbour:
    expected: deque[Work] = field(default_factory=deque)
    sent: int = 0
    posted: int = 0
    large_sent: int = 0
    large: Work | None = None
    large_posted: int = 0


class LinkProbes:
    """A prober measures the links of one worker. All workers call `exchange` equally often.

    Args:
        transport: for messages in the host's memory; `close` closes it.
        neighbours: workers to measure the links with, in both directions.
        nbytes: bytes of a large probe, as of a message of the pipeline; 0: there are none.

    `faults`: by neighbour that is not measured any more, why.
    """

    def __init__(self, transport: Transport, neighbours: Sequence[int], nbytes: int = 0) -> None:
        self._transport, self._nbytes = transport, nbytes
        self._sent: deque[Work] = deque(maxlen=KEPT)
        self._large = 0
        self._allowed = 0.0  # large ones to each neighbour
        self._neighbours: dict[int, _Neighbour] = {}
        self.faults: dict[int, str] = {}
        for worker in neighbours:
            self.add(worker)

    def add(self, worker: int) -> None:
        """Measure the link with `worker`, too, which may begin some calls earlier or later."""
        if worker not in self._neighbours:
            self._neighbours[worker] = _Neighbour()
            self._each(worker, self._post)

    def exchange(self, messages: float = 0.0) -> None:
        """Send a small one to each neighbour, and a large one where that is due.

        `messages`: how many messages an iteration sends over each of these links by Megatron's own
        ways; 0 where they are ours, which are large enough, or after an iteration's first call.
        """
        for worker, neighbour in self._neighbours.items():
            self._each(worker, self._send, NBYTES, neighbour.sent % TAGS)
            neighbour.sent += 1
        if not messages or not self._nbytes:
            return
        self._allowed = min(1.0, self._allowed + SHARE * messages)
        if self._allowed < 1.0 and self._large >= FIRST:
            return
        self._allowed -= 1.0
        self._large += 1
        for worker, neighbour in self._neighbours.items():
            # After all small ones, which would wait behind it.
            self._each(worker, self._send, self._nbytes, TAGS + neighbour.large_sent % TAGS)
            neighbour.large_sent += 1

    def take(self) -> list[tuple[int, Stamps]]:
        """Return source and stamps of each probe that has come since the last call."""
        found: list[tuple[int, Stamps]] = []
        for worker in self._neighbours:
            self._each(worker, self._take, found)
        return found

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def _each(self, stage: int, call: Callable[..., None], *args: Any) -> None:
        """Run `call(stage, *args)`, whose PeerLost ends the probes of this neighbour alone."""
        if stage not in self.faults:
            try:
                call(stage, *args)
            except PeerLost as error:
                self.faults[stage] = str(error)

    def _send(self, stage: int, nbytes: int, tag: int) -> None:
        self._sent.append(self._transport.isend(_blank(nbytes), stage, tag))

    def _take(self, stage: int, found: list[tuple[int, Stamps]]) -> None:
        neighbour = self._neighbours[stage]
        while neighbour.expected and neighbour.expected[0].done():
            found.append((stage, _stamps(neighbour.expected.popleft(), NBYTES)))
        if neighbour.large is not None and neighbour.large.done():
            found.append((stage, _stamps(neighbour.large, self._nbytes)))
            neighbour.large = None
        if neighbour.sent - (neighbour.posted - len(neighbour.expected)) > KEPT:
            raise PeerLost(f"none of the last {KEPT} has come")
        self._post(stage)

    def _post(self, stage: int) -> None:
        neighbour = self._neighbours[stage]
        while len(neighbour.expected) < AHEAD:
            work = self._transport.irecv(_blank(NBYTES), stage, neighbour.posted % TAGS)
            neighbour.expected.append(work)
            neighbour.posted += 1
        if self._nbytes and neighbour.large is None:
            tag = TAGS + neighbour.large_posted % TAGS
            neighbour.large = self._transport.irecv(_blank(self._nbytes), stage, tag)
            neighbour.large_posted += 1


def _blank(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _stamps(work: Work, nbytes: int) -> Stamps:
    stamps = work.wait(0.0)
    if not math.isfinite(stamps.completed - stamps.sent):
        raise PeerLost(f"sent at {stamps.sent}, there at {stamps.completed}: that is no time")
    stamps.nbytes = nbytes
    return stamps
