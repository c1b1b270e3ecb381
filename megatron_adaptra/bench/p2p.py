"""Messages between two ranks: each transport against gloo and against a plain copy of memory.

A burst of messages goes one way, or both ways at once, with at most UNDER_WAY of them under way; it
takes from its first send until its last message is there. Over a slow link a burst is one message.
The transports take turns, so that all of them see the same machine.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.bench.clock import Clock, in_turns
from megatron_adaptra.bench.options import Options
from megatron_adaptra.bench.paths import TIMEOUT, BenchPath, EnginePath, GlooPath, Pending
from megatron_adaptra.bench.sizes import SEND, busbw
from megatron_adaptra.transport.engine.rails import rails

ONE_WAY, BOTH_WAYS = "one way", "both ways"
UNDER_WAY = 4  # messages at most
_MEMORY = 512 << 20  # bytes of them
_BURST, _FEWEST, _MOST = 64 << 20, 2, 100  # bytes of a burst, about, and messages
_WARM = 3  # bursts before those that count: connections have to find their speed


def rows(options: Options, rank: int) -> list[dict[str, Any]]:
    """Measure as `rank` 0 or 1, and return a row for each size, direction and transport."""
    peer, clock = 1 - rank, Clock(options)
    # Hosts of a laboratory share no memory, and RDMA would go around its links.
    near = not options.link and clock.machines[0] == clock.machines[1]
    engines = [EnginePath(kind, rank, peer) for kind in (["shm"] if near else []) + ["tcp"]]
    ports = [] if options.link else rails(speaks=rank == 0)
    if clock.latest(float(not ports)) == 0:  # both have some
        engines.append(EnginePath("verbs", rank, peer, ports))
    paths: list[BenchPath] = [GlooPath(peer), *engines]
    try:
        found = []
        for nbytes in options.sizes:
            for direction in (ONE_WAY, BOTH_WAYS):
                burst = _Burst(options, clock, nbytes, rank, direction == BOTH_WAYS)
                costs = _costs(burst, paths, options.rounds)
                found += [_row(name, nbytes, direction, costs) for name in costs]
        dist.barrier()  # the other side has all of its messages
        return found
    finally:
        for engine in engines:
            engine.close()


def _row(name: str, nbytes: int, direction: str, costs: dict[str, float]) -> dict[str, Any]:
    return {
        "transport": name,
        "bytes": nbytes,
        "direction": direction,
        "mb_per_s": nbytes / costs[name] / 1e6,
        "us_per_message": 1e6 * costs[name],
        "busbw_gb_per_s": busbw(SEND, nbytes, costs[name]),
        "ratio_to_gloo": costs["gloo"] / costs[name],
        "ratio_to_copy": costs["copy"] / costs[name],
    }


def _costs(burst: _Burst, paths: Sequence[BenchPath], rounds: int) -> dict[str, float]:
    """Return by transport the median seconds of a message, or of one there and one back."""
    seconds: dict[str, list[float]] = {}
    for path in paths:
        burst.prepare(path)
    for _, turn in in_turns([*paths, None], rounds):  # None: copies
        spent = burst.copies() if turn is None else burst.run(turn)
        seconds.setdefault("copy" if turn is None else turn.name, []).append(spent)
    return {name: median(each) / burst.count for name, each in seconds.items()}


class _Burst:
    """A burst sends `count` messages of `nbytes` from rank 0 to 1 or, if `both`, each way."""

    def __init__(self, options: Options, clock: Clock, nbytes: int, rank: int, both: bool) -> None:
        self.count = 1 if options.link else max(_FEWEST, min(_MOST, _BURST // nbytes))
        self._clock, self._nbytes, self._rank = clock, nbytes, rank
        self._sends, self._receives = both or rank == 0, both or rank == 1
        self._width = max(1, min(UNDER_WAY, self.count, _MEMORY // nbytes))
        self._sources: dict[str, list[torch.Tensor]] = {}
        self._target = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self._width)]
        self._posted: deque[Pending] = deque()

    def prepare(self, path: BenchPath) -> None:
        """Warm the path up, and check that it alters no message; AdaptraError if it does."""
        self._sources[path.name] = [path.memory(self._nbytes) for _ in range(self._width)]
        for number, source in enumerate(self._sources[path.name]):
            source.copy_(self._content(number, self._rank))
        for _ in range(_WARM):
            self.run(path)
        for number, target in enumerate(self._target) if self._receives else ():
            # The last burst has filled each target with one of its last messages.
            if not torch.equal(target, self._content(number, 1 - self._rank)):
                raise AdaptraError(f"{path.name}: a message of {self._nbytes} bytes came wrong")
            target.zero_()

    def run(self, path: BenchPath) -> float:
        """Return the seconds from first send to last arrival, the same on all ranks."""
        if self._receives:  # gloo moves nothing before that
            for number in range(self._width):
                self._post(path, number)
        begin = self._clock.start_together()
        sent: deque[Pending] = deque()
        for number in range(self.count + self._width - 1):
            if self._sends and number < self.count:
                if len(sent) == self._width:
                    sent.popleft().wait(TIMEOUT)
                source = self._sources[path.name][number % self._width]
                sent.append(path.send(source, number))
            if self._receives and number >= self._width - 1:
                self._posted.popleft().wait(TIMEOUT)
                if number + 1 < self.count:
                    self._post(path, number + 1)
        end = self._clock.now() if self._receives else -math.inf
        while sent:
            sent.popleft().wait(TIMEOUT)
        return self._clock.latest(end) - begin

    def copies(self) -> float:
        """Return the seconds of as many copies of memory, on each rank that would receive."""
        begin = self._clock.start_together()
        for number in range(self.count if self._receives else 0):
            source, target = self._sources["gloo"][0], self._target[number % self._width]
            ctypes.memmove(target.data_ptr(), source.data_ptr(), self._nbytes)
        return self._clock.latest(self._clock.now() if self._receives else -math.inf) - begin

    def _post(self, path: BenchPath, number: int) -> None:
        self._posted.append(path.receive(self._target[number % self._width], number))

    def _content(self, number: int, rank: int) -> torch.Tensor:
        """Return the bytes of a rank's messages number, number + width and so on, from a seed."""
        seed = torch.Generator().manual_seed(2 * number + rank)
        return torch.randint(0, 256, (self._nbytes,), dtype=torch.uint8, generator=seed)
