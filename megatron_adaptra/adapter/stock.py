"""Emulated slow links under stock Megatron: its own communicator, its sends held in flight.

Megatron's 1F1B sends with `torch.distributed.batch_isend_irecv`. While `emulated_sends` is in
force, a send to a neighbour over a slow link is copied and handed to the same delay line that our
own sends go through; all else goes to torch unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from megatron_adaptra.transport.emulate import LinkEmulator


@contextlib.contextmanager
def emulated_sends(emulator: LinkEmulator, ranks: Sequence[int]) -> Iterator[None]:
    """Around one iteration; `ranks[i]` is the global rank of stage i. Undone on exit."""
    kept: list[_InFlight] = []  # gloo cancels a send whose handle is dropped before it is received
    stage_of = {rank: stage for stage, rank in enumerate(ranks)}
    batch = dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Any]:
        slow = [
            op
            for op in ops
            if op.op is dist.isend and op.peer in stage_of and emulator.holds(stage_of[op.peer])
        ]
        held = [_hold(op, emulator, stage_of[op.peer]) for op in slow]
        kept.extend(held)
        direct = [op for op in ops if op not in slow]
        return [*held, *(batch(direct) if direct else [])]

    dist.batch_isend_irecv = batch_isend_irecv
    try:
        yield
    finally:
        dist.batch_isend_irecv = batch


def _hold(op: dist.P2POp, emulator: LinkEmulator, stage: int) -> _InFlight:
    copy = op.tensor.detach().clone()  # Megatron frees the output once its send is done
    work = _InFlight()

    def deliver() -> None:
        work.work = dist.isend(copy, op.peer, op.group, op.tag)

    emulator.hold(stage, copy.numel() * copy.element_size(), deliver)
    return work


class _InFlight:
    """A send that the network has taken over: its sender need not wait."""

    work: Any = None  # the real one, kept until it is done

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
