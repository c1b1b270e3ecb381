"""One stage's messages of one iteration: posts, takes and sends by op, over any Transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_adaptra.base.errors import PeerLost, ScheduleError
from megatron_adaptra.execute.guarded_probe import GuardedProbe
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Exchange, Neighbours, UnusedPosts
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.measure.probe import Probe
from megatron_adaptra.transport.base import Stamps, Transport, Work

_RING = 16  # iterations before a tag comes back
_MICROBATCHES, _PARTS = 1 << 18, 255  # as many have tags; parts are chunks, or homes
_POST_OF = {Kind.F: Kind.POST_F, Kind.B: Kind.POST_B, Kind.I: Kind.POST_B}


class Mailbox:
    """A mailbox delivers `F3`'s input and `B3`'s gradient, and sends what they make.

    A send returns at once and owns a copy; a receive is posted by `post` and awaited by `take`.

    Args:
        neighbours: the targets and sources of this worker's messages in the first iteration.
        transport: carries the messages; its peers are workers.
        probe: gets the times of each message that arrives.
        watchdog: keeps what this rank waits for, and makes the PeerLost that names it.
        timeout: seconds that one `take` waits for its message, `discard` for each of its messages,
            and `finish` and `close` for all sends together; then PeerLost names op and peer.
        gradients: another transport for these, where two stages exchange both kinds over one link:
            messages of one link are awaited in the order of their posts.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        transport: Transport,
        probe: Probe | GuardedProbe,
        watchdog: Watchdog,
        timeout: float,
        gradients: Transport | None = None,
    ) -> None:
        self.neighbours, self.probe = neighbours, probe
        self._transports = {Kind.F: transport, Kind.B: gradients or transport}
        self.watchdog, self.timeout = watchdog, timeout
        self._new: Callable[[], torch.Tensor] = lambda: torch.empty(0)
        self._iteration = 0
        self._posted: dict[Exchange, tuple[Work, torch.Tensor]] = {}
        self._sent: list[tuple[Op, int, Work]] = []
        self._sent_before: list[tuple[Op, int, Work]] = []

    def begin(
        self, iteration: int, new: Callable[[], torch.Tensor], routes: Routes | None = None
    ) -> None:
        """Start `iteration`.

        `new()` makes a tensor of one message's shape, dtype and device. `routes`: of its
        microbatches; None for those of the iteration before.
        """
        self._iteration, self._new = iteration, new
        if routes is not None:
            self.neighbours = replace(self.neighbours, routes=routes)

    def post(self, op: Op) -> None:
        """Post the receive that PF3 or PB3 names, unless it is posted already."""
        exchange = self.neighbours.exchange(op)
        if exchange not in self._posted:
            buffer, (made, source) = self._new(), exchange
            work = self._transports[made.kind].irecv(buffer, source, self._tag(made))
            self._posted[exchange] = work, buffer

    def buffer(self, op: Op) -> torch.Tensor:
        """Return the tensor that `take` will return; its contents have not arrived yet."""
        return self._posted[self._awaited(op)][1]

    def take(self, op: Op) -> torch.Tensor:
        """Wait for the tensor that `op` needs, and return it. Raises PeerLost if it is late."""
        exchange = self._awaited(op)
        work, buffer = self._posted.pop(exchange)
        stamps = self._wait(work, op, exchange.peer, self.timeout)
        self.watchdog.done.append(op)
        stamps.nbytes = buffer.nbytes
        self.probe.arrived(exchange.peer, exchange.made, stamps)
        return buffer

    def send(self, op: Op, tensor: torch.Tensor) -> None:
        """Send what SF3 or SB3 names; the tensor may be freed as soon as this returns."""
        made, target = self.neighbours.exchange(op)
        work = self._transports[made.kind].isend(tensor, target, self._tag(made))
        self._sent.append((op, target, work))
        self.watchdog.done.append(op)

    def discard(self, unused: UnusedPosts) -> None:
        """Clear the links of an iteration that will not run: every posted receive gets something.

        All stages call it together. Raises PeerLost as `take` does.
        """
        for op in unused.to_send:
            self.send(op, self._new())
        for op in unused.to_discard:
            exchange = self.neighbours.exchange(op)
            work, _ = self._posted.pop(exchange)
            self._wait(work, op, exchange.peer, self.timeout)

    def finish(self) -> None:
        """End the iteration. Sends are waited for one iteration late: by then they are done.

        Raises PeerLost if one is not.
        """
        waiting, self._sent_before, self._sent = self._sent_before, self._sent, []
        self._await(waiting)

    def close(self) -> None:
        """Wait for the last sends, so that no peer lacks them. Raises PeerLost like `finish`."""
        self._await(self._sent_before + self._sent)
        self._sent, self._sent_before = [], []

    def _awaited(self, op: Op) -> Exchange:
        return self.neighbours.exchange(op._replace(kind=_POST_OF[op.kind]))

    def _await(self, sends: list[tuple[Op, int, Work]]) -> None:
        deadline = time.monotonic() + self.timeout
        for op, target, work in sends:
            self._wait(work, op, target, max(0.01, deadline - time.monotonic()))

    def _wait(self, work: Work, op: Op, peer: int, timeout: float) -> Stamps:
        self.watchdog.waits_for = op, peer, time.monotonic()
        try:
            stamps = self._patiently(work, timeout)
        except PeerLost as error:
            raise self.watchdog.lost(op, peer, error) from error
        self.watchdog.waits_for = None
        return stamps

    def _patiently(self, work: Work, timeout: float) -> Stamps:
        late = self.watchdog.late
        try:
            return work.wait(min(late, timeout))
        except PeerLost:
            if late >= timeout:
                raise
        if not work.done():
            self.watchdog.say_late(timeout - late)
        return work.wait(timeout - late)  # what has failed raises again

    def _tag(self, made: Op) -> int:
        """Return the message's tag: iteration, kind, chunk or home, and microbatch, in 31 bits."""
        # Several replicas have no chunks.
        what, part = ("chunk", made.chunk) if made.home is None else ("home", made.home)
        if part >= _PARTS or made.microbatch >= _MICROBATCHES:
            raise ScheduleError(
                f"microbatch {made.microbatch} of {what} {part} has no tag: there are tags "
                f"for {_MICROBATCHES} microbatches and {_PARTS} {what}s"
            )
        made_by = (part << 1) | (made.kind is Kind.F)
        return (self._iteration % _RING) << 27 | made_by << 18 | made.microbatch
