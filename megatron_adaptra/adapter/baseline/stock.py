"""Emulated slow links and workers under stock Megatron: its own schedule and communicator.

Megatron's 1F1B sends with `torch.distributed.batch_isend_irecv`. While `emulated_sends` is in
force, a send to a neighbour over a slow link is copied and handed to the same delay line that our
own sends go through; all else goes to torch unchanged. While `slowed_ops` is, each of its ops
waits where ours do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.runtime.worker_emulator import WorkerEmulator
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

    with patch("emulated-sends", batch_isend_irecv=batch_isend_irecv):
        yield


@contextlib.contextmanager
def slowed_ops(emulator: WorkerEmulator) -> Iterator[None]:
    """Around one iteration: forwards and backwards end when the `emulator` has waited."""

    def slowed(function: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            since = emulator.work()
            result = function(*args, **kwargs)
            emulator.wait(since, kind)
            return result

        return run

    with patch(
        "emulated-workers",
        forward_step=slowed(schedules.forward_step, Kind.F),
        backward_step=slowed(schedules.backward_step, Kind.B),
    ):
        yield


def frees_too_early(function: Any, config: Any, waits: bool) -> bool:
    """Whether a schedule of Megatron's, `function`, frees tensors that gloo has not sent yet.

    `config`: the model's. `waits`: see Profile.
    """
    return (
        function is schedules.forward_backward_pipelining_with_interleaving
        and config.overlap_p2p_comm
        and config.deallocate_pipeline_outputs
        and not waits
        and dist.get_backend(mpu.get_pipeline_model_parallel_group()) == "gloo"
    )


def without_overlap(config: Any, stages: int) -> contextlib.AbstractContextManager[Any]:
    """Around a call of Megatron's interleaved schedule that would free too early.

    `config`: the model's. `stages`: of the pipeline; between two Megatron cannot do without its
    overlap, and there nothing is freed early.
    """
    waits = {"overlap_p2p_comm": False, "batch_p2p_comm": True} if stages > 2 else {}
    return patch("whole-outputs", config, deallocate_pipeline_outputs=False, **waits)


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
