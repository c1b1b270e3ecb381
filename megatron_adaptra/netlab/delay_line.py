"""Holds every packet between the hub's ports back for the same time, where the kernel cannot.

Rates stay the kernel's: its token buckets are at both ends of a port, on either side of this line.
A packet is whatever TCP hands to a port at once, up to 32 kB, with what the kernel needs to cut it
into packets at the other end (`PACKET_VNET_HDR` of packet(7)), so that there are few of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from megatron_adaptra.netlab.network import PREFIX

_ALL = 0x0003  # every protocol (linux/if_ether.h)
_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_RECEIVE_ANY, _SEND_ANY = 33, 32  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
_BUFFER = 1 << 28  # bytes
_OFFLOAD, _ETHERNET = 10, 14  # bytes of virtio's head, and of Ethernet's
_LARGEST = 1 << 17
_TICK = 0.05  # seconds between two looks at whether it is over
_BATCH = 64  # packets taken from one port in a row
# Where a packet says which host it is for: IPv4, and ARP, which asks for or answers one.
_TARGETS = {b"\x08\x00": _OFFLOAD + _ETHERNET + 16, b"\x08\x06": _OFFLOAD + _ETHERNET + 24}


class DelayLine:
    """Joins the devices `ports` of this thread's namespace in place of a bridge, until `close`.

    Each packet leaves `delay` seconds after it came, on a thread of its own. `ports[i]` leads to
    host i. Raises OSError.
    """

    def __init__(self, ports: Sequence[str], delay: float) -> None:
        self._delay, self._over = delay, False
        self._waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        self._sockets: list[socket.socket] = []
        try:
            for name in ports:
                self._sockets.append(_tap(name))
        except OSError:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="adaptra-delay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing crosses any more."""
        self._over = True
        self._thread.join()
        self._release()

    def _run(self) -> None:
        _go_first()
        while not self._over:
            # Not epoll, whose timeouts are whole milliseconds.
            ready, _, _ = select.select(self._sockets, [], [], min(_TICK, self._deliver()))
            for each in ready:
                self._read(each)

    def _release(self) -> None:
        for each in self._sockets:
            each.close()

    def _read(self, port: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH):
                packet = port.recv(_LARGEST)
                if (target := self._target(packet)) is not None:
                    self._waiting.append((time.monotonic() + self._delay, target, packet))

    def _target(self, packet: bytes) -> socket.socket | None:
        at = _TARGETS.get(packet[_OFFLOAD + 12 : _OFFLOAD + _ETHERNET], len(packet))
        if packet[at : at + 3] != PREFIX or not 0 < packet[at + 3] <= len(self._sockets):
            return None  # of no host
        return self._sockets[packet[at + 3] - 1]

    def _deliver(self) -> float:
        """Put out what is due; the seconds until the next packet is."""
        waiting, now = self._waiting, time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # its queue is full, or it is gone
                target.send(packet)
        return max(0.0, waiting[0][0] - now) if waiting else math.inf


def _go_first() -> None:
    """Where this process has real-time priority, have this thread run before all ranks."""
    policy = os.sched_getscheduler(0)
    if policy in (os.SCHED_RR, os.SCHED_FIFO):
        more = os.sched_getparam(0).sched_priority + 1
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, os.sched_param(more))


def _tap(name: str) -> socket.socket:
    """All that comes in on the device `name`, and a way out on it."""
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        tap.setblocking(False)
        tap.setsockopt(_PACKET, _VNET_HDR, 1)
        tap.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
        for option in (_RECEIVE_ANY, _SEND_ANY):
            tap.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        tap.bind((name, _ALL))
    except OSError:
        tap.close()
        raise
    return tap
