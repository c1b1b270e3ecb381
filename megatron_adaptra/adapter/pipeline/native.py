"""The native seam: Megatron's own schedule, over our messages and with our warmup depth.

Megatron calls six methods of the communicator that it is given, and reads its warmup from the
same object. The order of its calls is the line of the stage's program, so every call is checked
against it: a Megatron that runs another order is found out at the first op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_adaptra.adapter.compat.profiles import Profile
from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line, warmup_of


class AdaptraCommunicator(P2PCommunicator):  # type: ignore[misc]  # megatron is untyped
    """A communicator carries one iteration's messages of one worker; `line`: its ops, in order.

    `pp_group`, `config`: as Megatron's own communicator takes them. `begins`: is called with each
    forward before Megatron runs it. The methods take what Megatron's do: `tensor_shapes` of what is
    received, one or a list, the same for all our messages; `output_tensors` and
    `input_tensor_grads`, one or a list of one; `is_first_stage` and `is_last_stage`, where there is
    nothing to receive or to send. They raise ScheduleError when Megatron leaves the plan's order,
    PeerLost when a message does not come.
    """

    def __init__(
        self,
        pp_group: Any,
        config: Any,
        profile: Profile,
        line: Line,
        mailbox: Mailbox,
        begins: Callable[[Op], None] | None = None,
    ) -> None:
        super().__init__(pp_group=pp_group, config=config)
        self._line, self._at, self._mailbox, self._begins = line, 0, mailbox, begins
        self._depth = warmup_of(line)
        if profile.depth == "pp_group":
            self.pp_group = WarmupGroup(pp_group, self._depth)

    @property
    def total_stages(self) -> int:
        """The total that gives our warmup: from 0.17 on, `total_stages - current_stage - 1`."""
        return self._depth + self.current_stage

    @property
    def current_stage(self) -> int:
        """This stage's index."""
        return self._mailbox.neighbours.stage

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Receive the next forward's input."""
        with self._timed("forward-recv", is_first_stage):
            return self._receive(Kind.F, tensor_shapes, is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Receive the next backward's gradient."""
        with self._timed("backward-recv", is_last_stage):
            return self._receive(Kind.B, tensor_shapes, is_last_stage)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send a forward's output."""
        with self._timed("forward-send", is_last_stage):
            self._send(Kind.F, output_tensors)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send a backward's gradient of the input."""
        with self._timed("backward-send", is_first_stage):
            self._send(Kind.B, input_tensor_grads)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool
    ) -> Any:
        """Send a forward's output, then receive the next backward's gradient."""
        with self._timed("forward-send-backward-recv", is_last_stage):
            self._send(Kind.F, output_tensors)
            return self._receive(Kind.B, tensor_shapes, is_last_stage)

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        """Send a backward's gradient, then receive the next forward's input."""
        with self._timed("backward-send-forward-recv", is_first_stage):
            self._send(Kind.B, input_tensor_grads)
            return self._receive(Kind.F, tensor_shapes, is_first_stage)

    def finish(self) -> None:
        """Raise ScheduleError unless Megatron has run all ops."""
        if left := self._line[self._at :]:
            raise ScheduleError(f"Megatron is done, the plan has {', '.join(map(str, left))} left")

    @contextlib.contextmanager
    def _timed(self, name: str, at_end: bool) -> Iterator[None]:
        """Run Megatron's timer of this `name`, which its own communicator runs at every message."""
        timers = None if at_end else self.config.timers
        if timers is None:
            yield
            return
        timers(name, log_level=2).start()
        try:
            yield
        finally:
            timers(name).stop()

    def _receive(self, kind: Kind, shapes: Any, at_end: bool) -> Any:
        """Go on to the next compute op: post the receives before it, and take what it needs."""
        op = self._next()
        while not op.kind.computes:
            self._mailbox.post(op)
            self._at += 1
            op = self._next()
        if op.kind is not kind:
            raise ScheduleError(f"Megatron is about to run {kind.value}, the plan says {op}")
        tensor = None if at_end else self._mailbox.take(op)
        if kind is Kind.F and self._begins is not None:
            self._begins(op)
        if tensor is not None and kind is Kind.F:
            tensor.requires_grad_()
        self._mailbox.probe.op_begins()
        several = isinstance(shapes, (list, tuple)) and not isinstance(shapes[0], int)
        return [tensor] if several else tensor

    def _send(self, kind: Kind, tensors: Any) -> None:
        """End the op that ran since the last receive, and send what it made."""
        op = self._next()
        if op.kind is not kind:
            raise ScheduleError(f"Megatron has run {kind.value}, the plan says {op}")
        self._mailbox.probe.op_ends(op)
        self._at += 1
        if self._at < len(self._line) and self._line[self._at].kind in (Kind.SEND_F, Kind.SEND_B):
            tensor = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
            self._mailbox.send(self._line[self._at], tensor)
            self._at += 1

    def _next(self) -> Op:
        if self._at >= len(self._line):
            raise ScheduleError("Megatron runs more ops than the plan has")
        return self._line[self._at]


class WarmupGroup:
    """A stand-in for a process `group` gives `depth` as `size() - rank()`, Megatron's warmup.

    First and last stage are found by `rank() == 0` and `rank() == size() - 1`, which stay true.
    """

    def __init__(self, group: Any, depth: int) -> None:
        self._group, self._depth = group, depth

    def rank(self) -> int:
        """Return the group's own rank."""
        return _Rank(self._group.rank())

    def size(self) -> int:
        """Return the group's own size; minus the rank it is `depth`."""
        return _Size(self._group.size(), self._depth)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class _Rank(int):
    """A _Rank marks a number as a rank, so that `_Size` can distinguish it from a plain one."""


class _Size(int):
    depth: int

    def __new__(cls, value: int, depth: int) -> _Size:
        size = super().__new__(cls, value)
        size.depth = depth
        return size

    def __sub__(self, other: int) -> int:
        return self.depth if isinstance(other, _Rank) else int(self) - other
