"""The native seam of interleaved schedules: Megatron's own, over our messages, with our warmup.

Megatron asks for a message when it could come, and waits where it is needed, if its messages
overlap; so a call lets them. It runs its forwards in one fixed order and its backwards in another;
how many forwards come first it reads from the process group (`get_pp_rank_microbatches`):
`(size - rank - 1) * 2`, and as many more as one turn through all chunks but the last takes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.adapter.pipeline.native import WarmupGroup
from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.ir.deps import remote_need
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import Line, warmup_of

Expected = tuple[torch.Tensor | None, dict[str, Any]]  # to be filled, and what waits for that


class ChunkCommunicator(P2PCommunicator):  # type: ignore[misc]  # megatron is untyped
    """One iteration's communicator of one stage with several `chunks`; `line`: its ops, in order.

    `pp_group`, `config`: as Megatron's own communicator takes them. The methods take what
    Megatron's do: the `output_tensor` and `input_tensor_grad` to send, or None; `recv_prev` and
    `recv_next`, whether to receive; `tensor_shapes` and `tensor_shape`, which are those of all our
    messages; `is_first_stage` and `is_last_stage`, where there is nothing to receive; with
    `overlap_p2p_comm` they return a tensor that is not there yet, and what to wait for. They raise
    ScheduleError when Megatron leaves the plan's order, PeerLost when a message does not come.
    """

    def __init__(
        self, pp_group: Any, config: Any, chunks: int, line: Line, mailbox: Mailbox
    ) -> None:
        super().__init__(pp_group=pp_group, config=config)
        # Of a line that begins with w forwards Megatron calls w - 1 the warmup: the last of them is
        # the first of the pairs; where all come first, all are.
        forwards = sum(op.kind is Kind.F for op in line)
        depth = warmup_of(line)
        ahead = depth - (depth < forwards) - (chunks - 1) * pp_group.size()
        self.pp_group = WarmupGroup(pp_group, _Steps(ahead))
        self._line, self._at, self._mailbox = line, 0, mailbox
        stage, routes = mailbox.neighbours.stage, Routes(mailbox.neighbours.stages, chunks)

        def awaited(kind: Kind) -> deque[Op]:
            ops = (op for op in line if op.kind is kind)
            return deque(op for op in ops if remote_need(op, stage, routes) is not None)

        self._awaited = {kind: awaited(kind) for kind in (Kind.F, Kind.B)}
        self._to_send = {
            kind: deque(op for op in line if op.kind is kind) for kind in (Kind.SEND_F, Kind.SEND_B)
        }

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """The next forward's input."""
        return None if is_first_stage else self._receive(Kind.F)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """The next backward's gradient."""
        return None if is_last_stage else self._receive(Kind.B)

    def send_forward_recv_forward(
        self, output_tensor: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send a forward's output; receive the next one's input."""
        self._send(Kind.SEND_F, output_tensor)
        if overlap_p2p_comm:
            return self._expect(Kind.F, "recv_prev", recv_prev)
        return self._receive(Kind.F) if recv_prev else None

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Any,
        recv_next: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send a backward's gradient; receive that of the next one."""
        self._send(Kind.SEND_B, input_tensor_grad)
        if overlap_p2p_comm:
            return self._expect(Kind.B, "recv_next", recv_next)
        return self._receive(Kind.B) if recv_next else None

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Any,
        input_tensor_grad: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
    ) -> Any:
        """Send what a forward and a backward have made; receive what the next ones need.

        Megatron calls it where messages do not overlap: in a rehearsal, never in `overlapping`.
        """
        self._send(Kind.SEND_F, output_tensor)
        self._send(Kind.SEND_B, input_tensor_grad)
        wanted = (Kind.F, recv_prev), (Kind.B, recv_next)
        return [self._receive(kind) if receives else None for kind, receives in wanted]

    def finish(self) -> None:
        """Raise ScheduleError unless everything has been sent and received."""
        left = [op for ops in (*self._awaited.values(), *self._to_send.values()) for op in ops]
        if left:
            raise ScheduleError(f"Megatron is done, the plan has {', '.join(map(str, left))} left")

    def _send(self, kind: Kind, tensor: Any) -> None:
        if tensor is not None:
            self._mailbox.send(self._next(self._to_send[kind], "sends"), tensor)

    def _receive(self, kind: Kind) -> torch.Tensor:
        op = self._next(self._awaited[kind], "awaits")
        self._post_upto(op)
        return self._mailbox.take(op).requires_grad_()

    def _expect(self, kind: Kind, name: str, wanted: bool) -> Expected:
        if not wanted:
            return None, {}
        op = self._next(self._awaited[kind], "awaits")
        self._post_upto(op)
        return self._mailbox.buffer(op).requires_grad_(), {name: _Wait(self._mailbox, op)}

    def _post_upto(self, op: Op) -> None:
        """Post what stands before an op. Megatron asks for some messages before others run."""
        end = self._line.index(op)
        for before in self._line[self._at : end]:
            if before.kind in (Kind.POST_F, Kind.POST_B):
                self._mailbox.post(before)
        self._at = max(self._at, end)

    def _next(self, ops: deque[Op], verb: str) -> Op:
        if not ops:
            raise ScheduleError(f"Megatron {verb} more messages than the plan has")
        return ops.popleft()


def overlapping(config: Any) -> contextlib.AbstractContextManager[Any]:
    """While Megatron's schedule runs over our communicator; `config`: the model's."""
    return patch(
        "interleaved-messages",
        config,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        overlap_p2p_comm_warmup_flush=False,
    )


class _Wait:
    """Megatron's handle of a message that it has asked for."""

    def __init__(self, mailbox: Mailbox, op: Op) -> None:
        self._mailbox, self._op = mailbox, op

    def wait(self) -> None:
        self._mailbox.take(self._op)


class _Steps(int):
    """Stands for `size - rank`: `(itself - 1) * 2` is its number, even or odd."""

    def __sub__(self, other: int) -> _Steps:
        return self

    def __mul__(self, other: int) -> int:
        return int(self)
