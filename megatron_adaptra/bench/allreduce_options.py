"""What a measurement of all-reduces, or of their halves, with late ranks is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import parse_rate
from megatron_adaptra.bench.options import Options
from megatron_adaptra.emulate.rules import PortRule, parse_port_rules
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.model.shard_forms import SHARDED
from megatron_adaptra.netlab.ports import payload
from megatron_adaptra.sim.ports import Ports

NATIVE = "native"  # gloo's own
RING = "ring"  # of ours, pipelined
ALGORITHMS = (RING, "halving-doubling", "sorted-chain", "direct", "stragglar", NATIVE)
MOST_LATE = 60.0  # seconds
MOST_DELAY = 1.0
_DELAY = 0.3e-3  # seconds from a host to another one: two devices, and two processes that wake up
_TURN = 64 << 10  # bytes: what the kernel takes from one TCP connection at a time


def goal_of(text: str) -> Goal:
    """The goal that a user names. Raises BadInput for another `text`."""
    goals = [goal.value for goal in Goal]
    if text not in goals:
        raise BadInput("--collective", text, f"it has to be one of {', '.join(goals)}")
    return Goal(text)


def algorithms_of(goal: Goal) -> tuple[str, ...]:
    """Those that are compared for a `goal`."""
    return ALGORITHMS if goal is Goal.ALL_REDUCE else (*SHARDED, NATIVE)


@dataclass(frozen=True)
class AllReduceOptions(Options):
    """As Options, with who is late and what ports pass.

    Args:
        hosts: rates of hosts, the rules of a laboratory; empty: this machine as it is.
        late: seconds that `late_ranks` come after the others, each a case of its own. Empty: 0,
            and the time of one buffer through a port.
        late_ranks: their numbers; they own nothing in `direct`, also where `late` is 0.
        algorithms: of ALGORITHMS; of a reduce-scatter and an all-gather there are fewer.
        collective: which one, a value of Goal.
        delay: seconds from each host to each other one, beside `hosts`.
    """

    hosts: tuple[str, ...] = ()
    late: tuple[float, ...] = ()
    late_ranks: tuple[int, ...] = ()
    algorithms: tuple[str, ...] = ALGORITHMS
    collective: str = Goal.ALL_REDUCE.value
    delay: float = 0.0

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
            if name not in (found := algorithms_of(self.goal)):
                allowed = f"it has to be of {', '.join(found)}"
                raise BadInput("--algorithms", name, allowed)
        for size in self.sizes:
            if self.goal is not Goal.ALL_REDUCE and size % (4 * self.ranks):
                allowed = f"{self.ranks} equal shards need a multiple of {4 * self.ranks} bytes"
                raise BadInput("--sizes", size, allowed)
        if not 0 <= self.delay <= MOST_DELAY:
            allowed = f"it has to be 0 to {MOST_DELAY:g} seconds"
            raise BadInput("--delay", self.delay, allowed)
        if self.delay and not self.hosts:
            raise BadInput("--delay", self.delay, "it needs --host; --link has a delay of its own")
        _ = self.ports

    @property
    def goal(self) -> Goal:
        """Of `collective`. Raises BadInput."""
        return goal_of(self.collective)

    @property
    def ports(self) -> list[PortRule]:
        """Rates of the laboratory's hosts, always in force. Raises BadInput."""
        rules = [r for text in self.hosts for r in parse_port_rules(text, self.ranks, "--host")]
        for rule in rules:
            if rule.first or math.isfinite(rule.end):
                raise BadInput("--host", ",".join(self.hosts), "the rate has to stay: leave out @")
        return rules

    @property
    def apart(self) -> float:
        """Seconds from each host to each other one."""
        return self.delay

    @property
    def rates(self) -> list[float]:
        """Bytes per second that each rank's port passes each way; inf without a rate."""
        found: dict[int, float] = {}
        for rule in self.ports:
            found.setdefault(rule.host, rule.rate)
        return [found.get(rank, math.inf) for rank in range(self.ranks)]

    @property
    def slowest(self) -> int:
        """The rank whose port passes least; the last one of equals."""
        return min(range(self.ranks), key=lambda rank: (self.rates[rank], -rank))

    @property
    def where(self) -> str:
        """The network that it is measured on."""
        if self.link:
            return f"links of {self.link}"
        over = f" over {1e3 * self.delay:g} ms" if self.delay else ""
        return f"hosts {' '.join(self.hosts)}{over}" if self.hosts else "this machine"

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
        rates = [payload(rate) for rate in self.rates]
        return Ports.equal(rates, _DELAY + self.delay, turn=_TURN)

    def lateness(self, nbytes: int) -> tuple[float, ...]:
        """Seconds of lateness to measure a buffer of `nbytes` with."""
        rate = max(self.rates)
        return self.late or (0.0, nbytes / rate if math.isfinite(rate) else 0.02)
