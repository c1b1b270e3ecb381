"""What a measurement of all-reduces with late ranks is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_adaptra.bench.options import Options
from megatron_adaptra.errors import BadInput
from megatron_adaptra.netlab.ports import payload
from megatron_adaptra.sim.ports import Ports
from megatron_adaptra.transport.rules import PortRule, parse_port_rules
from megatron_adaptra.units import parse_rate

NATIVE = "native"  # gloo's own
RING = "ring"  # of ours, pipelined
ALGORITHMS = (RING, "halving-doubling", "sorted-chain", "direct", "stragglar", NATIVE)
MOST_LATE = 60.0  # seconds
_DELAY = 0.3e-3  # seconds from a host to another one: two devices, and two processes that wake up
_TURN = 64 << 10  # bytes: what the kernel takes from one TCP connection at a time


@dataclass(frozen=True)
class AllReduceOptions(Options):
    """As Options, with who is late and what ports pass.

    Args:
        hosts: rates of hosts, the rules of a laboratory; empty: this machine as it is.
        late: seconds that `late_ranks` come after the others, each a case of its own. Empty: 0,
            and the time of one buffer through a port.
        late_ranks: their numbers; they own nothing in `direct`, also where `late` is 0.
        algorithms: of ALGORITHMS.
    """

    hosts: tuple[str, ...] = ()
    late: tuple[float, ...] = ()
    late_ranks: tuple[int, ...] = ()
    algorithms: tuple[str, ...] = ALGORITHMS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.link and self.hosts:
            raise BadInput("--host", self.hosts[0], "it has no place beside --link")
        for seconds in self.late:
            if not 0 <= seconds <= MOST_LATE:
                raise BadInput("--late", seconds, f"it has to be 0 to {MOST_LATE:g} seconds")
        for rank in self.late_ranks:
            if not 0 <= rank < self.ranks:
                allowed = f"the ranks are 0 to {self.ranks - 1}"
                raise BadInput("--late-ranks", rank, allowed)
        if len(set(self.late_ranks)) == self.ranks:
            raise BadInput("--late-ranks", list(self.late_ranks), "one rank has to be in time")
        for name in self.algorithms:
            if name not in ALGORITHMS:
                allowed = f"it has to be of {', '.join(ALGORITHMS)}"
                raise BadInput("--algorithms", name, allowed)
        _ = self.ports

    @property
    def ports(self) -> list[PortRule]:
        """Rates of the laboratory's hosts, always in force. Raises BadInput."""
        rules = [r for text in self.hosts for r in parse_port_rules(text, self.ranks, "--host")]
        for rule in rules:
            if rule.first or math.isfinite(rule.end):
                raise BadInput("--host", ",".join(self.hosts), "the rate has to stay: leave out @")
        return rules

    @property
    def rates(self) -> list[float]:
        """Bytes per second that each rank's port passes each way; inf without a rate."""
        found: dict[int, float] = {}
        for rule in self.ports:
            found.setdefault(rule.host, rule.rate)
        return [found.get(rank, math.inf) for rank in range(self.ranks)]

    @property
    def where(self) -> str:
        """The network that it is measured on."""
        if self.link:
            return f"links of {self.link}"
        return f"hosts {' '.join(self.hosts)}" if self.hosts else "this machine"

    def at_half_rate(self) -> AllReduceOptions:
        """The same with half the rate of each host."""
        halved = []
        for text in self.hosts:
            host, _, rate = text.partition(":")
            halved.append(f"{host}:{parse_rate(rate, '--host') / 2e6:.6g}MB/s")
        return replace(self, hosts=tuple(halved))

    def clock(self) -> Ports | None:
        """The ranks' ports as the simulator takes them; None where none has a rate."""
        if not self.hosts:
            return None
        return Ports.equal([payload(rate) for rate in self.rates], _DELAY, turn=_TURN)

    def lateness(self, nbytes: int) -> tuple[float, ...]:
        """Seconds of lateness to measure a buffer of `nbytes` with."""
        rate = max(self.rates)
        return self.late or (0.0, nbytes / rate if math.isfinite(rate) else 0.02)
