"""Patches of an iteration's end, made once Megatron has its model and its optimizer.

The two ends of a tied embedding need not wait for each other's gradients. The last stage has its
share long before the first one, and sends it at once. The sum is there when the first stage needs
it. The last one would wait a delay of the link for the other share, and all that comes after it
would, too; but it does not read the sum before its step: a tied weight counts for the gradient norm
on the first stage alone. So it goes on, and takes the sum when the norm has come, by the same
links.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.adapter.step.reruns import Reruns
from megatron_adaptra.adapter.step.step_result import StepResultSync
from megatron_adaptra.execute.small.collective import SmallCollective
from megatron_adaptra.execute.small.small_collectives import DeferHook


def attach(session: Session, built: Any) -> contextlib.ExitStack:
    """Patch what a step waits for; `built`: by Megatron's `setup_model_and_optimizer`.

    A collective. To close the returned stack undoes the patches.
    """
    from megatron.training import get_args, get_timers

    model, optimizer, scheduler = built[:3]
    args, patches = get_args(), session.patches
    with contextlib.ExitStack() as stack:
        if optimizer is None:
            return stack
        if patches.uses("step-result"):
            session.step_result = StepResultSync(optimizer, scheduler, session)
            stack.enter_context(session.step_result.patched())
        if args.clip_grad > 0 and patches.uses("small-collectives"):
            embedding = _defer_hook(args, session, model, optimizer)
            if embedding is not None:
                session.defer_hooks.append(embedding)
        if patches.uses("reruns"):
            session.reruns = Reruns(get_timers(), session.context.say)
            session.defer_hooks.append(session.reruns.defer)
            stack.enter_context(session.reruns.patched())
        return stack.pop_all()


def _defer_hook(args: Any, session: Any, model: Sequence[Any], optimizer: Any) -> DeferHook | None:
    """Return a hook for SmallCollectives; None where gradients are read before the norm has come.

    `args`: Megatron's. `session`: this rank's. `model`: its chunks. `optimizer`: Megatron's.
    """
    first, last = session.stage == 0, session.stage == session.stages - 1
    chunk = model[0] if first else model[-1]
    tied = [p for p in chunk.parameters() if getattr(p, "shared_embedding", False)]
    if not (first or last) or len(tied) != 1 or _looked_at(args, optimizer):
        return None

    def defer(collective: SmallCollective, tensor: torch.Tensor) -> Callable[[], None] | None:
        gradient = getattr(tied[0], "main_grad", None)
        if gradient is None or gradient.data_ptr() != tensor.data_ptr():
            return None
        if gradient.dtype != torch.float32 or (last and not getattr(tied[0], "shared", False)):
            return None
        collective.hidden = True  # the first stage finds it there
        return (lambda: None) if last else None

    return defer


def _looked_at(args: Any, optimizer: Any) -> bool:
    """Return whether something reads or scales gradients between their reduction and their norm."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return bool(
        args.clip_grad <= 0  # there is no norm
        or getattr(args, "calculate_per_token_loss", False)
        or getattr(args, "save_wgrads_interval", None)
        or any(getattr(part, "grad_scaler", None) is not None for part in parts)
    )
