"""Measurements of a laboratory's links, by packets that cross them.

All hosts share one clock, so one way is measured, not half of a round trip.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, pstdev
from typing import Any

from megatron_adaptra.emulate.rules import LinkRule
from megatron_adaptra.netlab.network import QUEUE, address

PINGS = 40
_GAP = 0.004  # seconds between two of them
_PORT = 7077
_BULK = 8000  # bytes of a packet that measures bandwidth
_BULK_SECONDS = 0.25
_MOST_BULK = 4e6  # bytes
_HEAD = struct.Struct("<d")
_SOCKET_BUFFER = 33  # SO_RCVBUFFORCE: root may exceed the system's limit


@dataclass(frozen=True)
class Measured:
    """A measurement holds a directed link's `rule` and its real seconds, share lost and bytes/s."""

    rule: LinkRule
    delay: float
    jitter: float
    loss: float
    bandwidth: float

    @property
    def fault(self) -> str:
        """The difference from the rule, in words; empty where the link does what was asked."""
        rule = self.rule
        if math.isinf(self.delay):
            return "no packet came through"
        noise = 3 * rule.jitter / math.sqrt(PINGS)
        if abs(self.delay - rule.delay) > max(1e-3, 0.05 * rule.delay) + noise:
            return f"asked {1e3 * rule.delay:g} ms, got {1e3 * self.delay:.1f} ms"
        if math.isfinite(rule.bandwidth) and not 0.9 < self.bandwidth / rule.bandwidth < 1.1:
            return f"asked {rule.bandwidth / 1e6:g} MB/s, got {self.bandwidth / 1e6:.1f} MB/s"
        return ""


def tasks(host: int) -> Mapping[str, Any]:
    """Return the tasks of host number `host` in a measurement: send packets, and collect them."""
    box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    box.bind((address(host), _PORT))
    with contextlib.suppress(OSError):
        box.setsockopt(socket.SOL_SOCKET, _SOCKET_BUFFER, int(2 * _MOST_BULK))

    def send(task: Mapping[str, Any]) -> dict[str, Any]:
        to, nbytes = (address(task["target"]), _PORT), task["bytes"]
        for _ in range(task["count"]):
            box.sendto(_HEAD.pack(time.monotonic()).ljust(nbytes, b"\0"), to)
            if task["gap"]:
                time.sleep(task["gap"])
        return {}

    def collect(task: Mapping[str, Any]) -> dict[str, Any]:
        """Return when each packet left and came, in seconds; end when none comes for a while."""
        seen: list[tuple[float, float]] = []
        box.settimeout(task["timeout"])
        with contextlib.suppress(TimeoutError):
            while len(seen) < task["count"]:
                data = box.recv(65536)
                seen.append((_HEAD.unpack_from(data)[0], time.monotonic()))
        return {"seen": seen}

    return {"send": send, "collect": collect}


def rounds_of(rule: LinkRule, burst: int = 0) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the tasks of the rule's source and target, per round; `burst`: as in `result`."""
    timeout = 0.5 + 2 * rule.delay + 6 * rule.jitter
    rounds = [(PINGS, 64, _GAP)]
    if math.isfinite(rule.bandwidth):
        volume = min(_MOST_BULK, rule.bandwidth * min(_BULK_SECONDS, 0.8 * QUEUE))
        rounds.append((max(8, round(volume / _BULK)) + _first(burst), _BULK, 0.0))
    return [
        (
            {"task": "send", "target": rule.target, "count": n, "bytes": size, "gap": gap},
            {"task": "collect", "count": n, "timeout": timeout},
        )
        for n, size, gap in rounds
    ]


def result(rule: LinkRule, rounds: list[list[tuple[float, float]]], burst: int = 0) -> Measured:
    """Compute a link's delay, jitter, loss and bandwidth from `rounds`.

    Args:
        rule: the delay, jitter, loss and bandwidth that were asked for.
        rounds: of each packet that came, when it was sent and came, seconds.
        burst: bytes that a link lets pass at once after a pause, which its rate does not count.
    """
    pings = [arrived - sent for sent, arrived in rounds[0]]
    bandwidth = math.inf
    arrivals = [arrived for _, arrived in rounds[1][_first(burst) :]] if len(rounds) > 1 else []
    if len(arrivals) > 1:
        packet = _BULK + 28  # with the heads of IP and UDP
        bandwidth = (len(arrivals) - 1) * packet / max(1e-9, arrivals[-1] - arrivals[0])
    return Measured(
        rule,
        delay=median(pings) if pings else math.inf,
        jitter=pstdev(pings) if pings else 0.0,
        loss=1 - len(pings) / PINGS,
        bandwidth=bandwidth,
    )


def _first(burst: int) -> int:
    """Return the number of the first packet of a bulk that the rate holds back."""
    return math.ceil(burst / _BULK)
