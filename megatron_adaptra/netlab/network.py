"""Parts that all networks of a laboratory share: addresses, links, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_adaptra.emulate.rules import LinkRule

Link = tuple[int, int]  # source, target
PREFIX = bytes((10, 77, 0))
MTU = 60_000  # few packets, for every one costs time
QUEUE = 1.0  # seconds of traffic that a rate-limited link queues before it drops
WAITING = 5000  # packets that a device may hold
INTERFACE = "eth0"  # of every host


def address(host: int) -> str:
    """The IP address of host number `host`."""
    return ".".join(map(str, (*PREFIX, host + 1)))


def subnet() -> str:
    """The network of all hosts."""
    return f"{'.'.join(map(str, PREFIX))}.0/24"


@dataclass
class Traffic:
    """Traffic counts packets that crossed a network and, by a relay, how late they came."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0  # on purpose, by a full queue, or because the other end was gone
    held: int = 0  # by the relay; netem does not say

    def __post_init__(self) -> None:
        self.late: Counter[int] = Counter()  # held packets by lateness in whole milliseconds

    def late_ms(self, share: float) -> int:
        """Return the lateness, in ms rounded up, that this `share` of held packets kept to."""
        left = share * sum(self.late.values())
        for ms, count in sorted(self.late.items()):
            left -= count
            if left <= 0:
                return ms + 1
        return 0


class Network(Protocol):
    """A network joins the hosts' network namespaces; `shaper.build` makes one."""

    @property
    def traffic(self) -> Traffic:
        """The traffic that has crossed until now."""
        ...

    def shape(self, rules: Mapping[Link, LinkRule]) -> None:
        """Make the links of `rules` slow from now on; packets that are held keep their time."""

    def close(self) -> None:
        """Take the network apart."""
        ...
