"""Carries IP packets between TUN devices, and holds back those that cross a slow link.

All in user space, so it works where the kernel has no netem. A packet waits in one heap until its
time has come; packets of one directed link keep their order, as they do on most real paths.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import math
import os
import random
import struct
import time
from collections.abc import Mapping, Sequence
from functools import partial

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.emulate.rules import LinkRule
from megatron_adaptra.netlab.loop import Loop
from megatron_adaptra.netlab.namespace import bring_up, entered
from megatron_adaptra.netlab.network import INTERFACE, MTU, PREFIX, QUEUE, Link, Traffic, address

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000
_BATCH = 64  # packets read from one device in a row


class Relay:
    """`namespaces[i]`: of host i. The packets move when the loop runs. `seed`: of jitter and loss.

    Raises AdaptraError where there are no TUN devices.
    """

    def __init__(self, namespaces: Sequence[int], loop: Loop, seed: int = 0) -> None:
        self.traffic = Traffic()
        self._devices: list[int] = []
        self._loop = loop
        self._rules: dict[Link, LinkRule] = {}
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._free: dict[Link, float] = {}  # when a link has put out its last packet
        self._due: dict[Link, float] = {}
        self._random = random.Random(seed)
        try:
            for host, namespace in enumerate(namespaces):
                with entered(namespace):
                    self._devices.append(_device(address(host)))
        except OSError as error:
            self.close()
            raise AdaptraError(
                f"the relay needs a TUN device on each host and did not get one: {error}"
            ) from None
        for host, fd in enumerate(self._devices):
            loop.watch(fd, partial(self._read, host, fd))
        loop.work = self._deliver

    def shape(self, rules: Mapping[Link, LinkRule]) -> None:
        """Make the links of `rules` slow, and all others healthy."""
        self._rules = dict(rules)

    def close(self) -> None:
        """Close the devices."""
        for fd in self._devices:
            self._loop.unwatch(fd)
            os.close(fd)
        self._devices = []

    def _deliver(self) -> float:
        """Put out what is due; the seconds until the next packet is."""
        now = time.monotonic()
        heap = self._heap
        while heap and heap[0][0] <= now:
            due, _, target, packet = heapq.heappop(heap)
            self._put(target, packet)
            self.traffic.late[int(1e3 * (now - due))] += 1
        return max(0.0, heap[0][0] - now) if heap else math.inf

    def _read(self, source: int, fd: int) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(fd, 65536)
            except BlockingIOError:
                break
            except OSError:  # the host is gone
                self._loop.unwatch(fd)
                break
            self._take(source, packet)

    def _take(self, source: int, packet: bytes) -> None:
        ours = len(packet) >= 20 and packet[0] >> 4 == 4 and packet[16:19] == PREFIX
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


def _device(own: str) -> int:
    """A TUN device that is up, with this address; the descriptor moves its packets."""
    with contextlib.ExitStack() as undo:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        undo.callback(os.close, fd)
        request = struct.pack("16sH22s", INTERFACE.encode(), _TUN_WITHOUT_HEADER, b"")
        fcntl.ioctl(fd, _TUNSETIFF, request)
        bring_up(INTERFACE, own, MTU)
        undo.pop_all()
    return fd
