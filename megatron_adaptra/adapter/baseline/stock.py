"""Emulated slow links and workers under stock Megatron: its own schedule and communicator.

Megatron's schedules send with `torch.distributed.batch_isend_irecv`, or, where messages of virtual
stages overlap, with `isend`. While `EmulatedSends.slow` is in force, a send to a neighbour over a
slow link is copied and handed to the same kind of delay line that our own sends go through; all
else goes to torch unchanged. While `slowed_ops` is, each op of the schedule waits where ours do.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.base import waits
from megatron_adaptra.base.exits import wait_at_exit
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.emulate.worker_emulator import WorkerEmulator
from megatron_adaptra.ir.op import Kind


class EmulatedSends:
    """A stand-in for torch's sends puts those over emulated links on the `emulator`'s delay line.

    `emulator`: of this object alone, which closes it. `ranks[i]`: the global rank of its stage, or
    worker, i. One object serves the whole job: what an iteration sends last is delivered after its
    end. Gloo cancels a send whose handle is dropped before the message is received, and only a wait
    shows that it was: a thread waits, and keeps the handle.
    """

    def __init__(self, emulator: LinkEmulator, ranks: Sequence[int]) -> None:
        self._emulator = emulator
        self._stage_of = {rank: stage for stage, rank in enumerate(ranks)}
        self._kept: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._keep, name="adaptra-emulated", daemon=True)
        wait_at_exit(self._thread)

    @contextlib.contextmanager
    def slow(self, iteration: int) -> Iterator[None]:
        """Delay sends over slow links in a `with`, by the emulator's rules for this `iteration`."""
        self._emulator.iteration = iteration
        batch, single = dist.batch_isend_irecv, dist.isend

        def isend(tensor: torch.Tensor, dst: int | None = None, *args: Any, **kwargs: Any) -> Any:
            if dst is None or not self._holds(dst):
                return single(tensor, dst, *args, **kwargs)
            copy = tensor.detach().clone()  # Megatron frees the output once its send is done
            return self._hold(copy, dst, lambda: single(copy, dst, *args, **kwargs))

        def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Any]:
            slow = [op for op in ops if op.op is dist.isend and self._holds(op.peer)]
            held = [dist.isend(op.tensor, op.peer, op.group, op.tag) for op in slow]
            direct = [op for op in ops if op not in slow]
            return [*held, *(batch(direct) if direct else [])]

        with patch("emulated-sends", batch_isend_irecv=batch_isend_irecv, isend=isend):
            yield

    def close(self) -> None:
        """Wait until all that is held has been received, some seconds at most."""
        self._kept.put(None)
        if self._thread.ident is not None:
            self._thread.join(waits.END)
        self._emulator.close()

    def _holds(self, rank: int) -> bool:
        return rank in self._stage_of and self._emulator.holds(self._stage_of[rank])

    def _hold(self, message: torch.Tensor, rank: int, send: Callable[[], Any]) -> _InFlight:
        work = _InFlight()

        def deliver() -> None:
            with contextlib.suppress(RuntimeError):  # the peer is gone: its messages end the job
                work.work = send()
            work.delivered.set()

        self._emulator.hold(self._stage_of[rank], message.nbytes, deliver)
        self._kept.put(work)
        if self._thread.ident is None:
            self._thread.start()
        return work

    def _keep(self) -> None:
        while (held := self._kept.get()) is not None:
            held.delivered.wait()
            if held.work is not None:
                with contextlib.suppress(RuntimeError):
                    held.work.wait(timedelta(seconds=waits.FOREVER))


@contextlib.contextmanager
def slowed_ops(emulator: WorkerEmulator) -> Iterator[None]:
    """Slow one iteration in a `with`: forwards and backwards end when the `emulator` has waited."""

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
    """Return whether Megatron's schedule `function` frees tensors that gloo has not sent yet.

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
    """Keep Megatron's interleaved schedule from freeing tensors too early, in a `with`.

    `config`: the model's. `stages`: of the pipeline; with two of them Megatron needs the overlap of
    messages, and so keeps it.
    """
    waits = {"overlap_p2p_comm": False, "batch_p2p_comm": True} if stages > 2 else {}
    return patch("whole-outputs", config, deallocate_pipeline_outputs=False, **waits)


class _InFlight:
    """A send in flight lets its sender go on: the network has taken it over.

    `work`: torch's own handle, once it is `delivered`; None where its peer was gone by then.
    """

    def __init__(self) -> None:
        self.work: Any = None
        self.delivered = threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
