"""Watching stock Megatron from outside: when its ops ran, and what it was waiting for."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, models_of
from megatron_adaptra.base.errors import PeerLost, ScheduleError, reason_of
from megatron_adaptra.execute.guarded_probe import GuardedProbe
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line
from megatron_adaptra.measure.probe import Probe


@contextlib.contextmanager
def traced_ops(
    probe: Probe | GuardedProbe, line: Line, otherwise: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Record every forward_step and backward_step of Megatron's schedule in `probe`.

    `line`: the forwards and backwards that it runs, in order. If it runs others `otherwise` is
    called with what it was, or ScheduleError raised.
    """

    def recorded(kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
        ops = iter([op for op in line if op.kind is kind])

        def run(*args: Any, **kwargs: Any) -> Any:
            op = next(ops, None)
            given = kwargs.get("current_microbatch"), kwargs.get("vp_stage") or 0
            if op is None or (given[0] is not None and given != op[1:3]):
                what = f"Megatron is about to run {kind.value} {given}, not {op}"
                if otherwise is None:
                    raise ScheduleError(what)
                otherwise(what)
            probe.op_begins()
            result = function(*args, **kwargs)
            if op is not None:
                probe.op_ends(op)
            return result

        return run

    with patch(
        "op-times",
        forward_step=recorded(Kind.F, schedules.forward_step),
        backward_step=recorded(Kind.B, schedules.backward_step),
    ):
        yield


@contextlib.contextmanager
def timed_messages(probe: Probe | GuardedProbe) -> Iterator[None]:
    """Report to `probe` when the host calls for Megatron's own messages, for one iteration.

    With its usual settings Megatron makes the host wait there for the whole device.
    """
    original = P2PCommunicator._communicate

    def communicate(*args: Any, **kwargs: Any) -> Any:
        probe.asks()
        result = original(*args, **kwargs)
        probe.answered()
        return result

    with patch("message-names", _communicate=communicate):
        yield


@contextlib.contextmanager
def watched_messages(watchdog: Watchdog, raises: bool = True) -> Iterator[None]:
    """Show the watchdog which message Megatron's communicator waits for, for one iteration.

    A broken connection becomes PeerLost with the op and the peer where this `raises`; else the
    error is torch's own, as without it.
    """
    original = P2PCommunicator._communicate
    worker = watchdog.worker
    count = dict.fromkeys((Kind.F, Kind.B, Kind.SEND_F, Kind.SEND_B), -1)

    def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
        moves = {  # by the names that Megatron gives: without them a message has no name
            Kind.SEND_F: kwargs.get("tensor_send_next") is not None,
            Kind.SEND_B: kwargs.get("tensor_send_prev") is not None,
            Kind.F: kwargs.get("recv_prev"),
            Kind.B: kwargs.get("recv_next"),
        }
        for kind, moving in moves.items():
            count[kind] += bool(moving)
        # Of a send and a receive in one call, the receive is what takes time.
        kinds = [k for k in (Kind.F, Kind.B, Kind.SEND_F, Kind.SEND_B) if moves[k]]
        if not kinds:  # interleaved schedules call it for nothing, too
            return original(self, *args, **kwargs)
        op = Op(kinds[0], count[kinds[0]])
        peer = worker - 1 if op.kind in (Kind.F, Kind.SEND_B) else worker + 1
        peer %= len(watchdog.ranks)
        watchdog.waits_for = op, peer, time.monotonic()
        try:
            result = original(self, *args, **kwargs)
        except RuntimeError as error:
            if not raises:
                raise
            raise watchdog.lost(op, peer, PeerLost(f"gloo: {reason_of(error)}")) from error
        watchdog.waits_for = None
        watchdog.done += [Op(kind, count[kind]) for kind in kinds]
        return result

    with patch("message-names" if raises else "waited-messages", _communicate=communicate):
        yield


def counted_forwards(watchdog: Watchdog, arguments: ScheduleArgs) -> ScheduleArgs:
    """Return the `arguments` of Megatron's schedule with forwards that the watchdog sees."""
    if (forward_step := arguments.get("forward_step_func")) is None:
        return arguments
    numbers = itertools.count() if len(models_of(arguments)) == 1 else itertools.repeat(-1)

    @functools.wraps(forward_step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        watchdog.calls += 1
        watchdog.forward = next(numbers)
        result = forward_step(*args, **kwargs)
        watchdog.forward = None
        return result

    return {**arguments, "forward_step_func": counted}
