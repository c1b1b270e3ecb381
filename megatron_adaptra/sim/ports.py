"""A clock for collective plans: ranks with one port each, in and out, and a delay between them.

A message takes its bytes' time of the sender's port, and of the receiver's, which need not wait for
its last byte (cut through). A sender's port serves its connections in turn, a message of each, or
so many bytes of it; a receiver's port serves messages in the order in which they come. Messages
that wait there, or on a slow path between two ports, hold up no other rank. Additions take no time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectiveOp, CollectivePlan
from megatron_adaptra.ir.conditions import HEALTHY, LinkState


@dataclass(frozen=True)
class Ports:
    """A Ports describes the rates, delays and costs of the ranks' ports.

    Args:
        out: bytes per second that each rank can send in all; inf: no limit.
        into: bytes per second that each rank can receive in all.
        delay: seconds from a port to another one.
        cost: seconds of the sender's port for each message, beside its bytes.
        turn: bytes that a connection sends before the next one's turn; inf for a whole message.
        paths: slow paths, by source and target: seconds beyond `delay`, and bytes per second, which
            other paths do not share. Jitter is not used.

    Raises:
        BadInput: a rate, delay, cost or turn is out of range, or there is no such path.
    """

    out: tuple[float, ...]
    into: tuple[float, ...]
    delay: float = 0.0
    cost: float = 0.0
    turn: float = math.inf
    paths: Mapping[tuple[int, int], LinkState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.out) != len(self.into):
            raise BadInput("rates of ports", len(self.into), f"as many as ranks: {len(self.out)}")
        for rate in (*self.out, *self.into):
            if not rate > 0:
                raise BadInput("rate of a port", rate, "above 0")
        if not self.turn >= 1:
            raise BadInput("turn of a connection", self.turn, "at least 1 byte")
        for name in ("delay", "cost"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"{name} of ports", getattr(self, name), "seconds of at least 0")
        ranks = range(len(self.out))
        for (source, target), path in self.paths.items():
            if source not in ranks or target not in ranks or source == target:
                allowed = f"between two different ones of ranks 0 to {len(ranks) - 1}"
                raise BadInput("path between ports", f"{source}-{target}", allowed)
            if not 0 <= path.delay < math.inf:
                raise BadInput("delay of a path", path.delay, "seconds of at least 0")
            if not path.bandwidth > 0:
                raise BadInput("rate of a path", path.bandwidth, "bytes per second above 0")


class Transfer(NamedTuple):
    """A message of `op`.

    It takes the source's port from `sent` to `left`, the target's from `began` to `arrived`:
    seconds.
    """

    source: int
    target: int
    op: CollectiveOp
    sent: float
    left: float
    began: float
    arrived: float


class _Part(NamedTuple):
    """Bytes of a message that cross in one turn: all of it, or some; the `last` of them or not."""

    message: Transfer
    nbytes: float
    last: bool


class _Sending(NamedTuple):
    """A message that waits for its turn, or for a further one: `done` bytes since `sent`."""

    op: CollectiveOp
    done: float = 0.0
    sent: float = -1.0


@dataclass(frozen=True)
class CollectiveRun:
    """How a plan ran: `arrivals`, and the `ends` of all ranks, in seconds; all its `transfers`."""

    arrivals: tuple[float, ...]
    ends: tuple[float, ...]
    transfers: tuple[Transfer, ...]

    @property
    def after_arrival(self) -> float:
        """Seconds from the arrival of the last rank to the end of the last one."""
        return max(self.ends) - max(self.arrivals)


def run_on_ports(
    plan: CollectivePlan, nbytes: int, ports: Ports, arrivals: Sequence[float] = ()
) -> CollectiveRun:
    """Return when each message of `plan` crosses, and when each rank ends.

    Args:
        plan: for as many ranks as there are ports.
        nbytes: of the buffer; pieces are cut to whole bytes.
        ports: of all ranks.
        arrivals: seconds at which each rank starts; all at 0 by default. What was sent to a rank
            before crosses meanwhile.

    Raises:
        BadInput: another number of ports or arrivals.
    """
    ranks = plan.ranks
    came = tuple(arrivals) or (0.0,) * ranks
    for name, count in (("ports", len(ports.out)), ("arrivals", len(came))):
        if count != ranks:
            raise BadInput(f"number of {name}", count, f"one per rank of the plan: {ranks}")
    return _Run(plan, nbytes, ports, came).run()


class _Run:
    def __init__(
        self, plan: CollectivePlan, nbytes: int, ports: Ports, came: tuple[float, ...]
    ) -> None:
        self._plan, self._ports, self._came = plan, ports, came
        self._bounds = plan.bounds(nbytes)
        self._at = [0] * plan.ranks  # the next op of each line
        self._ends = list(came)
        # Connections with something to send, by target; the port serves the first one next.
        self._queues: list[dict[int, deque[_Sending]]] = [{} for _ in came]
        self._sends = [False] * plan.ranks  # its port is in use
        self._in_free = [0.0] * plan.ranks
        self._path_free = dict.fromkeys(ports.paths, 0.0)
        self._began: dict[tuple[int, int, int], float] = {}  # source, target, tag: first part
        self._there: set[tuple[int, int, int]] = set()  # the same of those that are whole
        # Time, order of making, and a rank to go on with, or one whose port is free (~rank), or
        # a part that is at its target's port.
        self._events: list[tuple[float, int, int | _Part]] = []
        self._made = 0
        self._transfers: list[Transfer] = []

    def run(self) -> CollectiveRun:
        for rank, moment in enumerate(self._came):
            self._schedule(moment, rank)
        while self._events:
            now, _, what = heapq.heappop(self._events)
            if isinstance(what, _Part):
                self._receive(now, what)
            elif what < 0:
                self._serve(now, ~what)
            else:
                self._go_on(now, what)
        return CollectiveRun(self._came, tuple(self._ends), tuple(self._transfers))

    def _schedule(self, moment: float, what: int | _Part) -> None:
        heapq.heappush(self._events, (moment, self._made, what))
        self._made += 1

    def _nbytes(self, op: CollectiveOp) -> int:
        return self._bounds[op.piece + op.length] - self._bounds[op.piece]

    def _go_on(self, now: float, rank: int) -> None:
        """Run the line of `rank` up to a message that is not there."""
        if now < self._came[rank]:  # it will look once it has come
            return
        line = self._plan.order[rank]
        while self._at[rank] < len(line):
            op = line[self._at[rank]]
            if not self._nbytes(op):
                pass  # an empty piece has no messages
            elif op.action.sends:
                self._send(now, rank, op)
            elif any((source, rank, op.tag) not in self._there for source in op.sources(rank)):
                return
            self._at[rank] += 1
        self._ends[rank] = max(self._ends[rank], now)

    def _send(self, now: float, rank: int, op: CollectiveOp) -> None:
        """Queue the messages of the send `op`, one per target; the line goes on."""
        for target in op.ranks:
            self._queues[rank].setdefault(target, deque()).append(_Sending(op))
        if not self._sends[rank]:
            self._sends[rank] = True
            self._schedule(now, ~rank)

    def _serve(self, now: float, rank: int) -> None:
        """Send the next message of `rank`, whose port is free, or a turn's bytes of it."""
        queues, ports = self._queues[rank], self._ports
        if not queues:
            self._sends[rank] = False
            self._ends[rank] = max(self._ends[rank], now)
            return
        target, queue = next(iter(queues.items()))
        op, done, sent = queue.popleft()
        cost = 0.0 if done else ports.cost
        sent = sent if done else now
        nbytes = min(self._nbytes(op) - done, ports.turn)
        last = done + nbytes >= self._nbytes(op)
        if not last:
            queue.appendleft(_Sending(op, done + nbytes, sent))
        del queues[target]
        if queue:
            queues[target] = queue
        left = now + cost + nbytes / ports.out[rank]
        self._schedule(left, ~rank)
        path = ports.paths.get((rank, target), HEALTHY)
        begins = max(now + cost, self._path_free.get((rank, target), 0.0))
        ends = max(left, begins + nbytes / path.bandwidth)
        if (rank, target) in self._path_free:
            self._path_free[rank, target] = ends
        # So late that it takes of the target's port no more than its bytes do.
        delay = ports.delay + path.delay
        first = max(begins + delay, ends + delay - nbytes / ports.into[target])
        message = Transfer(rank, target, op, sent, left, first, math.inf)
        self._schedule(first, _Part(message, nbytes, last))

    def _receive(self, now: float, part: _Part) -> None:
        """Pass a `part` through its target's port, or deliver a message that has passed."""
        message = part.message
        source, target, op = message.source, message.target, message.op
        name = source, target, op.tag
        if message.arrived < math.inf:
            self._there.add(name)
            self._go_on(now, target)
            return
        start = max(now, self._in_free[target])
        arrived = start + part.nbytes / self._ports.into[target]
        self._in_free[target] = arrived
        began = self._began.setdefault(name, start)
        if part.last:
            whole = message._replace(began=began, arrived=arrived)
            self._transfers.append(whole)
            self._schedule(arrived, part._replace(message=whole))
