"""Switching the plugin on in a running Megatron, and off again."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.adapter.compat.patches import PATCHES, Job, patch, resolve
from megatron_adaptra.adapter.compat.profiles import misfit, profile, verify
from megatron_adaptra.base.errors import UnsupportedBackend
from megatron_adaptra.base.exits import at_exit
from megatron_adaptra.base.log import log_line
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.device.base import HOST, Device
from megatron_adaptra.diagnose.book import FindingBook

_active: list[Activation] = []  # at most one


class Activation:
    """An activation holds what `activate` has put in place, and takes it back.

    `session`: this rank's plugin. `over`: all has been taken back. `reductions`: the job's
    GradientReduction and ShardedReduction, where plans reduce. `shares`: this rank's Shares, with
    `--adaptra-sync` other than full.
    """

    def __init__(self, session: Any) -> None:
        self.session, self.over = session, False
        self.reductions: list[Any] = []
        self.shares: Any = None
        self._stack = contextlib.ExitStack()
        self._stack.callback(session.close)
        _active.append(self)
        at_exit(self, _leave)

    def undo_with(self, undo: Callable[[], None]) -> None:
        """Call `undo` at the end, too; the last one given is called first."""
        self._stack.callback(undo)

    def reduce_by(self, reduction: Any) -> None:
        """Keep a `reduction` of PlannedCollectives that is in place, and close it at the end."""
        self.reductions.append(reduction)
        self.undo_with(reduction.close)

    def undo(self) -> None:
        """Put everything back; a second call does nothing. An error is logged, not raised."""
        self.over = True
        with contextlib.suppress(ValueError):
            _active.remove(self)
        try:
            self._stack.close()
        except Exception as error:
            log_line(f"while the plugin was taken out: {error!r}")


def activate(
    config: AdaptraConfig | None = None, *, program: bool = False, clips: bool = False,
    demo: bool = False,
) -> Activation:  # fmt: skip
    """Patch Megatron for a job with these settings; call it after its groups have been made.

    All ranks of the job call it. An error is raised before anything is patched.

    Args:
        config: the job's settings, the same on all ranks; the defaults if None.
        program: it is Megatron's own training program, entered through our flags.
        clips: gradients are clipped by their norm.
        demo: stock Megatron takes turns with the plugin, and is watched.

    Returns:
        The activation, whose `undo` puts everything back. At most one is active in a process.

    Raises:
        UnsupportedMegatron: this release is not known, or a function that we patch is not as in it.
        UnsupportedBackend: messages are on GPUs, and some rank cannot open its own.
        BadInput: a rule of `--adaptra-emulate-link` or `--adaptra-emulate-worker` cannot be used.
        PeerLost: messages are on GPUs, and some rank has not come (see PlanGroup.gather).
        RuntimeError: it is active already.
    """
    config, row = config or AdaptraConfig(), profile()  # the version, before an import of Megatron
    if _active:
        raise RuntimeError("megatron_adaptra is active already; undo() the first activation")
    verify(row)
    from megatron.core import parallel_state as mpu

    stages = mpu.get_pipeline_model_parallel_world_size()
    chunks = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    device = _gpu_of_all() if messages_on_gpus() else HOST
    job = Job(
        config, stages, chunks, mpu.get_data_parallel_world_size(), program=program, clips=clips,
        demo=demo, device=device.behind,
    )  # fmt: skip
    resolved, original = resolve(job), _schedule()
    from megatron_adaptra.adapter.pipeline.session import Session

    session = Session(resolved.without_missing(config), row, resolved, device, not program)
    for line in resolved.lines():
        session.context.say(line)

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        stock = original(*args, **kwargs)

        # Megatron fetches this once before its loop: it reads the plan in force at every call.
        @functools.wraps(stock)
        def forward_backward(**arguments: Any) -> Any:
            if activation.over:
                return stock(**arguments)
            if activation.shares is None:
                return session.forward_backward(stock, arguments)
            run = functools.partial(session.forward_backward, stock)
            return activation.shares.forward_backward(run, arguments)

        return forward_backward

    activation = Activation(session)
    activation.undo_with(
        patch("schedule", get_forward_backward_func=get_forward_backward_func).close
    )
    if config.sync != "full":
        from megatron_adaptra.adapter.shares.shares import Shares

        activation.shares = Shares(session, reductions=lambda: activation.reductions)
        activation.undo_with(activation.shares.close)
    context = session.context

    def new_book() -> FindingBook:  # in the first reduction of a group, which counts them from 0
        return context.job_log.new_book(session.iteration)

    common = session.config, context.say, context.acts, new_book
    if resolved.uses("gradients"):
        from megatron_adaptra.adapter.step.gradients import GradientReduction

        activation.reduce_by(GradientReduction(*common))
    if resolved.uses("shards"):
        from megatron_adaptra.adapter.step.gradients import ShardedReduction

        activation.reduce_by(ShardedReduction(*common))
    return activation


def messages_on_gpus() -> bool:
    """Return whether the pipeline's messages are in GPUs' memory, once Megatron's groups exist.

    Raises UnsupportedBackend where they go by another backend than gloo and NCCL.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    backend: str = dist.get_backend(mpu.get_pipeline_model_parallel_group())
    if backend not in ("gloo", "nccl"):
        raise UnsupportedBackend(
            f"the pipeline's messages go by {backend}; gloo and nccl are supported"
        )
    return backend == "nccl"


def _gpu_of_all() -> Device:
    """Open this rank's GPU where all ranks can open theirs.

    Raises UnsupportedBackend on all ranks where some rank cannot: all train as stock, or none.
    """
    import torch

    from megatron_adaptra.adapter.pipeline.job_gather import reason_anywhere
    from megatron_adaptra.device.cuda import device_of

    device: Device = HOST
    reason = ""
    try:
        device = device_of(torch.device(torch.cuda.current_device()))
    except Exception as error:  # whatever it is, Megatron can go on as stock
        reason = f"messages on this GPU are out of reach: {error}"
    if reason := reason_anywhere(reason):
        device.close()
        raise UnsupportedBackend(reason)
    return device


def _leave(activation: Activation) -> None:
    """Undo an activation as the process ends; not after an error, to wait for no other rank."""
    if not hasattr(sys, "last_value"):
        activation.undo()


def _schedule() -> Any:
    """Return Megatron's get_forward_backward_func, the same wherever its name is bound.

    Raises UnsupportedMegatron where another function is bound to the name, or where it gives a
    schedule that is not Megatron's.
    """
    from megatron_adaptra.adapter.limits import not_megatrons

    first, *others = (getattr(*find(target)) for target in PATCHES["schedule"].present())
    for target, other in zip(PATCHES["schedule"].present()[1:], others, strict=True):
        if other is not first:
            raise misfit(f"something else has replaced {target}")
    try:
        reason = not_megatrons(first())
    except Exception as error:
        raise misfit(f"get_forward_backward_func() has failed: {error!r}") from error
    if reason:
        raise misfit(reason)
    return first
