"""Carries IP packets between TUN devices, and holds back those that cross a slow link.

All in user space, so it works where the kernel has no netem. A packet waits in one heap until its
time has come; packets of one directed link keep their order, as they do on most real paths.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_adaptra.transport.rules import LinkRule

Link = tuple[int, int]
NETWORK = bytes((10, 77, 0))
MTU = 60_000  # few packets, for every one costs a system call on each side
QUEUE = 1.0  # seconds of traffic that a rate-limited link queues before it drops
_BATCH = 64  # packets read from one device in a row
_TICK = 0.05  # seconds between two looks at the time when nothing moves


def address(host: int) -> str:
    return ".".join(map(str, (*NETWORK, host + 1)))


@dataclass
class Traffic:
    """What crossed, and how well the relay kept time."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0  # on purpose, by a full queue, or because the other end was gone
    held: int = 0

    def __post_init__(self) -> None:
        self.late: Counter[int] = Counter()  # held packets by lateness in whole milliseconds

    def late_ms(self, share: float) -> int:
        """The lateness, in ms rounded up, that this share of the held packets kept to."""
        left = share * sum(self.late.values())
        for ms, count in sorted(self.late.items()):
            left -= count
            if left <= 0:
                return ms + 1
        return 0


class Relay:
    """One event loop over all devices. `devices[i]`: the TUN device of host i, non-blocking."""

    def __init__(self, devices: Sequence[int], seed: int = 0) -> None:
        self.traffic = Traffic()
        self._devices = list(devices)
        self._rules: dict[Link, LinkRule] = {}
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._free: dict[Link, float] = {}  # when a link has put out its last packet
        self._due: dict[Link, float] = {}
        self._random = random.Random(seed)
        self._poll = select.epoll()
        self._host = {fd: i for i, fd in enumerate(self._devices)}
        self._watched: dict[int, Callable[[], object]] = {}
        for fd in self._devices:
            self._poll.register(fd, select.EPOLLIN)

    def shape(self, rules: Mapping[Link, LinkRule]) -> None:
        """The slow links from now on; packets that are held already keep their time."""
        self._rules = dict(rules)

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Call `ready` from the loop whenever this descriptor can be read or its peer is gone."""
        self._watched[fd] = ready
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Carry packets until `until()` or for so many seconds; whether `until` came true."""
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() >= end:
                return False
            self._step()
        return True

    def close(self) -> None:
        self._poll.close()

    def _step(self) -> None:
        now = time.monotonic()
        heap = self._heap
        while heap and heap[0][0] <= now:
            due, _, target, packet = heapq.heappop(heap)
            self._put(target, packet)
            self.traffic.late[int(1e3 * (now - due))] += 1
        wait = min(_TICK, max(0.0, heap[0][0] - now)) if heap else _TICK
        for fd, _ in self._poll.poll(wait):
            source = self._host.get(fd)
            if source is None:
                self._watched[fd]()
                continue
            for _ in range(_BATCH):
                try:
                    packet = os.read(fd, 65536)
                except BlockingIOError:
                    break
                except OSError:  # the host is gone
                    self._poll.unregister(fd)
                    break
                self._take(source, packet)

    def _take(self, source: int, packet: bytes) -> None:
        ours = len(packet) >= 20 and packet[0] >> 4 == 4 and packet[16:19] == NETWORK
        target = packet[19] - 1 if ours else -1
        if not 0 <= target < len(self._devices):
            return  # IPv6 neighbour discovery, multicast
        traffic, link = self.traffic, (source, target)
        traffic.packets += 1
        traffic.bytes += len(packet)
        rule = self._rules.get(link)
        if rule is None and self._due.get(link, 0.0) <= time.monotonic():
            self._put(target, packet)
            return
        due = now = time.monotonic()
        if rule is not None:
            if rule.loss and self._random.random() < rule.loss:
                traffic.lost += 1
                return
            due = max(now, self._free.get(link, 0.0)) + len(packet) / rule.bandwidth
            if due > now + QUEUE:
                traffic.lost += 1
                return
            self._free[link] = due
            due += max(0.0, rule.delay + rule.jitter * self._random.gauss(0.0, 1.0))
        due = self._due[link] = max(due, self._due.get(link, 0.0))
        self._count += 1
        traffic.held += 1
        heapq.heappush(self._heap, (due, self._count, target, packet))

    def _put(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._devices[target], packet)
        except OSError:  # a full queue, or a host that is gone
            self.traffic.lost += 1
